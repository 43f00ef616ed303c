"""Kernels of attention over pages in place: where tokens read, the cache write, partial results, and their merge.

    locate      once a step: for each token, its row's pages and the keys that it sees, from lengths in memory
    write       the new entries of one layer
    attend      a unit is (token, split of the keys): online softmax over blocks of keys, all heads of a block in turn,
                because their keys and values are side by side in memory
    merge       the splits of each (token, query head)

Units are dealt out to the threads. What is launched depends on numbers of tokens and heads only, so a recorded program
serves any lengths. A token that belongs to no row is skipped, and its output left as it is. Arithmetic is fp32.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from sightline.kernels.cpu.attend_vectors import AHEAD, score_keys, sum_values
from sightline.kernels.cpu.instructions import exp32, float_of, load, load64, load_byte, max32, store, store64
from sightline.kernels.cpu.pointwise import tanh32

BLOCK = 64
"""Keys whose scores are computed before their values are added. A multiple of 4."""
SLOTS = 2 * (BLOCK + AHEAD)
"""Slots that a thread keeps: those of a block and of the next one, and some that are only looked at."""
MIN_SPLIT = 16
"""Fewest keys of a split: fewer are not worth a merge."""
FIELDS = 8
"""What `locate` writes for a token: page-table row (or the row's first token), first key, end of the keys (-1 if it
belongs to no row), address of its line of a tree or 0. For trees also: the row's context_len, the address of the
positions of its new tokens, the token's own position, and the window or 0."""
NOTHING = np.float32(-np.inf)
ZERO, ONE, TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)


