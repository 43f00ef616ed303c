"""A recurrent layer token by token, in one launch: convolution, unit length, recurrence and skip.

Made for rows of few tokens: a state is read once per row and written once per kept token, which is all the traffic that
decode needs. Rows of any length are served, but their tokens follow one another. Rows of at most one token have a
kernel of their own, whose programs read the next block of a state while they compute one.

Knows tensors and slots. Does not know specs, batches or plans.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.gates import activated
from sightline.kernels.triton.overlap import let_next_begin, overlap_settings, wait_for_results
from sightline.kernels.triton.recurrent_tokens import TokenRows, TokenSlots, input_at

_TILE = 8192
"""Elements of a state that four warps hold in registers."""
_WARP_TILE = 4096
"""Elements of a state that a warp holds."""
_MANY_PROGRAMS = 4096
"""Heads of all rows that keep a device busy with a program each."""


@dataclass(frozen=True)
class RecurrentRule:
    """What a recurrent layer computes; see `attention.spec.RecurrentSpec`."""

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    scale: float
    delta_rule: bool
    channel_decay: bool
    unit_keys: bool
    conv_width: int


class RecurrentLayer(NamedTuple):
    """One layer's inputs and states."""

    mixed: Tensor
    """[num_tokens, channels]; the channels of a token are contiguous."""
    decay: Tensor
    """[num_tokens, heads] or [num_tokens, heads, key_dim] fp32, the latter contiguous in the last dimension."""
    beta: Tensor
    """[num_tokens, heads] fp32."""
    conv_weight: Tensor | None
    """[channels, conv_width], contiguous."""
    conv_bias: Tensor | None
    """[channels]."""
    skip: Tensor | None
    """[heads] fp32."""
    states: Tensor | None
    """[num_slots, heads, key_dim, value_dim] fp32, each slot contiguous. None: rows begin with zeros and keep none."""
    tails: Tensor | None
    """[num_slots, channels, conv_width - 1] fp32, each slot contiguous. None as above, or without a convolution."""


class StepTile(NamedTuple):
    """How much of a state a program computes."""

    values: int
    """Values of a block, which is held in registers."""
    warps: int
    blocks: int = 1
    """Blocks of a program, if rows have one token."""
    stages: int = 1
    """Blocks that are read ahead, the one that is computed included."""


