"""Attention of rows with many new tokens, whole texts or prompts behind a context, over pages or the step's own tokens.

A unit of work is a key head and some tokens of a row, with all query heads that share the key head. It goes through the
keys in blocks: a block is packed once, in fp32, and then multiplied with every tile of four queries. Softmax is online,
so that memory does not depend on lengths. Trees of tokens are left to `attend`. Arithmetic is fp32.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from sightline.kernels.cpu.attend import FIELDS
from sightline.kernels.cpu.instructions import exp32, float_of, load, load64, max32, store, tanh32
from sightline.kernels.cpu.prompt_tiles import KEYS, LANES, QUERIES, STEP, score_tile, value_tile

KEY_BLOCK = 256
"""Keys that are packed at once: with heads of 64 numbers, keys and values take an eighth of the second cache."""
STRIDE = KEY_BLOCK + KEYS
"""Numbers from a dimension of packed keys, or a query's scores, to the next: no power of 2, which would put all of them
in the same place of the first cache."""
UNIT_QUERIES = 64
"""Queries of a unit, about: so many share a packed block."""
NOTHING = np.float32(-np.inf)
ZERO, ONE = np.float32(0.0), np.float32(1.0)


def tokens_of_unit(group: int) -> int:
    """Tokens of a unit, whose queries are `group` heads each."""
    return max(1, UNIT_QUERIES // group)


def padded(size: int) -> int:
    """A head's size with the zeros that complete its last vector."""
    step = max(LANES, STEP)
    return -(-size // step) * step


def scratch_numbers(group: int, key_dim: int, value_dim: int) -> int:
    """The fp32 numbers that a thread needs: keys, values, scores, and queries, sums, maxima and weights of a unit."""
    queries = -(-tokens_of_unit(group) * group // QUERIES) * QUERIES
    keys, values = padded(key_dim), padded(value_dim)
    return STRIDE * (keys + QUERIES) + KEY_BLOCK * values + queries * (keys + values + 2)


def make_attend_prompt(Q, C, KEY, VALUE, GROUP, OUT):
    """Attention of every row.

    Arguments: q, its token stride, its head stride; keys, their slot stride, their head stride; values, their slot
    stride, their head stride; pages or 0, their row stride, page size; located (`attend.make_locate`); query_lens,
    num_rows, num_kv_heads; score factor, softcap or 0, value factor; sinks or 0; out, its token stride, its head
    stride; lse or 0; scratch of each thread, its size. Without pages, entry i of a row is in slot `first token + i`.
    """
    TOKENS = tokens_of_unit(GROUP)
    COUNT = -(-TOKENS * GROUP // QUERIES) * QUERIES
    K, V = padded(KEY), padded(VALUE)

    def attend_prompt(arguments, thread, num_threads):
        query_lens, num_rows, num_kv_heads = load64(arguments, 13), load64(arguments, 14), load64(arguments, 15)
        keys = load64(arguments, 24) + 4 * thread * load64(arguments, 25)
        values = keys + 4 * STRIDE * K
        scores = values + 4 * KEY_BLOCK * V
        queries = scores + 4 * STRIDE * QUERIES
        sums = queries + 4 * COUNT * K
        maxima = sums + 4 * COUNT * V
        totals = maxima + 4 * COUNT
        token, unit = 0, 0
        for row in range(num_rows):
            length = load64(query_lens, row)
            for first in range(token, token + length, TOKENS):
                count = min(TOKENS, token + length - first)
                for head in range(num_kv_heads):
                    if unit % num_threads == thread:
                        _begin(arguments, queries, sums, maxima, totals, first, count, head, Q, KEY, K, V, GROUP)
                        start, stop = _seen(arguments, first, count)
                        for key in range(start, stop, KEY_BLOCK):
                            num_keys = min(KEY_BLOCK, stop - key)
                            _pack(arguments, keys, values, first, head, key, num_keys, C, KEY, VALUE, K, V)
                            for tile in range(0, count * GROUP, QUERIES):
                                score_tile(
                                    queries + 4 * tile * K,
                                    keys,
                                    (num_keys + KEYS - 1) // KEYS * KEYS,
                                    scores,
                                    K,
                                    STRIDE,
                                )
                                _weigh(
                                    arguments, scores, sums, maxima, totals, first, count, tile, key, num_keys, V, GROUP
                                )
                                value_tile(
                                    scores,
                                    values,
                                    (num_keys + STEP - 1) // STEP * STEP,
                                    sums + 4 * tile * V,
                                    V,
                                    STRIDE,
                                )
                        _finish(arguments, sums, maxima, totals, first, count, head, Q, VALUE, V, GROUP, OUT)
                    unit += 1
            token += length

    return attend_prompt


@numba.njit(inline="always")
def _seen(arguments, first, count):
    """The keys that any of some tokens sees: the first, and one behind the last."""
    located = load64(arguments, 12)
    start, stop = load64(located, first * FIELDS + 1), load64(located, first * FIELDS + 2)
    for token in range(first + 1, first + count):
        start = min(start, load64(located, token * FIELDS + 1))
        stop = max(stop, load64(located, token * FIELDS + 2))
    return start, stop


@numba.njit(inline="always")
def _begin(arguments, queries, sums, maxima, totals, first, count, kv_head, Q, KEY, K, V, GROUP):
    """Scales the queries of a unit, in the order of tokens and heads, and clears its sums."""
    q, q_stride, q_head = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
    factor = float_of(load64(arguments, 16))
    for query in range((count * GROUP + QUERIES - 1) // QUERIES * QUERIES):
        # Queries that complete a tile are the last one again.
        taken = min(query, count * GROUP - 1)
        source = (first + taken // GROUP) * q_stride + (kv_head * GROUP + taken % GROUP) * q_head
        for d in range(KEY):
            store(queries, query * K + d, load(q, source + d, Q) * factor, 0)
        for d in range(KEY, K):
            store(queries, query * K + d, ZERO, 0)
        for d in range(V):
            store(sums, query * V + d, ZERO, 0)
        store(maxima, query, NOTHING, 0)
        store(totals, query, ZERO, 0)


@numba.njit(inline="always")
def _pack(arguments, keys, values, token, head, first, count, C, KEY, VALUE, K, V):
    """Copies a block of keys, turned, and of values, in fp32. Zeros complete the last tile."""
    source, key_stride = load64(arguments, 3), load64(arguments, 4)
    value_source, value_stride = load64(arguments, 6), load64(arguments, 7)
    key_head, value_head = head * load64(arguments, 5), head * load64(arguments, 8)
    pages, page_stride, page_size = load64(arguments, 9), load64(arguments, 10), load64(arguments, 11)
    place = load64(load64(arguments, 12), token * FIELDS)
    for j in range(count):
        slot = place + first + j
        if pages != 0:
            number = (first + j) // page_size
            slot = load64(pages, place * page_stride + number) * page_size + first + j - number * page_size
        for d in range(KEY):
            store(keys, d * STRIDE + j, load(source, slot * key_stride + key_head + d, C), 0)
        for d in range(VALUE):
            store(values, j * V + d, load(value_source, slot * value_stride + value_head + d, C), 0)
        for d in range(VALUE, V):
            store(values, j * V + d, ZERO, 0)
    for j in range(count, (count + KEYS - 1) // KEYS * KEYS):
        for d in range(KEY):
            store(keys, d * STRIDE + j, ZERO, 0)
        for d in range(V):
            store(values, j * V + d, ZERO, 0)
    for d in range(KEY, K):
        for j in range((count + KEYS - 1) // KEYS * KEYS):
            store(keys, d * STRIDE + j, ZERO, 0)


@numba.njit(inline="always")
def _weigh(arguments, scores, sums, maxima, totals, first, count, tile, key, num_keys, V, GROUP):
    """Turns the scores of a tile into weights relative to the largest so far, and rescales the sums where that grew."""
    located, softcap = load64(arguments, 12), float_of(load64(arguments, 17))
    for i in range(QUERIES):
        token = first + min(tile + i, count * GROUP - 1) // GROUP
        start = min(num_keys, max(0, load64(located, token * FIELDS + 1) - key))
        stop = max(start, min(num_keys, load64(located, token * FIELDS + 2) - key))
        row, query = scores + 4 * i * STRIDE, tile + i
        if softcap > ZERO:
            for j in range(start, stop):
                store(row, j, softcap * tanh32(load(row, j, 0) / softcap), 0)
        before = load(maxima, query, 0)
        most = _largest(row, start, stop, before)
        # All scores may be -inf: their weights are then 0, not NaN.
        base = most if most > NOTHING else ZERO
        total = ZERO
        for j in range(start):
            store(row, j, ZERO, 0)
        for j in range(start, stop):
            weight = exp32(load(row, j, 0) - base)
            store(row, j, weight, 0)
            total += weight
        for j in range(stop, (num_keys + STEP - 1) // STEP * STEP):
            store(row, j, ZERO, 0)
        kept = exp32(before - base)
        store(totals, query, load(totals, query, 0) * kept + total, 0)
        store(maxima, query, most, 0)
        if kept != ONE:
            for d in range(V):
                store(sums, query * V + d, load(sums, query * V + d, 0) * kept, 0)


@numba.njit(inline="always")
def _largest(scores, start, stop, before):
    """The largest of some scores and of `before`. Eight chains of comparisons."""
    m0 = m1 = m2 = m3 = m4 = m5 = m6 = m7 = before
    whole = start + (stop - start) // 8 * 8
    for j in range(start, whole, 8):
        m0 = max32(m0, load(scores, j, 0))
        m1 = max32(m1, load(scores, j + 1, 0))
        m2 = max32(m2, load(scores, j + 2, 0))
        m3 = max32(m3, load(scores, j + 3, 0))
        m4 = max32(m4, load(scores, j + 4, 0))
        m5 = max32(m5, load(scores, j + 5, 0))
        m6 = max32(m6, load(scores, j + 6, 0))
        m7 = max32(m7, load(scores, j + 7, 0))
    for j in range(whole, stop):
        m0 = max32(m0, load(scores, j, 0))
    return max32(max32(max32(m0, m1), max32(m2, m3)), max32(max32(m4, m5), max32(m6, m7)))


@numba.njit(inline="always")
def _finish(arguments, sums, maxima, totals, first, count, kv_head, Q, VALUE, V, GROUP, OUT):
    """Writes the outputs of a unit, and their log-sum-exps."""
    value_factor, sinks = float_of(load64(arguments, 18)), load64(arguments, 19)
    out, out_stride, out_head = load64(arguments, 20), load64(arguments, 21), load64(arguments, 22)
    lse, num_heads = load64(arguments, 23), load64(arguments, 15) * GROUP
    for query in range(count * GROUP):
        token, head = first + query // GROUP, kv_head * GROUP + query % GROUP
        most, total = load(maxima, query, 0), load(totals, query, 0)
        base = most if most > NOTHING else ZERO
        kept = ONE
        if sinks != 0:
            sink = load(sinks, head, Q)
            base = max32(sink, most)
            kept = exp32(most - base)
            total = total * kept + exp32(sink - base)
        # Also without a key: a sum of 0 stays 0.
        scale = value_factor * kept / total if total != ZERO else ZERO
        target = token * out_stride + head * out_head
        for d in range(VALUE):
            store(out, target + d, load(sums, query * V + d, 0) * scale, OUT)
        if lse != 0:
            store(lse, token * num_heads + head, base + np.float32(math.log(total)) if total != ZERO else NOTHING, 0)