def scratch_floats(num_heads: int, group: int, key_dim: int, value_dim: int) -> int:
    """The fp32 numbers that a thread of `attend` needs: queries, sums of values, maxima and weights, and scores."""
    return -(-(num_heads * (key_dim + value_dim + 2) + group * BLOCK) // 32) * 32


def make_locate():
    """Finds which keys each token sees. Runs in one thread.

    Arguments: query_lens, context_lens or 0, table_rows or 0, num_rows, num_tokens, window or 0, out [num_tokens,
    FIELDS] int64; kinds of the rows' masks (int64: 0 causal, 1 full, 2 tree) or 0; for trees, the place of each row's
    first byte (int64), the bytes (1 if a query sees a new token), and the positions of all tokens.
    """

    def locate(arguments, thread, num_threads):
        query_lens, context_lens, table_rows = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        num_rows, num_tokens, window = load64(arguments, 3), load64(arguments, 4), load64(arguments, 5)
        out, kinds, tree_places = load64(arguments, 6), load64(arguments, 7), load64(arguments, 8)
        trees, positions = load64(arguments, 9), load64(arguments, 10)
        if thread != 0:
            return
        token = 0
        for row in range(num_rows):
            first_token, query_len = token, load64(query_lens, row)
            context_len = load64(context_lens, row) if context_lens != 0 else 0
            place = load64(table_rows, row) if table_rows != 0 else first_token
            kind = load64(kinds, row) if kinds != 0 else 0
            for query in range(query_len):
                field, position = out + 8 * token * FIELDS, context_len + query
                stop, tree = position + 1 if kind == 0 else context_len + query_len, 0
                if kind == 2:
                    position = load64(positions, token)
                    tree = trees + load64(tree_places, row) + query * query_len
                elif window > 0:
                    stop = min(stop, position + window)
                store64(field, 0, place)
                store64(field, 1, max(0, position - window + 1) if window > 0 else 0)
                store64(field, 2, stop)
                store64(field, 3, tree)
                store64(field, 4, context_len)
                store64(field, 5, positions + 8 * first_token)
                store64(field, 6, position)
                store64(field, 7, window)
                token += 1
        for rest in range(token, num_tokens):
            store64(out, rest * FIELDS + 2, -1)

    return locate


def make_write(X, C):
    """Writes entries to their slots, divided by the scale if the cache is scaled.

    Arguments: x, its token stride, its head stride, num_tokens, num_heads, size, plane, its slot stride, its head
    stride, slots int64, scale.
    """

    def write(arguments, thread, num_threads):
        x, x_stride, x_head = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        num_tokens, num_heads, size = load64(arguments, 3), load64(arguments, 4), load64(arguments, 5)
        plane, slot_stride, plane_head = load64(arguments, 6), load64(arguments, 7), load64(arguments, 8)
        slots, scale = load64(arguments, 9), float_of(load64(arguments, 10))
        for unit in range(thread, num_tokens * num_heads, num_threads):
            token, head = unit // num_heads, unit % num_heads
            source = token * x_stride + head * x_head
            target = load64(slots, token) * slot_stride + head * plane_head
            for i in range(size):
                value = load(x, source + i, X)
                if C == 3:
                    value = value / scale
                store(plane, target + i, value, C)

    return write


def make_attend(Q, C, KEY, VALUE, GROUP, OUT):
    """Attention of every unit: the output if there is one split, otherwise its partial result.

    Arguments: q, its token stride, its head stride; keys, their slot stride, their head stride; values, their slot
    stride, their head stride; pages or 0, their row stride, page size; located; num_tokens, num_kv_heads, num_splits;
    score factor, softcap or 0, value factor; sinks or 0; out, its token stride, its head stride; lse or 0; parts
    [num_tokens, heads, splits, VALUE + 2] fp32; scratch of each thread, its size; slots of each thread [SLOTS] int64;
    num_q_heads. Without pages, entry i of a row is in slot `first token + i`.
    """

    def attend(arguments, thread, num_threads):
        located, num_tokens = load64(arguments, 12), load64(arguments, 13)
        num_kv_heads, num_splits = load64(arguments, 14), load64(arguments, 15)
        num_heads = num_kv_heads * GROUP
        queries = load64(arguments, 25) + 4 * thread * load64(arguments, 26)
        sums = queries + 4 * num_heads * KEY
        maxima = sums + 4 * num_heads * VALUE
        weights = maxima + 4 * num_heads
        scores = weights + 4 * num_heads
        slots = load64(arguments, 27) + 8 * thread * SLOTS
        for unit in range(thread, num_tokens * num_splits, num_threads):
            token, split = unit // num_splits, unit % num_splits
            start, stop = load64(located, token * FIELDS + 1), load64(located, token * FIELDS + 2)
            if stop < 0:
                continue
            share = max(MIN_SPLIT, (stop - start + num_splits - 1) // num_splits)
            first, stop = start + split * share, min(stop, start + (split + 1) * share)
            _begin(arguments, queries, sums, maxima, weights, token, num_heads, Q, KEY, VALUE)
            here, there = slots, slots + 8 * (BLOCK + AHEAD)
            count = _find_slots(arguments, here, token, first, min(BLOCK, stop - first))
            while first < stop:
                first += BLOCK
                next_count = _find_slots(arguments, there, token, first, min(BLOCK, stop - first))
                if count > 0:
                    _add_block(
                        arguments, here, there, count, queries, sums, maxima, weights, scores, C, KEY, VALUE, GROUP
                    )
                here, there, count = there, here, next_count
            for head in range(num_heads):
                most, total, result = load(maxima, head, 0), load(weights, head, 0), sums + 4 * head * VALUE
                if num_splits > 1:
                    part = ((token * num_heads + head) * num_splits + split) * (VALUE + 2)
                    parts = load64(arguments, 24)
                    store(parts, part, most, 0)
                    store(parts, part + 1, total, 0)
                    for d in range(VALUE):
                        store(parts, part + 2 + d, load(result, d, 0), 0)
                else:
                    _finish(arguments, result, most, total, token, head, Q, VALUE, OUT)

    return attend


@numba.njit(inline="always")
def _begin(arguments, queries, sums, maxima, weights, token, num_heads, Q, KEY, VALUE):
    """Scales the queries of a token, and clears its sums."""
    q, q_stride, q_head = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
    factor = float_of(load64(arguments, 16))
    for head in range(num_heads):
        source = token * q_stride + head * q_head
        for d in range(KEY):
            store(queries, head * KEY + d, load(q, source + d, Q) * factor, 0)
        for d in range(VALUE):
            store(sums, head * VALUE + d, ZERO, 0)
        store(maxima, head, NOTHING, 0)
        store(weights, head, ZERO, 0)


@numba.njit(inline="always")
def _add_block(arguments, here, there, count, queries, sums, maxima, weights, scores, C, KEY, VALUE, GROUP):
    """Adds a block of keys to the results of all heads. What is needed next is brought near meanwhile."""
    size = 4 if C == 0 else (1 if C == 3 else 2)
    keys, key_head = load64(arguments, 3), load64(arguments, 5) * size
    values, value_head = load64(arguments, 6), load64(arguments, 8) * size
    strides = load64(arguments, 4) * size, load64(arguments, 7) * size
    num_kv_heads, softcap = load64(arguments, 14), float_of(load64(arguments, 17))
    padded = (count + 3) // 4 * 4
    for kv_head in range(num_kv_heads):
        own_keys, own_values = keys + kv_head * key_head, values + kv_head * value_head
        is_last = kv_head == num_kv_heads - 1
        next_head = 0 if is_last else kv_head + 1
        ahead = there if is_last else here, keys + next_head * key_head, values + next_head * value_head
        own_queries, first = queries + 4 * kv_head * GROUP * KEY, 4 * kv_head * GROUP
        own_sums = sums + first * VALUE
        score_keys(own_queries, GROUP, own_keys, own_values, here, strides, padded, scores, BLOCK, KEY, C, ahead)
        _weigh(scores, own_sums, maxima + first, weights + first, count, padded, softcap, VALUE, GROUP)
        sum_values(own_values, here, strides[1], count, scores, BLOCK, own_sums, GROUP, VALUE, C)


@numba.njit(inline="always")
def _find_slots(arguments, slots, token, first, length):
    """Writes the slots of the visible keys from `first` on, up to a multiple of 4, and returns how many there are."""
    pages, page_stride, page_size = load64(arguments, 9), load64(arguments, 10), load64(arguments, 11)
    field = load64(arguments, 12) + 8 * token * FIELDS
    place, tree = load64(field, 0), load64(field, 3)
    count, j = 0, 0
    while j < length:
        run = length - j
        slot = place + first + j
        if pages != 0:
            number = (first + j) // page_size
            offset = first + j - number * page_size
            slot = load64(pages, place * page_stride + number) * page_size + offset
            run = min(run, page_size - offset)
        for i in range(run):
            if tree == 0 or _is_in_tree(field, first + j + i):
                store64(slots, count, slot + i)
                count += 1
        j += run
    # Entries that complete a group of four are the last key again, with no weight.
    for j in range(count, (count + 3) // 4 * 4):
        store64(slots, j, load64(slots, count - 1))
    return count


@numba.njit(inline="always")
def _is_in_tree(field, key):
    """Whether a token sees a key of its row, if it sees the context."""
    tree, number = load64(field, 3), key - load64(field, 4)
    if number < 0:
        return True
    distance = abs(load64(field, 6) - load64(load64(field, 5), number))
    window = load64(field, 7)
    return load_byte(tree, number) != 0 and (window == 0 or distance < window)


@numba.njit(inline="always")
def _weigh(scores, sums, maxima, weights, count, padded, softcap, VALUE, GROUP):
    """Turns scores into weights relative to the largest so far, and rescales the sums where that grew."""
    for g in range(GROUP):
        if softcap > ZERO:
            for j in range(padded):
                value = load(scores, g * BLOCK + j, 0) / softcap
                value = softcap * tanh32(value)
                store(scores, g * BLOCK + j, value, 0)
        before = load(maxima, g, 0)
        # Four chains of comparisons. Entries behind the last key have its score.
        m0, m1, m2, m3 = before, NOTHING, NOTHING, NOTHING
        for j in range(0, padded, 4):
            m0 = max32(m0, load(scores, g * BLOCK + j, 0))
            m1 = max32(m1, load(scores, g * BLOCK + j + 1, 0))
            m2 = max32(m2, load(scores, g * BLOCK + j + 2, 0))
            m3 = max32(m3, load(scores, g * BLOCK + j + 3, 0))
        most = max32(max32(m0, m1), max32(m2, m3))
        # All scores may be -inf: their weights are then 0, not NaN.
        base = most if most > NOTHING else ZERO
        total = ZERO
        for j in range(count):
            weight = exp32(load(scores, g * BLOCK + j, 0) - base)
            store(scores, g * BLOCK + j, weight, 0)
            total += weight
        for j in range(count, padded):
            store(scores, g * BLOCK + j, ZERO, 0)
        kept = exp32(before - base)
        store(weights, g, load(weights, g, 0) * kept + total, 0)
        store(maxima, g, most, 0)
        if kept != ONE:
            for d in range(VALUE):
                store(sums, g * VALUE + d, load(sums, g * VALUE + d, 0) * kept, 0)


@numba.njit(inline="always")
def _finish(arguments, result, most, total, token, head, Q, VALUE, OUT):
    """Writes the output of a head whose keys were not split, and its log-sum-exp."""
    value_factor, sinks = float_of(load64(arguments, 18)), load64(arguments, 19)
    out, out_stride, out_head = load64(arguments, 20), load64(arguments, 21), load64(arguments, 22)
    lse, num_heads = load64(arguments, 23), load64(arguments, 28)
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
        store(out, target + d, load(result, d, 0) * scale, OUT)
    if lse != 0:
        store(lse, token * num_heads + head, base + np.float32(math.log(total)) if total != ZERO else NOTHING, 0)


def make_merge(Q, VALUE, OUT):
    """The output of each (token, head) from its splits.

    Arguments: parts [num_tokens, num_heads, num_splits, VALUE + 2] fp32; located; num_tokens, num_heads, num_splits;
    value factor; sinks or 0; out, its token stride, its head stride; lse or 0.
    """

    def merge(arguments, thread, num_threads):
        parts, located, num_tokens = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        num_heads, num_splits = load64(arguments, 3), load64(arguments, 4)
        value_factor, sinks = float_of(load64(arguments, 5)), load64(arguments, 6)
        out, out_stride, out_head = load64(arguments, 7), load64(arguments, 8), load64(arguments, 9)
        lse = load64(arguments, 10)
        for unit in range(thread, num_tokens * num_heads, num_threads):
            token, head = unit // num_heads, unit % num_heads
            if load64(located, token * FIELDS + 2) < 0:
                continue
            part, step = unit * num_splits * (VALUE + 2), VALUE + 2
            base = load(sinks, head, Q) if sinks != 0 else NOTHING
            for split in range(num_splits):
                base = max32(base, load(parts, part + split * step, 0))
            base = base if base > NOTHING else ZERO
            total = exp32(load(sinks, head, Q) - base) if sinks != 0 else ZERO
            for split in range(num_splits):
                kept = exp32(load(parts, part + split * step, 0) - base)
                total += kept * load(parts, part + split * step + 1, 0)
            target = token * out_stride + head * out_head
            scale = value_factor / total if total != ZERO else ZERO
            for d in range(VALUE):
                value = ZERO
                for split in range(num_splits):
                    kept = exp32(load(parts, part + split * step, 0) - base)
                    value += kept * load(parts, part + split * step + 2 + d, 0)
                store(out, target + d, value * scale, OUT)
            if lse != 0:
                store(lse, unit, base + np.float32(math.log(total)) if total != ZERO else NOTHING, 0)

    return merge