def choose_step_tile(rule: RecurrentRule, num_rows: int, longest: int) -> StepTile:
    """Chooses blocks of one warp, or wider ones of several warps if there are enough programs to keep a device busy."""
    keys, most = triton.next_power_of_2(rule.key_dim), triton.next_power_of_2(rule.value_dim)
    wide = min(most, max(1, _TILE // keys))
    blocks = triton.cdiv(rule.value_dim, wide)
    if longest == 1 and num_rows * rule.num_heads >= _MANY_PROGRAMS and blocks > 1:
        return StepTile(wide, 4, blocks, 2)
    return StepTile(min(most, max(1, (_WARP_TILE if longest == 1 else _WARP_TILE // 2) // keys)), 1)


def recurrent_steps(
    rule: RecurrentRule,
    layer: RecurrentLayer,
    slots: TokenSlots | None,
    tokens: TokenRows,
    out: Tensor,
    *,
    longest: int,
    overlaps: bool = False,
    tile: StepTile | None = None,
) -> None:
    """Computes out [num_tokens, heads, value_dim], contiguous, and keeps states as the slots say.

    `longest` bounds the rows' tokens. Outputs of tokens of no row are left as they are. Without `slots`, rows begin
    with zeros and nothing is kept.
    """
    num_rows = tokens.offsets.shape[0] - 1
    if num_rows == 0 or longest == 0:
        return
    chosen = choose_step_tile(rule, num_rows, longest) if tile is None else tile
    mixed, decay, beta, states, tails = layer.mixed, layer.decay, layer.beta, layer.states, layer.tails
    arguments = (
        mixed,
        decay,
        beta,
        layer.conv_weight,
        layer.conv_bias,
        layer.skip,
        states,
        tails,
        None if slots is None else slots.read,
        None if slots is None else slots.write,
        tokens.offsets,
        out,
        rule.scale,
        mixed.stride(0),
        *decay.stride()[:2],
        *beta.stride(),
        0 if states is None else states.stride(0),
        0 if tails is None else tails.stride(0),
    )
    settings = {
        **_constants(rule, layer, chosen),
        "KEEPS": slots is not None,
        "num_warps": chosen.warps,
        **overlap_settings(overlaps),
    }
    heads, blocks = rule.num_heads, triton.cdiv(rule.value_dim, chosen.values)
    if longest == 1:
        parts = triton.cdiv(blocks, chosen.blocks)
        _single_tokens[(parts, heads, num_rows)](*arguments, BLOCKS=chosen.blocks, STAGES=chosen.stages, **settings)
    else:
        _recurrent_steps[(blocks, heads, num_rows)](*arguments, **settings)


def _constants(rule: RecurrentRule, layer: RecurrentLayer, tile: StepTile) -> dict[str, object]:
    """What a kernel is compiled for."""
    return {
        "NUM_HEADS": rule.num_heads,
        "GROUP": rule.num_heads // rule.num_key_heads,
        "KEY_DIM": rule.key_dim,
        "VALUE_DIM": rule.value_dim,
        "DELTA": rule.delta_rule,
        "CHANNELS": rule.channel_decay,
        "UNIT": rule.unit_keys,
        "WIDTH": rule.conv_width,
        "BIAS": layer.conv_bias is not None,
        "SKIP": layer.skip is not None,
        "BLOCK_K": triton.next_power_of_2(rule.key_dim),
        "BLOCK_V": tile.values,
    }


@triton.jit
def _convolved(
    mixed, tail, weight, bias, mixed_stride, first, place, channel, inside,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """The inputs of channels at a place of a row, behind the convolution and SiLU if there is one. fp32."""
    if WIDTH == 0:
        result = tl.load(mixed + (first + place) * mixed_stride + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        result = tl.zeros(channel.shape, tl.float32)
        if BIAS:
            result += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        for tap in tl.static_range(WIDTH):
            factor = tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
            before = place - (WIDTH - 1) + tap
            result += factor * input_at(mixed, tail, mixed_stride, first, before, channel, inside, KEEPS, WIDTH)
        result = activated(result, 0)
    return result


@triton.jit
def _keep_tail(mixed, tail, kept, mixed_stride, first, place, channel, inside, WIDTH: tl.constexpr):
    """Writes the last inputs behind a token to `kept`, the tail of the slot that keeps them."""
    for age in tl.static_range(WIDTH - 1):
        x = input_at(mixed, tail, mixed_stride, first, place - (WIDTH - 2) + age, channel, inside, True, WIDTH)
        tl.store(kept + channel * (WIDTH - 1) + age, x, mask=inside)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def _single_input(
    given, tail, kept, weight, bias, channel, inside, keeps,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Like `_convolved`, for the only token of a row, whose inputs are at `given`: all earlier ones are in the tail.

    Writes the tail behind the token to `kept`, for the channels in `keeps`.
    """
    result = tl.load(given + channel, mask=inside, other=0.0).to(tl.float32)
    if WIDTH > 0:
        if KEEPS:
            tl.store(kept + channel * (WIDTH - 1) + WIDTH - 2, result, mask=keeps)
        result *= tl.load(weight + channel * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            result += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        if KEEPS:
            for tap in tl.static_range(WIDTH - 1):
                x = tl.load(tail + channel * (WIDTH - 1) + tap, mask=inside, other=0.0)
                result += x * tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
                if tap > 0:
                    tl.store(kept + channel * (WIDTH - 1) + tap - 1, x, mask=keeps)
        result = activated(result, 0)
    return result


@triton.jit(
    do_not_specialize_on_alignment=["read_slots", "write_slots", "offsets"],
    do_not_specialize=["mixed_stride", "decay_stride", "beta_stride"],
)
def _single_tokens(
    mixed, decay, beta, weight, bias, skip, states, tails, read_slots, write_slots, offsets, out, scale,
    mixed_stride, decay_stride, decay_head_stride, beta_stride, beta_head_stride, state_stride, tail_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr,
    SKIP: tl.constexpr, KEEPS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes blocks of values of a head of a row that has at most one token."""
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(offsets + row)
    has_token = tl.load(offsets + row + 1) > token
    KEY_HEADS: tl.constexpr = NUM_HEADS // GROUP
    key, lane = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    # A row without a token reads and writes nothing.
    num_keys, num_values = tl.where(has_token, KEY_DIM, 0), tl.where(has_token, VALUE_DIM, 0)
    in_key = key < num_keys
    place = head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM
    source, target, tail, new_tail, num_kept = states, states, tails, tails, 0
    if KEEPS:
        slot, kept = tl.load(read_slots + row), tl.load(write_slots + token, mask=has_token, other=0)
        source, target = states + slot * state_stride, states + kept * state_stride
        num_kept = tl.where(kept != 0, num_values, 0)
        if WIDTH > 0:
            tail, new_tail = tails + slot * tail_stride, tails + kept * tail_stride
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if KEEPS and BLOCKS == 1:
        # No launch of a step writes what the step reads, so this need not wait for earlier ones.
        ahead = (part * BLOCK_V + lane)[None, :]
        state = tl.load(source + place + ahead, mask=in_key[:, None] & (ahead < num_values), other=0.0)
    wait_for_results(OVERLAPS)
    let_next_begin(OVERLAPS)
    given = mixed + token * mixed_stride
    channel = (head // GROUP) * KEY_DIM + key
    # Heads of a group share queries and keys: one program keeps these tails for all of them.
    mine = key < tl.where((part == 0) & (head % GROUP == 0) & (num_kept > 0), KEY_DIM, 0)
    q = _single_input(given, tail, new_tail, weight, bias, channel, in_key, mine, WIDTH, BIAS, KEEPS)
    channel += KEY_HEADS * KEY_DIM
    k = _single_input(given, tail, new_tail, weight, bias, channel, in_key, mine, WIDTH, BIAS, KEEPS)
    if UNIT:
        q, k = _unit(q), _unit(k)
    q *= scale
    both = tl.sum(q * k, axis=0)
    rates = decay + token * decay_stride + head * decay_head_stride
    strength = tl.load(beta + token * beta_stride + head * beta_head_stride, mask=has_token, other=0.0)
    if CHANNELS:
        left = tl.exp(tl.load(rates + key, mask=in_key, other=0.0))[:, None]
    else:
        left = tl.exp(tl.load(rates, mask=has_token, other=0.0))
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        value = (part * BLOCKS + block) * BLOCK_V + lane
        in_value = value < num_values
        if KEEPS and BLOCKS > 1:
            inside = in_key[:, None] & in_value[None, :]
            state = tl.load(source + place + value[None, :], mask=inside, other=0.0)
        behind = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
        kept_values = value < num_kept
        v = _single_input(given, tail, new_tail, weight, bias, behind, in_value, kept_values, WIDTH, BIAS, KEEPS)
        state *= left
        stored = v
        if DELTA:
            stored = v - tl.sum(state * k[:, None], axis=0)
        stored *= strength
        # The query meets the new state: the old one, and what the key adds to it.
        result = tl.sum(state * q[:, None], axis=0) + both * stored
        if SKIP:
            result += tl.load(skip + head) * v
        to = out + (token * NUM_HEADS + head) * VALUE_DIM + value
        tl.store(to, result.to(out.dtype.element_ty), mask=in_value)
        if KEEPS:
            state += k[:, None] * stored[None, :]
            tl.store(target + place + value[None, :], state, mask=in_key[:, None] & kept_values[None, :])


@triton.jit(
    do_not_specialize_on_alignment=["read_slots", "write_slots", "offsets"],
    do_not_specialize=["mixed_stride", "decay_stride", "beta_stride"],
)
def _recurrent_steps(
    mixed, decay, beta, weight, bias, skip, states, tails, read_slots, write_slots, offsets, out, scale,
    mixed_stride, decay_stride, decay_head_stride, beta_stride, beta_head_stride, state_stride, tail_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr,
    SKIP: tl.constexpr, KEEPS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes a block of values of a head of a row, token by token."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - first
    key, value = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = key < KEY_DIM, value < VALUE_DIM
    KEY_HEADS: tl.constexpr = NUM_HEADS // GROUP
    place = head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    inside = in_key[:, None] & in_value[None, :]
    tail = tails
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if KEEPS:
        # No launch of a step writes what the step reads, so this need not wait for earlier ones.
        slot = tl.load(read_slots + row)
        wanted = (key < tl.where(count > 0, KEY_DIM, 0))[:, None] & in_value[None, :]
        state = tl.load(states + slot * state_stride + place, mask=wanted, other=0.0)
        if WIDTH > 0:
            tail = tails + slot * tail_stride
    wait_for_results(OVERLAPS)
    let_next_begin(OVERLAPS)
    query_channel = (head // GROUP) * KEY_DIM + key
    key_channel = KEY_HEADS * KEY_DIM + query_channel
    value_channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    for token in range(first, first + count):
        at = token - first
        q = _convolved(mixed, tail, weight, bias, mixed_stride, first, at, query_channel, in_key, WIDTH, BIAS, KEEPS)
        k = _convolved(mixed, tail, weight, bias, mixed_stride, first, at, key_channel, in_key, WIDTH, BIAS, KEEPS)
        v = _convolved(mixed, tail, weight, bias, mixed_stride, first, at, value_channel, in_value, WIDTH, BIAS, KEEPS)
        if UNIT:
            q, k = _unit(q), _unit(k)
        rates = decay + token * decay_stride + head * decay_head_stride
        if CHANNELS:
            state *= tl.exp(tl.load(rates + key, mask=in_key, other=0.0))[:, None]
        else:
            state *= tl.exp(tl.load(rates))
        stored = v
        if DELTA:
            stored = v - tl.sum(state * k[:, None], axis=0)
        stored *= tl.load(beta + token * beta_stride + head * beta_head_stride)
        state += k[:, None] * stored[None, :]
        result = scale * tl.sum(state * q[:, None], axis=0)
        if SKIP:
            result += tl.load(skip + head) * v
        to = out + (token * NUM_HEADS + head) * VALUE_DIM + value
        tl.store(to, result.to(out.dtype.element_ty), mask=in_value)
        if KEEPS:
            kept = tl.load(write_slots + token)
            if kept != 0:
                tl.store(states + kept * state_stride + place, state, mask=inside)
                if WIDTH > 0:
                    new = tails + kept * tail_stride
                    _keep_tail(mixed, tail, new, mixed_stride, first, at, value_channel, in_value, WIDTH)
                    # Heads of a group share queries and keys: one program keeps these tails for all of them.
                    mine = key < tl.where((block == 0) & (head % GROUP == 0), KEY_DIM, 0)
                    _keep_tail(mixed, tail, new, mixed_stride, first, at, query_channel, mine, WIDTH)
                    _keep_tail(mixed, tail, new, mixed_stride, first, at, key_channel, mine, WIDTH)
