"""Causal convolutions over the last few tokens of every row, in one launch, with the tails that states keep.

`convolve` computes a layer that is nothing else. `split_mixed` computes the queries, keys and values of a recurrent
layer, so that many programs may read them without convolving again. Computed in fp32.

Knows tensors and slots. Does not know specs, batches or plans.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.gates import activated
from sightline.kernels.triton.overlap import overlap_settings, wait_for_previous
from sightline.kernels.triton.recurrent_tokens import TokenRows, TokenSlots, input_at

_TILE = 4096
"""Elements that a program computes."""
_MOST_TOKENS = 32
_FEW_TOKENS = 512
"""Tokens of a step that get a program each, because most of them see a tail."""


class Convolution(NamedTuple):
    """The weights of a convolution, and the tails of its rows."""

    weight: Tensor
    """[channels, width], contiguous."""
    bias: Tensor | None
    """[channels]."""
    tails: Tensor | None
    """[num_slots, channels, width - 1] fp32, each slot contiguous. None: rows begin with zeros and keep none."""


class Split(NamedTuple):
    """Where queries, keys and values go."""

    q: Tensor
    """[num_tokens, key_heads, key_dim]; the heads of a token are contiguous, here and below."""
    k: Tensor
    """[num_tokens, key_heads, key_dim]."""
    v: Tensor
    """[num_tokens, heads, value_dim]."""


def convolve(
    x: Tensor,
    convolution: Convolution,
    slots: TokenSlots | None,
    tokens: TokenRows,
    out: Tensor,
    *,
    overlaps: bool = False,
) -> None:
    """Writes the convolution of x [num_tokens, channels] to `out` of the same shape, without an activation.

    Outputs of tokens of no row are left as they are. Without `slots`, rows begin with zeros and nothing is kept.
    """
    num_tokens, channels = x.shape
    if num_tokens == 0:
        return
    block = min(128, triton.next_power_of_2(channels))
    per_tile = _tile_tokens(num_tokens, block)
    _convolve[(triton.cdiv(num_tokens, per_tile), triton.cdiv(channels, block))](
        x,
        *_pointers(convolution, slots, tokens),
        out,
        num_tokens,
        x.stride(0),
        out.stride(0),
        0 if convolution.tails is None else convolution.tails.stride(0),
        CHANNELS=channels,
        WIDTH=convolution.weight.shape[1],
        BIAS=convolution.bias is not None,
        KEEPS=slots is not None,
        BLOCK_T=per_tile,
        BLOCK=block,
        num_warps=_warps(per_tile, block),
        **overlap_settings(overlaps),
    )


def split_mixed(
    mixed: Tensor,
    convolution: Convolution | None,
    slots: TokenSlots | None,
    tokens: TokenRows,
    out: Split,
    *,
    unit: bool,
    overlaps: bool = False,
    spoiled: Tensor | None = None,
) -> None:
    """Writes the queries, keys and values of mixed [num_tokens, channels]: behind the convolution and SiLU, if there is
    one, and with `unit`, queries and keys divided by their lengths.

    With `spoiled`, [num_tokens, key_heads + heads] fp32, numbers of keys and values that are not finite are written as
    0, and it gets NaN for their token and key head, or head, and 0 for others. Outputs of tokens of no row are left as
    they are.
    """
    num_tokens = mixed.shape[0]
    if num_tokens == 0:
        return
    _, key_heads, key_dim = out.q.shape
    _, heads, value_dim = out.v.shape
    block = triton.next_power_of_2(max(key_dim, value_dim))
    per_tile = _tile_tokens(num_tokens, block)
    given = (None, None, None) if convolution is None else convolution
    tails = given[2]
    _split_mixed[(triton.cdiv(num_tokens, per_tile), 2 * key_heads + heads)](
        mixed,
        *given,
        None if slots is None else slots.read,
        None if slots is None else slots.write,
        tokens.offsets,
        tokens.rows,
        *out,
        spoiled,
        num_tokens,
        mixed.stride(0),
        *(each.stride(0) for each in out),
        0 if tails is None else tails.stride(0),
        0 if spoiled is None else spoiled.stride(0),
        KEY_HEADS=key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        UNIT=unit,
        WIDTH=0 if given[0] is None else given[0].shape[1],
        BIAS=given[1] is not None,
        KEEPS=slots is not None,
        MARKS=spoiled is not None,
        BLOCK_T=per_tile,
        BLOCK=block,
        num_warps=_warps(per_tile, block),
        **overlap_settings(overlaps),
    )


def _pointers(convolution: Convolution, slots: TokenSlots | None, tokens: TokenRows) -> tuple[Tensor | None, ...]:
    return (*convolution, *((None, None) if slots is None else slots), tokens.offsets, tokens.rows)


def _tile_tokens(num_tokens: int, block: int) -> int:
    """Few tokens to a program if there are few, so that there are many programs."""
    fitting = max(1, min(_MOST_TOKENS, _TILE // block))
    return 1 if num_tokens <= _FEW_TOKENS else fitting


def _warps(tokens: int, block: int) -> int:
    return max(1, min(4, tokens * block // 512))


@triton.jit
def _convolved_block(
    x, weight, bias, tails, read_slots, write_slots, offsets, rows, num_tokens, x_stride, tail_stride, channel, in_size,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, KEEPS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The inputs of a block of tokens behind the convolution, [BLOCK_T, channels], before any activation. Keeps tails.

    Also returns the tokens, and which of all belong to a row.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.load(rows + token, mask=token < num_tokens, other=-1)
    inside = (row >= 0)[:, None] & in_size[None, :]
    if WIDTH == 0:
        result = tl.load(x + token[:, None] * x_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        first = tl.load(offsets + row, mask=row >= 0, other=0)
        place = (token - first)[:, None]
        result = tl.zeros(inside.shape, tl.float32)
        if BIAS:
            result += tl.load(bias + channel, mask=in_size, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(WIDTH):
            factor = tl.load(weight + channel * WIDTH + tap, mask=in_size, other=0.0).to(tl.float32)
            before = token[:, None] - (WIDTH - 1) + tap
            new = inside & (place >= WIDTH - 1 - tap)
            given = tl.load(x + before * x_stride + channel[None, :], mask=new, other=0.0).to(tl.float32)
            result += factor[None, :] * given
        if KEEPS:
            slot = tl.load(read_slots + row, mask=row >= 0, other=0)
            tail = tails + slot[:, None] * tail_stride
            # Few blocks of a long row see its tail, or have a token that keeps one.
            if tl.min(tl.where(row >= 0, token - first, WIDTH), axis=0) < WIDTH - 1:
                for tap in tl.static_range(WIDTH - 1):
                    factor = tl.load(weight + channel * WIDTH + tap, mask=in_size, other=0.0).to(tl.float32)
                    old = inside & (place < WIDTH - 1 - tap)
                    there = tail + channel[None, :] * (WIDTH - 1) + place + tap
                    result += factor[None, :] * tl.load(there, mask=old, other=0.0)
            kept = tl.load(write_slots + token, mask=row >= 0, other=0)
            if tl.max(kept, axis=0) > 0:
                keeps = (kept != 0)[:, None] & inside
                to = tails + kept[:, None] * tail_stride + channel[None, :] * (WIDTH - 1)
                for age in tl.static_range(WIDTH - 1):
                    before = place - (WIDTH - 2) + age
                    given = input_at(x, tail, x_stride, first[:, None], before, channel[None, :], keeps, True, WIDTH)
                    tl.store(to + age, given, mask=keeps)
    return result, token, inside


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["read_slots", "write_slots"])
def _convolve(
    x, weight, bias, tails, read_slots, write_slots, offsets, rows, out, num_tokens, x_stride, out_stride, tail_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, KEEPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes a block of channels of a block of tokens."""
    wait_for_previous(OVERLAPS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    result, token, inside = _convolved_block(
        x, weight, bias, tails, read_slots, write_slots, offsets, rows, num_tokens, x_stride, tail_stride,
        channel, channel < CHANNELS, WIDTH, BIAS, KEEPS, BLOCK_T,
    )  # fmt: skip
    to = out + token[:, None] * out_stride + channel[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["read_slots", "write_slots"])
def _split_mixed(
    mixed, weight, bias, tails, read_slots, write_slots, offsets, rows, q, k, v, spoiled, num_tokens,
    mixed_stride, q_stride, k_stride, v_stride, tail_stride, spoiled_stride,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, UNIT: tl.constexpr,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, KEEPS: tl.constexpr, MARKS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes a head of a block of tokens: queries first, then keys, then values."""
    wait_for_previous(OVERLAPS)
    head = tl.program_id(1)
    is_value = head >= 2 * KEY_HEADS
    size = tl.where(is_value, VALUE_DIM, KEY_DIM)
    within = tl.where(is_value, head - 2 * KEY_HEADS, tl.where(head >= KEY_HEADS, head - KEY_HEADS, head)) * size
    part = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM, tl.where(head >= KEY_HEADS, KEY_HEADS * KEY_DIM, 0))
    feature = tl.arange(0, BLOCK)
    start = part + within
    if KEY_DIM % 16 == 0 and VALUE_DIM % 16 == 0:
        start, within = tl.multiple_of(start, 16), tl.multiple_of(within, 16)
    result, token, inside = _convolved_block(
        mixed, weight, bias, tails, read_slots, write_slots, offsets, rows, num_tokens, mixed_stride, tail_stride,
        start + feature, feature < size, WIDTH, BIAS, KEEPS, BLOCK_T,
    )  # fmt: skip
    if WIDTH > 0:
        result = activated(result, 0)
    if is_value:
        if MARKS:
            result = _marked(result.to(v.dtype.element_ty), inside, spoiled, spoiled_stride, token, head - KEY_HEADS)
        _put(v, v_stride, token, within + feature, result, inside)
    else:
        if UNIT:
            result *= tl.rsqrt(tl.sum(result * result, axis=1) + 1e-6)[:, None]
        if head >= KEY_HEADS:
            if MARKS:
                stored = result.to(k.dtype.element_ty)
                result = _marked(stored, inside, spoiled, spoiled_stride, token, head - KEY_HEADS)
            _put(k, k_stride, token, within + feature, result, inside)
        else:
            _put(q, q_stride, token, within + feature, result, inside)


@triton.jit
def _marked(stored, inside, spoiled, stride, token, column):
    """The numbers as fp32, with 0 for those that are not finite. Marks the tokens that have such ones."""
    wide = stored.to(tl.float32)
    is_finite = tl.abs(wide) < float("inf")
    worst = tl.max((inside & (is_finite == 0)).to(tl.int32), axis=1)
    is_token = tl.max(inside.to(tl.int32), axis=1) > 0
    tl.store(spoiled + token * stride + column, tl.where(worst > 0, float("nan"), 0.0), mask=is_token)
    return tl.where(is_finite, wide, 0.0)


@triton.jit
def _put(out, stride, token, feature, result, inside):
    tl.store(out + token[:, None] * stride + feature[None, :], result.to(out.dtype.element_ty), mask=inside)
