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

import numpy as np

from sightline.kernels.cpu.instructions import exp32, float_of, load, load64, max32, store, store64

BLOCK = 64
"""Keys whose scores are computed before their values are added. A multiple of 4."""
MIN_SPLIT = 16
"""Fewest keys of a split: fewer are not worth a merge."""
FIELDS = 4
"""What `locate` writes for a token: page-table row (or the row's first token), first key, end of the keys, unused."""
NOTHING = np.float32(-np.inf)
ZERO, ONE, TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)


def scratch_floats(group: int, key_dim: int, value_dim: int) -> int:
    """The fp32 numbers that a thread of `attend` needs: queries, sums of values, scores, maxima and weights."""
    return -(-group * (key_dim + value_dim + BLOCK + 2) // 32) * 32


def make_locate():
    """Which keys each token sees. Runs in one thread.

    Arguments: query_lens, context_lens or 0, table_rows or 0, num_rows, num_tokens, window or 0, full masks of rows
    (int64, 1 if a row's tokens see each other) or 0, out [num_tokens, FIELDS] int64.
    """

    def locate(arguments, thread, num_threads):
        query_lens, context_lens, table_rows = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        num_rows, num_tokens, window = load64(arguments, 3), load64(arguments, 4), load64(arguments, 5)
        full, out = load64(arguments, 6), load64(arguments, 7)
        if thread != 0:
            return
        token = 0
        for row in range(num_rows):
            first_token, query_len = token, load64(query_lens, row)
            context_len = load64(context_lens, row) if context_lens != 0 else 0
            place = load64(table_rows, row) if table_rows != 0 else first_token
            for query in range(query_len):
                position = context_len + query
                is_full = full != 0 and load64(full, row) != 0
                stop = context_len + query_len if is_full else position + 1
                start = 0
                if window > 0:
                    start = max(0, position - window + 1)
                    stop = min(stop, position + window)
                store64(out, token * FIELDS, place)
                store64(out, token * FIELDS + 1, start)
                store64(out, token * FIELDS + 2, stop)
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
    [num_tokens, heads, splits, VALUE + 2] fp32; scratch of each thread, its size; slots of each thread [BLOCK] int64.
    Without pages, entry i of a row is in slot `first token + i`.
    """

    def attend(arguments, thread, num_threads):
        q, q_stride, q_head = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        keys, key_stride, key_head = load64(arguments, 3), load64(arguments, 4), load64(arguments, 5)
        values, value_stride, value_head = load64(arguments, 6), load64(arguments, 7), load64(arguments, 8)
        pages, page_stride, page_size = load64(arguments, 9), load64(arguments, 10), load64(arguments, 11)
        located, num_tokens = load64(arguments, 12), load64(arguments, 13)
        num_kv_heads, num_splits = load64(arguments, 14), load64(arguments, 15)
        factor, softcap = float_of(load64(arguments, 16)), float_of(load64(arguments, 17))
        value_factor, sinks = float_of(load64(arguments, 18)), load64(arguments, 19)
        out, out_stride, out_head = load64(arguments, 20), load64(arguments, 21), load64(arguments, 22)
        lse, parts = load64(arguments, 23), load64(arguments, 24)
        queries = load64(arguments, 25) + 4 * thread * load64(arguments, 26)
        sums = queries + 4 * GROUP * KEY
        scores = sums + 4 * GROUP * VALUE
        maxima = scores + 4 * GROUP * BLOCK
        weights = maxima + 4 * GROUP
        slots = load64(arguments, 27) + 8 * thread * BLOCK
        for unit in range(thread, num_tokens * num_kv_heads * num_splits, num_threads):
            split, kv_head = unit % num_splits, unit // num_splits % num_kv_heads
            token = unit // num_splits // num_kv_heads
            place, start = load64(located, token * FIELDS), load64(located, token * FIELDS + 1)
            stop = load64(located, token * FIELDS + 2)
            if stop < 0:
                continue
            share = max(MIN_SPLIT, (stop - start + num_splits - 1) // num_splits)
            first, stop = start + split * share, min(stop, start + (split + 1) * share)
            for g in range(GROUP):
                source = token * q_stride + (kv_head * GROUP + g) * q_head
                for d in range(KEY):
                    store(queries, g * KEY + d, load(q, source + d, Q) * factor, 0)
                for d in range(VALUE):
                    store(sums, g * VALUE + d, ZERO, 0)
                store(maxima, g, NOTHING, 0)
                store(weights, g, ZERO, 0)
            while first < stop:
                count = min(BLOCK, stop - first)
                padded = (count + 3) // 4 * 4
                if pages == 0:
                    for j in range(count):
                        store64(slots, j, place + first + j)
                else:
                    j = 0
                    while j < count:
                        number = (first + j) // page_size
                        offset = first + j - number * page_size
                        slot = load64(pages, place * page_stride + number) * page_size + offset
                        run = min(count - j, page_size - offset)
                        for i in range(run):
                            store64(slots, j + i, slot + i)
                        j += run
                # Entries that complete a group of four are the last key again, with no weight.
                for j in range(count, padded):
                    store64(slots, j, load64(slots, count - 1))
                for j in range(0, padded, 4):
                    k0 = load64(slots, j) * key_stride + kv_head * key_head
                    k1 = load64(slots, j + 1) * key_stride + kv_head * key_head
                    k2 = load64(slots, j + 2) * key_stride + kv_head * key_head
                    k3 = load64(slots, j + 3) * key_stride + kv_head * key_head
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
                for j in range(0, padded, 4):
                    v0 = load64(slots, j) * value_stride + kv_head * value_head
                    v1 = load64(slots, j + 1) * value_stride + kv_head * value_head
                    v2 = load64(slots, j + 2) * value_stride + kv_head * value_head
                    v3 = load64(slots, j + 3) * value_stride + kv_head * value_head
                    for g in range(GROUP):
                        w0, w1 = load(scores, g * BLOCK + j, 0), load(scores, g * BLOCK + j + 1, 0)
                        w2, w3 = load(scores, g * BLOCK + j + 2, 0), load(scores, g * BLOCK + j + 3, 0)
                        for d in range(VALUE):
                            value = w0 * load(values, v0 + d, C) + w1 * load(values, v1 + d, C)
                            value += w2 * load(values, v2 + d, C) + w3 * load(values, v3 + d, C)
                            store(sums, g * VALUE + d, load(sums, g * VALUE + d, 0) + value, 0)
                first += count
            for g in range(GROUP):
                head = kv_head * GROUP + g
                if num_splits > 1:
                    part = ((token * num_kv_heads * GROUP + head) * num_splits + split) * (VALUE + 2)
                    store(parts, part, load(maxima, g, 0), 0)
                    store(parts, part + 1, load(weights, g, 0), 0)
                    for d in range(VALUE):
                        store(parts, part + 2 + d, load(sums, g * VALUE + d, 0), 0)
                else:
                    most, total = load(maxima, g, 0), load(weights, g, 0)
                    base = most if most > NOTHING else ZERO
                    if sinks != 0:
                        sink = load(sinks, head, Q)
                        base = max32(sink, base) if most > NOTHING else sink
                        total = total * exp32(most - base) + exp32(sink - base)
                        scale = value_factor * exp32(most - base) / total
                    else:
                        # Also without a key: a sum of 0 stays 0.
                        scale = value_factor / total if total != ZERO else ZERO
                    target = token * out_stride + head * out_head
                    for d in range(VALUE):
                        store(out, target + d, load(sums, g * VALUE + d, 0) * scale, OUT)
                    if lse != 0:
                        value = base + np.float32(math.log(total)) if total != ZERO else NOTHING
                        store(lse, token * num_kv_heads * GROUP + head, value, 0)

    return attend


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
