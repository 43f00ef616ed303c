"""A recurrent layer chunk by chunk, for rows of many tokens: three launches, or four with decays per channel.

    chunk of n tokens, g the sums of its decays up to each token, S the state before it
    A[i, j] = beta[i] * k[i]·k[j] * exp(g[i] - g[j])   for j < i         `see_chunks` and `solve_chunks`, all chunks at
    T       = (1 + A)^-1                                                 once: how tokens of a chunk see each other
    u       = T @ (beta * (v - exp(g) * k @ S))                          `scan_chunks`, chunk after chunk of a row:
    out     = exp(g) * q @ S + (q·k * exp(g[i] - g[j]), j <= i) @ u      what each token stores, and its output
    S       = exp(g[n]) * S + (exp(g[n] - g) * k)^T @ u

Without the delta rule u is beta * v, and nothing is to be solved: one launch. With decays per channel, g is a vector
per token, and `fade_chunks` multiplies queries and keys by its exponentials first. No exponent is ever positive: tokens
are compared by way of a border between them. Queries and keys come convolved and of unit length.
Does not know specs, batches or plans.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.recurrent_steps import RecurrentRule
from sightline.kernels.triton.recurrent_tokens import TokenSlots
from sightline.kernels.triton.short_convolution import Split

CHUNK = 64
"""The most tokens of a chunk."""
_BLOCK = 16
"""Tokens of the blocks that a chunk is solved in."""
LEAST_DECAY = tl.constexpr(-100.0)
"""A decay that leaves nothing in fp32. Larger sums of decays would round those of weak ones."""
_OPERAND_BYTES = 1 << 16
"""Shared memory that is left for the operands of products."""
_FEW_PROGRAMS = 64
"""Heads of all rows up to which narrow blocks of values keep more of a device busy."""


class Faded(NamedTuple):
    """Scratch for layers with decays per channel, in the dtype of the keys unless stated."""

    q: Tensor
    """[num_tokens, heads, key_dim]: queries as they see the state before their chunk."""
    k: Tensor
    """[num_tokens, heads, key_dim]: keys likewise."""
    kept: Tensor
    """[num_tokens, heads, key_dim]: keys as the state behind their chunk sees them."""
    left: Tensor
    """[num_chunks, heads, key_dim] fp32: what a chunk leaves of the state before it."""
    sums: Tensor
    """[num_tokens, heads, key_dim] fp32: the sums of a chunk's decays up to each token."""


class CutRows(NamedTuple):
    """How rows are cut: into segments, behind which states are kept, and these into chunks of `CHUNK` tokens."""

    table: Tensor
    """[num_chunks, 2] int64: the first token of each chunk and its number of tokens, row after row."""
    segments: Tensor
    """[num_segments, 3] int64: the first token of each segment, its number of tokens, and its first chunk."""
    rows: Tensor
    """[num_rows, 3] int64: each row's index in the step, its first segment, and its number of segments."""
    solved: Tensor
    """[num_chunks, heads, CHUNK, CHUNK] in the dtype of the keys: scratch for T, with the delta rule."""
    scores: Tensor
    """[num_chunks, heads, CHUNK, CHUNK] in the dtype of the keys: scratch for products of queries and keys, faded, in
    its lower triangle. Unused with neither the delta rule nor decays per channel."""
    seen: Tensor
    """[num_chunks, heads, CHUNK, CHUNK] fp32: scratch for A, in its lower triangle. Unused with neither the delta rule
    nor decays per channel."""
    sums: Tensor
    """[num_chunks, heads, CHUNK] fp32: scratch for sums of decays up to each token, with the delta rule and one decay
    per head."""
    faded: Faded | None
    """None with one decay per head."""


