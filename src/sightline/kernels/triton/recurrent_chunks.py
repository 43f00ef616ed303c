"""A recurrent layer chunk by chunk, for rows of many tokens: two launches, or three with decays per channel.

    chunk of n tokens, g the sums of its decays up to each token, S the state before it
    A[i, j] = beta[i] * k[i]·k[j] * exp(g[i] - g[j])   for j < i         `solve_chunks`, all chunks at once:
    T       = (1 + A)^-1                                                 how the tokens of a chunk see each other
    u       = T @ (beta * (v - exp(g) * k @ S))                          `scan_chunks`, chunk after chunk of a row:
    out     = exp(g) * q @ S + (q·k * exp(g[i] - g[j]), j <= i) @ u      what each token stores, and its output
    S       = exp(g[n]) * S + (exp(g[n] - g) * k)^T @ u

Without the delta rule u is beta * v, and nothing is to be solved. With decays per channel, g is a vector per token, and
`fade_chunks` multiplies queries and keys by its exponentials first. No exponent is ever positive: blocks of tokens are
compared by way of the border between them. Queries and keys come convolved and of unit length.
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
_PART = 4
"""Neighbours in a block that are compared one by one if decays are per channel."""
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
    seen: Tensor
    """[num_chunks, heads, CHUNK, CHUNK] fp32: A, in its lower triangle."""


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
    num_rows, num_chunks = chunks.rows.shape[0], chunks.table.shape[0]
    if num_rows == 0:
        return
    q, k, v = layer.inputs
    # Plain tf32 would round fp32 inputs to 10 bits.
    precision = "tf32x3" if k.dtype is torch.float32 else "tf32"
    shape = {"NUM_HEADS": rule.num_heads, "GROUP": rule.num_heads // rule.num_key_heads, "KEY_DIM": rule.key_dim}
    settings = {**shape, "CHANNELS": rule.channel_decay, "CHUNK": CHUNK, "PRECISION": precision}
    strides = (*layer.decay.stride()[:2], *layer.beta.stride())
    faded = Faded(q, k, k, k, k) if chunks.faded is None else chunks.faded
    if rule.channel_decay:
        _fade_chunks[(num_chunks * (CHUNK // _BLOCK), rule.num_heads)](
            q, k, layer.decay, layer.beta, chunks.table, *faded, chunks.scores, *strides,
            **shape, CHUNK=CHUNK, BLOCK=_BLOCK, PART=_PART, PRECISION=precision, num_warps=2,
        )  # fmt: skip
    if rule.delta_rule:
        _solve_chunks[(num_chunks, rule.num_heads)](
            q, k, layer.decay, layer.beta, chunks.table, faded.seen, chunks.scores, chunks.solved, *strides,
            **settings, BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip
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


def _stages(rule: RecurrentRule, few: bool, values: int, element_size: int, shared_bytes: int) -> int:
    """The number of chunks whose inputs are in shared memory at once, beside the operands of products.

    If there are few programs, each reads further ahead; many programs hide each other's waiting.
    """
    inputs = CHUNK * (3 * rule.key_dim + values + 2 * CHUNK) * element_size
    return max(1, min(3 if few else 2, 1 + (shared_bytes - _OPERAND_BYTES) // inputs))


@triton.jit
def _inverse(a, BLOCK: tl.constexpr):
    """(1 + a)^-1 of a strictly lower triangular block, row by row."""
    row = tl.arange(0, BLOCK)
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    for i in tl.static_range(1, BLOCK):
        mine = tl.sum(tl.where(row[:, None] == i, a, 0.0), axis=0)
        new = tl.sum(mine[:, None] * inverse, axis=0)
        inverse = tl.where(row[:, None] == i, inverse - new[None, :], inverse)
    return inverse


@triton.jit
def _token_block(
    q, k, decay, beta, first, count, before, head, decay_stride, decay_head_stride, beta_stride, beta_head_stride, at,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Queries, keys, sums of decays, and betas of a block of tokens; `before` is the sum of all earlier decays."""
    place = at * BLOCK + tl.arange(0, BLOCK)
    token, inside = first + place, place < count
    feature = tl.arange(0, KEY_DIM)
    there = (token * KEY_HEADS + head // GROUP)[:, None] * KEY_DIM + feature[None, :]
    queries = tl.load(q + there, mask=inside[:, None], other=0.0)
    keys = tl.load(k + there, mask=inside[:, None], other=0.0)
    rates = tl.load(decay + token * decay_stride + head * decay_head_stride, mask=inside, other=0.0)
    strengths = tl.load(beta + token * beta_stride + head * beta_head_stride, mask=inside, other=0.0)
    return queries, keys, before + tl.cumsum(rates, axis=0), strengths, before + tl.sum(rates, axis=0)


@triton.jit
def _seen(q, k, g, b, k_before, g_before, to, i, j, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """A[i, j] for the tokens of a block i and of an earlier one j. Writes the scores of the same tokens."""
    fading = tl.exp(g[:, None] - g_before[None, :])
    _put_block(to, tl.dot(q, tl.trans(k_before), input_precision=PRECISION) * fading, i, j, BLOCK, CHUNK)
    return tl.dot(k, tl.trans(k_before), input_precision=PRECISION) * b[:, None] * fading


@triton.jit
def _seen_within(q, k, g, b, to, i, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """A[i, i] for the tokens of one block. Writes the scores of the same tokens."""
    row = tl.arange(0, BLOCK)
    sees = row[:, None] >= row[None, :]
    # Differences of later tokens are positive, and their exponential may be infinite.
    fading = tl.exp(tl.where(sees, g[:, None] - g[None, :], 0.0))
    _put_block(to, tl.dot(q, tl.trans(k), input_precision=PRECISION) * fading, i, i, BLOCK, CHUNK)
    products = tl.dot(k, tl.trans(k), input_precision=PRECISION) * b[:, None] * fading
    return tl.where(row[:, None] > row[None, :], products, 0.0)


@triton.jit
def _fade_chunks(
    q, k, decay, beta, table, faded_q, faded_k, kept_k, left, seen, scores,
    decay_stride, decay_head_stride, beta_stride, beta_head_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program computes a head of a block of a chunk's tokens, and what they see of each other and of earlier ones."""
    PER_CHUNK: tl.constexpr = CHUNK // BLOCK
    KEY_HEADS: tl.constexpr = NUM_HEADS // GROUP
    chunk, start, head = tl.program_id(0) // PER_CHUNK, (tl.program_id(0) % PER_CHUNK) * BLOCK, tl.program_id(1)
    first, count = tl.load(table + 2 * chunk), tl.load(table + 2 * chunk + 1)
    row, channel = tl.arange(0, BLOCK), tl.arange(0, KEY_DIM)[None, :]
    token, mine = (first + start + row)[:, None], (start + row < count)[:, None]
    all_rates = decay + head * decay_head_stride + channel
    all_keys = k + (head // GROUP) * KEY_DIM + channel
    rates = tl.load(all_rates + token * decay_stride, mask=mine, other=0.0)
    keys = tl.load(all_keys + token * KEY_HEADS * KEY_DIM, mask=mine, other=0.0).to(tl.float32)
    queries = tl.load(q + (token * KEY_HEADS + head // GROUP) * KEY_DIM + channel, mask=mine, other=0.0).to(tl.float32)
    strengths = tl.load(
        beta + (first + start + row) * beta_stride + head * beta_head_stride, mask=start + row < count, other=0.0
    )
    sums, own = tl.cumsum(rates, axis=0), tl.sum(rates, axis=0)
    since = tl.exp(sums)
    square = (chunk * NUM_HEADS + head).to(tl.int64) * CHUNK * CHUNK + (start + row)[:, None] * CHUNK
    # Earlier blocks, the nearest first, by way of where this one begins.
    before = tl.zeros([KEY_DIM], tl.float32)
    for back in range(0, start, BLOCK):
        other = start - BLOCK - back
        there, is_there = (first + other + row)[:, None], (other + row < count)[:, None]
        their_rates = tl.load(all_rates + there * decay_stride, mask=is_there, other=0.0)
        their_keys = tl.load(all_keys + there * KEY_HEADS * KEY_DIM, mask=is_there, other=0.0).to(tl.float32)
        their_own = tl.sum(their_rates, axis=0)
        faded = tl.trans(their_keys * tl.exp((before + their_own)[None, :] - tl.cumsum(their_rates, axis=0)))
        to = square + other + row[None, :]
        products = tl.dot(keys * since, faded, input_precision=PRECISION) * strengths[:, None]
        tl.store(seen + to, products)
        products = tl.dot(queries * since, faded, input_precision=PRECISION)
        tl.store(scores + to, products.to(scores.dtype.element_ty))
        before += their_own
    # Tokens of earlier parts of the block, likewise.
    keys_within, scores_within = tl.zeros([BLOCK, BLOCK], tl.float32), tl.zeros([BLOCK, BLOCK], tl.float32)
    for border in tl.static_range(PART, BLOCK, PART):
        reached = tl.sum(tl.where((row == border - 1)[:, None], sums, 0.0), axis=0)[None, :]
        behind, ahead = ((row >= border) & (row < border + PART))[:, None], (row < border)[:, None]
        fading = tl.where(behind, tl.exp(tl.where(behind, sums - reached, 0.0)), 0.0)
        faded = tl.trans(tl.where(ahead, tl.exp(tl.where(ahead, reached - sums, 0.0)) * keys, 0.0))
        keys_within += tl.dot(keys * fading, faded, input_precision=PRECISION)
        scores_within += tl.dot(queries * fading, faded, input_precision=PRECISION)
    to, is_other = square + start + row[None, :], row[:, None] // PART > row[None, :] // PART
    tl.store(seen + to, keys_within * strengths[:, None], mask=is_other)
    tl.store(scores + to, scores_within.to(scores.dtype.element_ty), mask=is_other)
    # Tokens of one part, distance by distance: no border is between them.
    passed = tl.zeros([BLOCK, KEY_DIM], tl.float32)
    for distance in tl.static_range(PART):
        reaches = (row % PART >= distance)[:, None]
        there, is_there = token - distance, mine & reaches
        near = tl.load(all_keys + there * KEY_HEADS * KEY_DIM, mask=is_there, other=0.0).to(tl.float32) * tl.exp(passed)
        to = square + (start + row - distance)[:, None]
        tl.store(seen + to, (tl.sum(keys * near, axis=1) * strengths)[:, None], mask=reaches)
        products = tl.sum(queries * near, axis=1)[:, None]
        tl.store(scores + to, products.to(scores.dtype.element_ty), mask=reaches)
        passed += tl.load(all_rates + there * decay_stride, mask=is_there, other=0.0)
    after = tl.zeros([KEY_DIM], tl.float32)
    for other in range(start + BLOCK, CHUNK, BLOCK):
        there, is_there = (first + other + row)[:, None], (other + row < count)[:, None]
        after += tl.sum(tl.load(all_rates + there * decay_stride, mask=is_there, other=0.0), axis=0)
    to = (token * NUM_HEADS + head) * KEY_DIM + channel
    since *= tl.exp(before)[None, :]
    tl.store(faded_q + to, (queries * since).to(faded_q.dtype.element_ty), mask=mine)
    tl.store(faded_k + to, (keys * since).to(faded_k.dtype.element_ty), mask=mine)
    kept = keys * tl.exp((after + own)[None, :] - sums)
    tl.store(kept_k + to, kept.to(kept_k.dtype.element_ty), mask=mine)
    if start == 0:
        tl.store(left + (chunk * NUM_HEADS + head) * KEY_DIM + tl.arange(0, KEY_DIM), tl.exp(own + after))


@triton.jit
def _get_block(seen, i, j, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    row, column = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    return tl.load(seen + row[:, None] * CHUNK + column[None, :], mask=row[:, None] > column[None, :], other=0.0)


@triton.jit
def _put_block(to, block, i, j, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    row, column = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + row[:, None] * CHUNK + column[None, :], block.to(to.dtype.element_ty))


@triton.jit
def _solve_chunks(
    q, k, decay, beta, table, seen, scores, solved, decay_stride, decay_head_stride, beta_stride, beta_head_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program solves a head of a chunk, in four blocks of tokens. Products with inverses are exact to fp32."""
    tl.static_assert(CHUNK == 4 * BLOCK)
    chunk, head = tl.program_id(0), tl.program_id(1)
    square = (chunk * NUM_HEADS + head).to(tl.int64) * CHUNK * CHUNK
    if CHANNELS:
        a = seen + square
        a00, a11 = _get_block(a, 0, 0, BLOCK, CHUNK), _get_block(a, 1, 1, BLOCK, CHUNK)
        a22, a33 = _get_block(a, 2, 2, BLOCK, CHUNK), _get_block(a, 3, 3, BLOCK, CHUNK)
        a10, a20 = _get_block(a, 1, 0, BLOCK, CHUNK), _get_block(a, 2, 0, BLOCK, CHUNK)
        a21, a30 = _get_block(a, 2, 1, BLOCK, CHUNK), _get_block(a, 3, 0, BLOCK, CHUNK)
        a31, a32 = _get_block(a, 3, 1, BLOCK, CHUNK), _get_block(a, 3, 2, BLOCK, CHUNK)
    else:
        first, count = tl.load(table + 2 * chunk), tl.load(table + 2 * chunk + 1)
        s = scores + square
        HEADS: tl.constexpr = NUM_HEADS // GROUP
        strides = (decay_stride, decay_head_stride, beta_stride, beta_head_stride)
        q0, k0, g0, b0, end = _token_block(
            q, k, decay, beta, first, count, 0.0, head, *strides, 0, HEADS, GROUP, KEY_DIM, BLOCK
        )
        q1, k1, g1, b1, end = _token_block(
            q, k, decay, beta, first, count, end, head, *strides, 1, HEADS, GROUP, KEY_DIM, BLOCK
        )
        a00 = _seen_within(q0, k0, g0, b0, s, 0, BLOCK, CHUNK, PRECISION)
        a11 = _seen_within(q1, k1, g1, b1, s, 1, BLOCK, CHUNK, PRECISION)
        a10 = _seen(q1, k1, g1, b1, k0, g0, s, 1, 0, BLOCK, CHUNK, PRECISION)
        q2, k2, g2, b2, end = _token_block(
            q, k, decay, beta, first, count, end, head, *strides, 2, HEADS, GROUP, KEY_DIM, BLOCK
        )
        a20 = _seen(q2, k2, g2, b2, k0, g0, s, 2, 0, BLOCK, CHUNK, PRECISION)
        a21 = _seen(q2, k2, g2, b2, k1, g1, s, 2, 1, BLOCK, CHUNK, PRECISION)
        a22 = _seen_within(q2, k2, g2, b2, s, 2, BLOCK, CHUNK, PRECISION)
        q3, k3, g3, b3, end = _token_block(
            q, k, decay, beta, first, count, end, head, *strides, 3, HEADS, GROUP, KEY_DIM, BLOCK
        )
        a30 = _seen(q3, k3, g3, b3, k0, g0, s, 3, 0, BLOCK, CHUNK, PRECISION)
        a31 = _seen(q3, k3, g3, b3, k1, g1, s, 3, 1, BLOCK, CHUNK, PRECISION)
        a32 = _seen(q3, k3, g3, b3, k2, g2, s, 3, 2, BLOCK, CHUNK, PRECISION)
        a33 = _seen_within(q3, k3, g3, b3, s, 3, BLOCK, CHUNK, PRECISION)
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
    q, k, kept, lefts, scores, v, decay, beta, skip, states, read_slots, write_slots, segments, rows, solved, out,
    scale, decay_stride, decay_head_stride, beta_stride, beta_head_stride, state_stride,
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
                rates = tl.load(decay + token * decay_stride + head * decay_head_stride, mask=inside, other=0.0)
                sums, total = tl.cumsum(rates, axis=0), tl.sum(rates, axis=0)
                later = (keys * tl.exp(total - sums)[:, None]).to(keys.dtype)
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
            stored = (stored * strengths[:, None]).to(keys.dtype)
            if DELTA:
                stored = tl.dot(tl.load(solved + square), stored, input_precision=PRECISION).to(keys.dtype)
            result = scale * (recalled + tl.dot(weights, stored, input_precision=PRECISION))
            if SKIP:
                result += tl.load(skip + head) * values.to(tl.float32)
            tl.store(out + value_place, result.to(out.dtype.element_ty), mask=inside[:, None])
            state = left * state + tl.dot(tl.trans(later), stored, input_precision=PRECISION)
        if KEEPS:
            slot = tl.load(write_slots + start + length - 1)
            if slot != 0:
                tl.store(states + slot * state_stride + place, state)
