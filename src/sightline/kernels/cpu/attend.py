"""Kernels of attention over pages in place: where tokens read, the cache write, partial results, and their merge.

    locate      once a step: for each token, its row's pages and the keys that it sees, from lengths in memory
    write       the new entries of one layer
    attend      a unit is (token, key head, split of the keys): online softmax over blocks of keys
    merge       the splits of each (token, query head)

Units are dealt out to the threads. What is launched depends on numbers of tokens and heads only, so a recorded program
serves any lengths. A token that belongs to no row is skipped, and its output left as it is. Arithmetic is fp32.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from sightline.kernels.cpu.instructions import exp32, float_of, load, load64, load_byte, max32, store, store64

BLOCK = 64
"""Keys whose scores are computed before their values are added. A multiple of 4."""
MIN_SPLIT = 16
"""Fewest keys of a split: fewer are not worth a merge."""
FIELDS = 8
"""What `locate` writes for a token: page-table row (or the row's first token), first key, end of the keys (-1 if it
belongs to no row), address of its line of a tree or 0. For trees also: the row's context_len, the address of the
positions of its new tokens, the token's own position, and the window or 0."""
NOTHING = np.float32(-np.inf)
ZERO, ONE, TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)


def scratch_floats(group: int, key_dim: int, value_dim: int) -> int:
    """The fp32 numbers that a thread of `attend` needs: queries, sums of values, scores, maxima and weights."""
    return -(-group * (key_dim + value_dim + BLOCK + 2) // 32) * 32


def make_locate():
    """Which keys each token sees. Runs in one thread.

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
    [num_tokens, heads, splits, VALUE + 2] fp32; scratch of each thread, its size; slots of each thread [BLOCK] int64;
    num_q_heads. Without pages, entry i of a row is in slot `first token + i`.
    """

    def attend(arguments, thread, num_threads):
        located, num_tokens = load64(arguments, 12), load64(arguments, 13)
        num_kv_heads, num_splits = load64(arguments, 14), load64(arguments, 15)
        softcap = float_of(load64(arguments, 17))
        queries = load64(arguments, 25) + 4 * thread * load64(arguments, 26)
        sums = queries + 4 * GROUP * KEY
        scores = sums + 4 * GROUP * VALUE
        maxima = scores + 4 * GROUP * BLOCK
        weights = maxima + 4 * GROUP
        slots = load64(arguments, 27) + 8 * thread * BLOCK
        for unit in range(thread, num_tokens * num_kv_heads * num_splits, num_threads):
            split, kv_head = unit % num_splits, unit // num_splits % num_kv_heads
            token = unit // num_splits // num_kv_heads
            start, stop = load64(located, token * FIELDS + 1), load64(located, token * FIELDS + 2)
            if stop < 0:
                continue
            share = max(MIN_SPLIT, (stop - start + num_splits - 1) // num_splits)
            first, stop = start + split * share, min(stop, start + (split + 1) * share)
            _begin(arguments, queries, sums, maxima, weights, token, kv_head, Q, KEY, VALUE, GROUP)
            while first < stop:
                count = _find_slots(arguments, slots, token, first, min(BLOCK, stop - first))
                first += BLOCK
                if count > 0:
                    padded = (count + 3) // 4 * 4
                    _score(arguments, queries, slots, scores, padded, kv_head, C, KEY, GROUP)
                    _weigh(scores, sums, maxima, weights, count, padded, softcap, VALUE, GROUP)
                    _add_values(arguments, slots, scores, sums, padded, kv_head, C, VALUE, GROUP)
            for g in range(GROUP):
                head = kv_head * GROUP + g
                if num_splits > 1:
                    part = ((token * num_kv_heads * GROUP + head) * num_splits + split) * (VALUE + 2)
                    parts = load64(arguments, 24)
                    store(parts, part, load(maxima, g, 0), 0)
                    store(parts, part + 1, load(weights, g, 0), 0)
                    for d in range(VALUE):
                        store(parts, part + 2 + d, load(sums, g * VALUE + d, 0), 0)
                else:
                    result = sums + 4 * g * VALUE
                    _finish(arguments, result, load(maxima, g, 0), load(weights, g, 0), token, head, Q, VALUE, OUT)

    return attend


@numba.njit(inline="always")
def _begin(arguments, queries, sums, maxima, weights, token, kv_head, Q, KEY, VALUE, GROUP):
    """Scales a group's queries, and clears its sums."""
    q, q_stride, q_head = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
    factor = float_of(load64(arguments, 16))
    for g in range(GROUP):
        source = token * q_stride + (kv_head * GROUP + g) * q_head
        for d in range(KEY):
            store(queries, g * KEY + d, load(q, source + d, Q) * factor, 0)
        for d in range(VALUE):
            store(sums, g * VALUE + d, ZERO, 0)
        store(maxima, g, NOTHING, 0)
        store(weights, g, ZERO, 0)


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
def _score(arguments, queries, slots, scores, padded, kv_head, C, KEY, GROUP):
    """The scores of a block of keys, four keys at once, so that a query is loaded once for them."""
    keys, stride, head = load64(arguments, 3), load64(arguments, 4), load64(arguments, 5)
    for j in range(0, padded, 4):
        k0 = load64(slots, j) * stride + kv_head * head
        k1 = load64(slots, j + 1) * stride + kv_head * head
        k2 = load64(slots, j + 2) * stride + kv_head * head
        k3 = load64(slots, j + 3) * stride + kv_head * head
        for g in range(GROUP):
            s0, s1, s2, s3 = ZERO, ZERO, ZERO, ZERO
            for d in range(KEY):
                value = load(queries, g * KEY + d, 0)
                s0 += value * load(keys, k0 + d, C)
                s1 += value * load(keys, k1 + d, C)
                s2 += value * load(keys, k2 + d, C)
                s3 += value * load(keys, k3 + d, C)
            store(scores, g * BLOCK + j, s0, 0)
            store(scores, g * BLOCK + j + 1, s1, 0)
            store(scores, g * BLOCK + j + 2, s2, 0)
            store(scores, g * BLOCK + j + 3, s3, 0)


@numba.njit(inline="always")
def _weigh(scores, sums, maxima, weights, count, padded, softcap, VALUE, GROUP):
    """Turns scores into weights relative to the largest so far, and rescales the sums where that grew."""
    for g in range(GROUP):
        if softcap > ZERO:
            for j in range(padded):
                value = load(scores, g * BLOCK + j, 0) / softcap
                value = softcap * (ONE - TWO / (ONE + exp32(TWO * value)))
                store(scores, g * BLOCK + j, value, 0)
        before = load(maxima, g, 0)
        most = before
        for j in range(count):
            most = max32(most, load(scores, g * BLOCK + j, 0))
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
def _add_values(arguments, slots, scores, sums, padded, kv_head, C, VALUE, GROUP):
    """Adds the weighted values of a block, four at once, so that a sum is loaded and stored once for them."""
    values, stride, head = load64(arguments, 6), load64(arguments, 7), load64(arguments, 8)
    for j in range(0, padded, 4):
        v0 = load64(slots, j) * stride + kv_head * head
        v1 = load64(slots, j + 1) * stride + kv_head * head
        v2 = load64(slots, j + 2) * stride + kv_head * head
        v3 = load64(slots, j + 3) * stride + kv_head * head
        for g in range(GROUP):
            w0, w1 = load(scores, g * BLOCK + j, 0), load(scores, g * BLOCK + j + 1, 0)
            w2, w3 = load(scores, g * BLOCK + j + 2, 0), load(scores, g * BLOCK + j + 3, 0)
            for d in range(VALUE):
                value = w0 * load(values, v0 + d, C) + w1 * load(values, v1 + d, C)
                value += w2 * load(values, v2 + d, C) + w3 * load(values, v3 + d, C)
                store(sums, g * VALUE + d, load(sums, g * VALUE + d, 0) + value, 0)


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