class ChunkedLayer(NamedTuple):
    """One layer's inputs and states."""

    inputs: Split
    """Contiguous."""
    decay: Tensor
    """[num_tokens, heads] fp32, or [num_tokens, heads, key_dim], contiguous in the last dimension."""
    beta: Tensor
    """[num_tokens, heads] fp32."""
    skip: Tensor | None
    """[heads] fp32."""
    states: Tensor | None
    """[num_slots, heads, key_dim, value_dim] fp32, each slot contiguous. None: rows begin with zeros and keep none."""


def serves_chunks(rule: RecurrentRule) -> bool:
    """True if these kernels compute the rule: dimensions are powers of two, which products need."""
    return all(
        least <= dim <= 128 and dim & (dim - 1) == 0 for dim, least in ((rule.key_dim, 32), (rule.value_dim, 16))
    )


def recur_chunks(
    rule: RecurrentRule,
    layer: ChunkedLayer,
    slots: TokenSlots | None,
    chunks: CutRows,
    out: Tensor,
    *,
    shared_bytes: int,
) -> None:
    """Computes out [num_tokens, heads, value_dim], contiguous, of the rows in `chunks`, and keeps their states.

    `shared_bytes` is the shared memory of a program.
    """
    num_rows = chunks.rows.shape[0]
    if num_rows == 0:
        return
    q, k, v = layer.inputs
    # Plain tf32 would round fp32 inputs to 10 bits.
    precision = "tf32x3" if k.dtype is torch.float32 else "tf32"
    shape = {"NUM_HEADS": rule.num_heads, "GROUP": rule.num_heads // rule.num_key_heads, "KEY_DIM": rule.key_dim}
    settings = {**shape, "CHANNELS": rule.channel_decay, "CHUNK": CHUNK, "PRECISION": precision}
    strides = (*layer.decay.stride()[:2], *layer.beta.stride())
    faded = Faded(q, k, k, k, k) if chunks.faded is None else chunks.faded
    _compare_tokens(rule, layer, chunks, faded, {**shape, "CHUNK": CHUNK, "PRECISION": precision})
    few = num_rows * rule.num_heads <= _FEW_PROGRAMS
    values = min(rule.value_dim, 32 if few else 64)
    states = layer.states
    _scan_chunks[(rule.value_dim // values, rule.num_heads, num_rows)](
        *faded[:4],
        chunks.scores,
        v,
        *layer[1:],
        None if slots is None else slots.read,
        None if slots is None else slots.write,
        chunks.segments,
        chunks.rows,
        chunks.solved,
        chunks.sums,
        out,
        rule.scale,
        *strides,
        0 if states is None else states.stride(0),
        **settings,
        VALUE_DIM=rule.value_dim,
        DELTA=rule.delta_rule,
        SKIP=layer.skip is not None,
        KEEPS=slots is not None,
        BLOCK_V=values,
        num_warps=4,
        num_stages=_stages(rule, few, values, k.element_size(), shared_bytes),
    )


def _compare_tokens(
    rule: RecurrentRule, layer: ChunkedLayer, chunks: CutRows, faded: Faded, settings: dict[str, int | str]
) -> None:
    """Computes what every token gets from the earlier ones of its chunk, for all chunks at once."""
    q, k, _ = layer.inputs
    num_heads, num_chunks = rule.num_heads, chunks.table.shape[0]
    decay_strides, beta_strides = layer.decay.stride()[:2], layer.beta.stride()
    if rule.channel_decay:
        _sum_decays[(num_chunks, num_heads)](
            layer.decay, chunks.table, faded.sums, faded.left, *decay_strides,
            NUM_HEADS=num_heads, KEY_DIM=rule.key_dim, CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
        _fade_chunks[(num_chunks, num_heads)](
            q, k, layer.beta, chunks.table, faded.q, faded.k, faded.kept, faded.sums, chunks.seen, chunks.scores,
            *beta_strides, **settings, LEVELS=CHUNK.bit_length() - 1, num_warps=8,
        )  # fmt: skip
    if rule.delta_rule and not rule.channel_decay:
        _see_chunks[(num_chunks, num_heads)](
            q, k, layer.decay, layer.beta, chunks.table, chunks.sums, chunks.seen, chunks.scores,
            *decay_strides, *beta_strides, **settings, num_warps=4,
        )  # fmt: skip
    if rule.delta_rule:
        _solve_chunks[(num_chunks, num_heads)](
            chunks.seen, chunks.solved, NUM_HEADS=num_heads, CHUNK=CHUNK, BLOCK=_BLOCK, num_warps=1
        )


def _stages(rule: RecurrentRule, few: bool, values: int, element_size: int, shared_bytes: int) -> int:
    """The number of chunks whose inputs are in shared memory at once, beside the operands of products.

    If there are few programs, each reads further ahead; many programs hide each other's waiting.
    """
    inputs = CHUNK * (3 * rule.key_dim + values + 2 * CHUNK) * element_size
    return max(1, min(3 if few else 2, 1 + (shared_bytes - _OPERAND_BYTES) // inputs))


@triton.jit
def _inverse(a, BLOCK: tl.constexpr):
    """(1 + a)^-1 of a strictly lower triangular block, from the inverses of halves, quarters and so on."""
    row = tl.arange(0, BLOCK)
    meet = (row[:, None] ^ 1 == row[None, :]) & (row[:, None] > row[None, :])
    inverse = tl.where(row[:, None] == row[None, :], 1.0, tl.where(meet, -a, 0.0))
    for level in tl.static_range(1, 31):
        if 1 << level < BLOCK:
            half = row >> level
            meet = ((half ^ 1)[:, None] == half[None, :]) & (row[:, None] > row[None, :])
            inverse -= _exact(inverse, _exact(tl.where(meet, a, 0.0), inverse))
    return inverse


@triton.jit
def _see_chunks(
    q, k, decay, beta, table, sums, seen, scores, decay_stride, decay_head_stride, beta_stride, beta_head_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program computes what the tokens of a chunk see of each other with one head, whose decay is one number."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(table + 2 * chunk), tl.load(table + 2 * chunk + 1)
    at, channel = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
    token, inside = first + at, at < count
    place = (token * (NUM_HEADS // GROUP) + head // GROUP)[:, None] * KEY_DIM + channel[None, :]
    queries = tl.load(q + place, mask=inside[:, None], other=0.0)
    keys = tl.load(k + place, mask=inside[:, None], other=0.0)
    rates = tl.load(decay + token * decay_stride + head * decay_head_stride, mask=inside, other=0.0)
    strengths = tl.load(beta + token * beta_stride + head * beta_head_stride, mask=inside, other=0.0)
    passed = tl.cumsum(rates, axis=0)
    sees = at[:, None] >= at[None, :]
    # Differences of later tokens are positive, and their exponential may be infinite.
    fading = tl.exp(tl.where(sees, passed[:, None] - passed[None, :], 0.0))
    products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * fading
    known = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * fading * strengths[:, None]
    chunk_head = (chunk * NUM_HEADS + head).to(tl.int64)
    square = chunk_head * CHUNK * CHUNK + at[:, None] * CHUNK + at[None, :]
    tl.store(sums + chunk_head * CHUNK + at, passed)
    tl.store(seen + square, known)
    tl.store(scores + square, products.to(scores.dtype.element_ty))


@triton.jit
def _sum_decays(
    decay, table, sums, left, decay_stride, decay_head_stride,
    NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program sums the decays of a head of a chunk's tokens, channel by channel."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(table + 2 * chunk), tl.load(table + 2 * chunk + 1)
    at, channel = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
    token, inside = (first + at)[:, None], (at < count)[:, None]
    there = decay + token * decay_stride + head * decay_head_stride + channel[None, :]
    rates = tl.maximum(tl.load(there, mask=inside, other=0.0), LEAST_DECAY, propagate_nan=tl.PropagateNan.ALL)
    tl.store(sums + (token * NUM_HEADS + head) * KEY_DIM + channel[None, :], tl.cumsum(rates, axis=0), mask=inside)
    tl.store(left + (chunk * NUM_HEADS + head) * KEY_DIM + channel, tl.exp(tl.sum(rates, axis=0)))


@triton.jit
def _fade_chunks(
    q, k, beta, table, faded_q, faded_k, kept_k, sums, seen, scores, beta_stride, beta_head_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A program computes what the tokens of a chunk see of each other with one head, and fades their queries and keys.

    A chunk is halved again and again. Two tokens meet at the level where a border comes between them, and each fades by
    its own distance to this border: no exponent is positive, and a token needs one factor for each level.
    """
    tl.static_assert(CHUNK == 1 << LEVELS)
    KEY_HEADS: tl.constexpr = NUM_HEADS // GROUP
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(table + 2 * chunk), tl.load(table + 2 * chunk + 1)
    at = tl.arange(0, CHUNK)
    token, inside = first + at, (at < count)[:, None]
    channel = tl.arange(0, KEY_DIM)[None, :]
    key_place = (token * KEY_HEADS + head // GROUP)[:, None] * KEY_DIM + channel
    queries = tl.load(q + key_place, mask=inside, other=0.0)
    keys = tl.load(k + key_place, mask=inside, other=0.0)
    place = (token * NUM_HEADS + head)[:, None] * KEY_DIM + channel
    passed = tl.load(sums + place, mask=inside, other=0.0)
    # A token sees its own key as it is.
    own = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    products = tl.where(at[:, None] == at[None, :], own, 0.0)
    known = tl.zeros([CHUNK, CHUNK], tl.float32)
    # Not unrolled: factors of several levels at once would spill registers.
    for level in tl.range(0, LEVELS, num_stages=1):
        half = at >> level
        # The last token of the first half. A second half without tokens has no border.
        border = tl.minimum(((half | 1) << level) - 1, count - 1)
        reached = tl.load(sums + ((first + border) * NUM_HEADS + head)[:, None] * KEY_DIM + channel)
        is_behind = (half & 1) == 1
        away = tl.where(is_behind[:, None], passed - reached, reached - passed)
        fading = tl.exp(tl.where(inside, away, 0.0))
        near = (keys * fading).to(keys.dtype)
        asking = (queries * fading).to(keys.dtype)
        meet = is_behind[:, None] & ((half ^ 1)[:, None] == half[None, :])
        found = tl.dot(near, tl.trans(near), input_precision=PRECISION)
        known += tl.where(meet, found, 0.0)
        found = tl.dot(asking, tl.trans(near), input_precision=PRECISION)
        products += tl.where(meet, found, 0.0)
    all_passed = tl.load(sums + ((first + count - 1) * NUM_HEADS + head) * KEY_DIM + channel)
    since, until = tl.exp(passed), tl.exp(tl.where(inside, all_passed - passed, 0.0))
    tl.store(faded_q + place, (queries * since).to(faded_q.dtype.element_ty), mask=inside)
    tl.store(faded_k + place, (keys * since).to(faded_k.dtype.element_ty), mask=inside)
    tl.store(kept_k + place, (keys * until).to(kept_k.dtype.element_ty), mask=inside)
    strengths = tl.load(beta + token * beta_stride + head * beta_head_stride, mask=at < count, other=0.0)
    square = (chunk * NUM_HEADS + head).to(tl.int64) * CHUNK * CHUNK + at[:, None] * CHUNK + at[None, :]
    tl.store(seen + square, known * strengths[:, None])
    tl.store(scores + square, products.to(scores.dtype.element_ty))


@triton.jit
def _get_block(seen, i, j, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    row, column = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    return tl.load(seen + row[:, None] * CHUNK + column[None, :], mask=row[:, None] > column[None, :], other=0.0)


@triton.jit
def _put_block(to, block, i, j, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    row, column = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + row[:, None] * CHUNK + column[None, :], block.to(to.dtype.element_ty))


@triton.jit
def _solve_chunks(seen, solved, NUM_HEADS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """A program solves a head of a chunk, in four blocks of tokens. Products with inverses are exact to fp32."""
    tl.static_assert(CHUNK == 4 * BLOCK)
    square = (tl.program_id(0) * NUM_HEADS + tl.program_id(1)).to(tl.int64) * CHUNK * CHUNK
    a = seen + square
    a00, a11 = _get_block(a, 0, 0, BLOCK, CHUNK), _get_block(a, 1, 1, BLOCK, CHUNK)
    a22, a33 = _get_block(a, 2, 2, BLOCK, CHUNK), _get_block(a, 3, 3, BLOCK, CHUNK)
    a10, a20 = _get_block(a, 1, 0, BLOCK, CHUNK), _get_block(a, 2, 0, BLOCK, CHUNK)
    a21, a30 = _get_block(a, 2, 1, BLOCK, CHUNK), _get_block(a, 3, 0, BLOCK, CHUNK)
    a31, a32 = _get_block(a, 3, 1, BLOCK, CHUNK), _get_block(a, 3, 2, BLOCK, CHUNK)
    t0, t1, t2, t3 = _inverse(a00, BLOCK), _inverse(a11, BLOCK), _inverse(a22, BLOCK), _inverse(a33, BLOCK)
    # Forward substitution by blocks.
    t10 = -_exact(t1, _exact(a10, t0))
    t21 = -_exact(t2, _exact(a21, t1))
    t32 = -_exact(t3, _exact(a32, t2))
    t20 = -_exact(t2, _exact(a20, t0) + _exact(a21, t10))
    t31 = -_exact(t3, _exact(a31, t1) + _exact(a32, t21))
    t30 = -_exact(t3, _exact(a30, t0) + _exact(a31, t10) + _exact(a32, t20))
    to = solved + square
    nothing = tl.zeros([BLOCK, BLOCK], tl.float32)
    _put_block(to, t0, 0, 0, BLOCK, CHUNK)
    _put_block(to, nothing, 0, 1, BLOCK, CHUNK)
    _put_block(to, nothing, 0, 2, BLOCK, CHUNK)
    _put_block(to, nothing, 0, 3, BLOCK, CHUNK)
    _put_block(to, t10, 1, 0, BLOCK, CHUNK)
    _put_block(to, t1, 1, 1, BLOCK, CHUNK)
    _put_block(to, nothing, 1, 2, BLOCK, CHUNK)
    _put_block(to, nothing, 1, 3, BLOCK, CHUNK)
    _put_block(to, t20, 2, 0, BLOCK, CHUNK)
    _put_block(to, t21, 2, 1, BLOCK, CHUNK)
    _put_block(to, t2, 2, 2, BLOCK, CHUNK)
    _put_block(to, nothing, 2, 3, BLOCK, CHUNK)
    _put_block(to, t30, 3, 0, BLOCK, CHUNK)
    _put_block(to, t31, 3, 1, BLOCK, CHUNK)
    _put_block(to, t32, 3, 2, BLOCK, CHUNK)
    _put_block(to, t3, 3, 3, BLOCK, CHUNK)


@triton.jit
def _exact(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit(do_not_specialize_on_alignment=["read_slots", "write_slots"])
def _scan_chunks(
    q, k, kept, lefts, scores, v, decay, beta, skip, states, read_slots, write_slots, segments, rows, solved,
    decay_sums, out, scale, decay_stride, decay_head_stride, beta_stride, beta_head_stride, state_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, VALUE_DIM: tl.constexpr, DELTA: tl.constexpr, SKIP: tl.constexpr, KEEPS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A program computes a block of values of a head of a row, chunk after chunk."""
    block, head = tl.program_id(0), tl.program_id(1)
    row = rows + 3 * tl.program_id(2)
    # With decays per channel, every head has its own keys, faded.
    KEY_HEADS: tl.constexpr = NUM_HEADS if CHANNELS else NUM_HEADS // GROUP
    key_head = head if CHANNELS else head // GROUP
    key, value = tl.arange(0, KEY_DIM), block * BLOCK_V + tl.arange(0, BLOCK_V)
    place = (head * KEY_DIM + key[:, None]) * VALUE_DIM + value[None, :]
    state = tl.zeros([KEY_DIM, BLOCK_V], tl.float32)
    if KEEPS:
        state = tl.load(states + tl.load(read_slots + tl.load(row)) * state_stride + place)
    at = tl.arange(0, CHUNK)
    sees = at[:, None] >= at[None, :]
    begin = tl.load(row + 1)
    for segment in range(begin, begin + tl.load(row + 2)):
        start, length = tl.load(segments + 3 * segment), tl.load(segments + 3 * segment + 1)
        first_chunk = tl.load(segments + 3 * segment + 2)
        for done in range(0, length, CHUNK):
            token, inside = start + done + at, done + at < length
            chunk_head = (first_chunk + done // CHUNK) * NUM_HEADS + head
            square = chunk_head * CHUNK * CHUNK + at[:, None] * CHUNK + at[None, :]
            key_place = (token * KEY_HEADS + key_head)[:, None] * KEY_DIM + key[None, :]
            value_place = (token * NUM_HEADS + head)[:, None] * VALUE_DIM + value[None, :]
            queries = tl.load(q + key_place, mask=inside[:, None], other=0.0)
            keys = tl.load(k + key_place, mask=inside[:, None], other=0.0)
            values = tl.load(v + value_place, mask=inside[:, None], other=0.0)
            strengths = tl.load(beta + token * beta_stride + head * beta_head_stride, mask=inside, other=0.0)
            before = state.to(keys.dtype)
            recalled = tl.dot(queries, before, input_precision=PRECISION)
            stored = values.to(tl.float32)
            if DELTA:
                known = tl.dot(keys, before, input_precision=PRECISION)
            if CHANNELS:
                later = tl.load(kept + key_place, mask=inside[:, None], other=0.0)
                left = tl.load(lefts + chunk_head * KEY_DIM + key)[:, None]
            else:
                later = keys
                if DELTA:
                    sums = tl.load(decay_sums + chunk_head * CHUNK + at)
                    total = tl.load(decay_sums + chunk_head * CHUNK + CHUNK - 1)
                else:
                    rates = tl.load(decay + token * decay_stride + head * decay_head_stride, mask=inside, other=0.0)
                    sums, total = tl.cumsum(rates, axis=0), tl.sum(rates, axis=0)
                left = tl.exp(total)
                recalled *= tl.exp(sums)[:, None]
                if DELTA:
                    known *= tl.exp(sums)[:, None]
            if CHANNELS or DELTA:
                weights = tl.load(scores + square, mask=sees, other=0.0)
            else:
                fading = tl.where(sees, tl.exp(tl.where(sees, sums[:, None] - sums[None, :], 0.0)), 0.0)
                weights = (tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * fading).to(keys.dtype)
            if DELTA:
                stored -= known
            stored *= strengths[:, None]
            if DELTA:
                stored = tl.dot(tl.load(solved + square), stored.to(keys.dtype), input_precision=PRECISION)
            result = scale * (recalled + tl.dot(weights, stored.to(keys.dtype), input_precision=PRECISION))
            if SKIP:
                result += tl.load(skip + head) * values.to(tl.float32)
            tl.store(out + value_place, result.to(out.dtype.element_ty), mask=inside[:, None])
            if not CHANNELS:
                # What the end of the chunk sees of each token.
                stored *= tl.exp(total - sums)[:, None]
            state = left * state + tl.dot(tl.trans(later), stored.to(keys.dtype), input_precision=PRECISION)
        if KEEPS:
            slot = tl.load(write_slots + start + length - 1)
            if slot != 0:
                tl.store(states + slot * state_stride + place, state)
