"""Kernels of recurrent layers and of convolutions, token by token. Arithmetic is fp32.

Rows follow each other: row i has the next `query_lens[i]` tokens. A row reads the state in its read slot, and the state
behind a token goes to the token's write slot, or nowhere if that is 0. Tokens behind the last row are not touched.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from sightline.kernels.cpu.instructions import exp32, float_of, load, load64, store

ZERO, ONE = np.float32(0.0), np.float32(1.0)


@numba.njit(inline="always")
def _input(x, stride, first, place, channel, tail, before, X):
    """An input of a channel: at `place` in the row whose tokens begin at `first`, or, if that is negative, in the
    tail."""
    if place >= 0:
        return load(x, (first + place) * stride + channel, X)
    return load(tail, channel * before + before + place, 0) if tail != 0 else ZERO


@numba.njit(inline="always")
def _convolve(x, stride, first, token, channel, count, weight, bias, tail, out, X, W, ACTIVATED):
    """Writes the convolution of `count` channels for one token to the array `out` fp32."""
    for i in range(count):
        total = load(bias, channel + i, X) if bias != 0 else ZERO
        if token >= W - 1:
            for tap in range(W):
                place = (first + token + tap - (W - 1)) * stride + channel + i
                total += load(weight, (channel + i) * W + tap, X) * load(x, place, X)
        else:
            for tap in range(W):
                value = _input(x, stride, first, token + tap - (W - 1), channel + i, tail, W - 1, X)
                total += load(weight, (channel + i) * W + tap, X) * value
        store(out, i, total / (ONE + exp32(-total)) if ACTIVATED else total, 0)


@numba.njit(inline="always")
def _keep_tail(x, stride, first, token, channel, count, tail, target, X, W):
    """Writes the last inputs of `count` channels behind a token to the array `target`."""
    for i in range(count):
        for column in range(W - 1):
            value = _input(x, stride, first, token + column - (W - 2), channel + i, tail, W - 1, X)
            store(target, (channel + i) * (W - 1) + column, value, 0)


@numba.njit(inline="always")
def _inverse_length(x, count, epsilon):
    squares = ZERO
    for i in range(count):
        value = load(x, i, 0)
        squares += value * value
    return ONE / math.sqrt(squares + epsilon)


def make_convolution(X, W):
    """The convolution of every channel over W tokens. Channels are shared among the threads.

    Arguments: x, its token stride, num_rows, query_lens int64, channels, weight [channels, W], bias or 0, out, its
    token stride, tails [slots, channels, W - 1] fp32 or 0, read slots int64, write slots int64, scratch fp32 [channels]
    """

    def convolution(arguments, thread, num_threads):
        x, stride, num_rows = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        lens, channels = load64(arguments, 3), load64(arguments, 4)
        weight, bias = load64(arguments, 5), load64(arguments, 6)
        out, out_stride, tails = load64(arguments, 7), load64(arguments, 8), load64(arguments, 9)
        read, written, scratch = load64(arguments, 10), load64(arguments, 11), load64(arguments, 12)
        begin, stop = channels * thread // num_threads, channels * (thread + 1) // num_threads
        results, slot_bytes, first = scratch + 4 * begin, 4 * channels * (W - 1), 0
        for row in range(num_rows):
            tail = tails + load64(read, row) * slot_bytes if tails != 0 else 0
            for token in range(load64(lens, row)):
                _convolve(x, stride, first, token, begin, stop - begin, weight, bias, tail, results, X, W, False)
                for i in range(stop - begin):
                    store(out, (first + token) * out_stride + begin + i, load(results, i, 0), X)
                slot = load64(written, first + token) if tails != 0 else 0
                if slot != 0:
                    target = tails + slot * slot_bytes
                    _keep_tail(x, stride, first, token, begin, stop - begin, tail, target, X, W)
            first += load64(lens, row)

    return convolution


@numba.njit(inline="always")
def _factors(left, vector, k, CHANNELS):
    """Four numbers of a vector, decayed."""
    return (
        load(vector, k, 0) * load(left, k if CHANNELS else 0, 0),
        load(vector, k + 1, 0) * load(left, k + 1 if CHANNELS else 0, 0),
        load(vector, k + 2, 0) * load(left, k + 2 if CHANNELS else 0, 0),
        load(vector, k + 3, 0) * load(left, k + 3 if CHANNELS else 0, 0),
    )


@numba.njit(inline="always")
def _read_state(source, key_dim, value_dim, query, key, left, found, recalled, DELTA, CHANNELS):
    """Writes what the query and, with the delta rule, the key find in the decayed state: four rows of it at once."""
    for v in range(value_dim):
        store(found, v, ZERO, 0)
        store(recalled, v, ZERO, 0)
    whole = key_dim // 4 * 4
    for k in range(0, whole, 4):
        q0, q1, q2, q3 = _factors(left, query, k, CHANNELS)
        r0, r1, r2, r3 = _factors(left, key, k, CHANNELS)
        row = source + 4 * k * value_dim
        for v in range(value_dim):
            s0, s1 = load(row, v, 0), load(row, value_dim + v, 0)
            s2, s3 = load(row, 2 * value_dim + v, 0), load(row, 3 * value_dim + v, 0)
            store(found, v, load(found, v, 0) + ((q0 * s0 + q1 * s1) + (q2 * s2 + q3 * s3)), 0)
            if DELTA:
                store(recalled, v, load(recalled, v, 0) + ((r0 * s0 + r1 * s1) + (r2 * s2 + r3 * s3)), 0)
    for k in range(whole, key_dim):
        kept = load(left, k if CHANNELS else 0, 0)
        q, r, row = load(query, k, 0) * kept, load(key, k, 0) * kept, source + 4 * k * value_dim
        for v in range(value_dim):
            store(found, v, load(found, v, 0) + q * load(row, v, 0), 0)
            if DELTA:
                store(recalled, v, load(recalled, v, 0) + r * load(row, v, 0), 0)


@numba.njit(inline="always")
def _write_state(source, target, key_dim, value_dim, key, left, stored, CHANNELS):
    """Writes the decayed state with what a token stores in it.

    A state that is changed in place has a loop of its own: vector code for two arrays needs them apart.
    """
    for k in range(key_dim):
        kept, factor = load(left, k if CHANNELS else 0, 0), load(key, k, 0)
        row, place = source + 4 * k * value_dim, target + 4 * k * value_dim
        if source == target:
            for v in range(value_dim):
                store(row, v, kept * load(row, v, 0) + factor * load(stored, v, 0), 0)
        else:
            for v in range(value_dim):
                store(place, v, kept * load(row, v, 0) + factor * load(stored, v, 0), 0)


def thread_floats(key_dim: int, value_dim: int) -> int:
    """The fp32 scratch that a thread of `make_recurrence` needs: a state, and vectors of a token."""
    return key_dim * value_dim + 3 * key_dim + 4 * value_dim


@numba.njit(inline="always")
def _vectors(mixed, stride, first, token, places, sizes, weight, bias, tail, targets, X, W):
    """Writes the query, key and value of a head, convolved if there is a convolution."""
    for part in range(3):
        if W != 0:
            _convolve(
                mixed, stride, first, token, places[part], sizes[part], weight, bias, tail, targets[part], X, W, True
            )
        else:
            for i in range(sizes[part]):
                store(targets[part], i, load(mixed, (first + token) * stride + places[part] + i, X), 0)


@numba.njit(inline="always")
def _scale(query, key, key_dim, scale, epsilon, UNIT):
    """Scales a query, and both vectors to unit length if the layer does that. Returns their product."""
    q_factor, k_factor, overlap = scale, ONE, ZERO
    if UNIT:
        q_factor = scale * _inverse_length(query, key_dim, epsilon)
        k_factor = _inverse_length(key, key_dim, epsilon)
    for i in range(key_dim):
        q, k = load(query, i, 0) * q_factor, load(key, i, 0) * k_factor
        overlap += q * k
        store(query, i, q, 0)
        store(key, i, k, 0)
    return overlap


@numba.njit(inline="always")
def _answer(value, found, recalled, stored, value_dim, overlap, beta, skip, head, out, at, X):
    """Writes what a token stores and its output."""
    factor = load(skip, head, 0) if skip != 0 else ZERO
    for i in range(value_dim):
        given = load(value, i, 0)
        kept = beta * (given - load(recalled, i, 0))
        store(stored, i, kept, 0)
        result = load(found, i, 0) + overlap * kept
        store(out, at + i, result + factor * given if skip != 0 else result, X)


@numba.njit(inline="always")
def _recur(arguments, row, head, first, own, X, W, DELTA, CHANNELS, UNIT):
    """Computes all tokens of one row in one head; `own` is the scratch of the thread."""
    mixed, stride, length = load64(arguments, 0), load64(arguments, 1), load64(load64(arguments, 3), row)
    num_heads, group, key_dim, value_dim = (
        load64(arguments, 4),
        load64(arguments, 5),
        load64(arguments, 6),
        load64(arguments, 7),
    )
    weight, bias, skip = load64(arguments, 8), load64(arguments, 9), load64(arguments, 16)
    decay = load64(arguments, 10) + 4 * head * load64(arguments, 12)
    beta = load64(arguments, 13) + 4 * head * load64(arguments, 15)
    scale, epsilon = float_of(load64(arguments, 17)), float_of(load64(arguments, 18))
    states, tails, read, written = (
        load64(arguments, 21),
        load64(arguments, 22),
        load64(arguments, 23),
        load64(arguments, 24),
    )
    size, keys = key_dim * value_dim, num_heads // group * key_dim
    query, key, left = own + 4 * size, own + 4 * (size + key_dim), own + 4 * (size + 2 * key_dim)
    value = own + 4 * (size + 3 * key_dim)
    found, recalled, stored = value + 4 * value_dim, value + 8 * value_dim, value + 12 * value_dim
    tail_bytes, sizes = 4 * (2 * keys + num_heads * value_dim) * (W - 1), (key_dim, key_dim, value_dim)
    places = (head // group * key_dim, keys + head // group * key_dim, 2 * keys + head * value_dim)
    tail = tails + load64(read, row) * tail_bytes if tails != 0 else 0
    source = states + 4 * (load64(read, row) * num_heads + head) * size if states != 0 else own
    if states == 0:
        for i in range(size):
            store(own, i, ZERO, 0)
    for token in range(length):
        at = first + token
        _vectors(mixed, stride, first, token, places, sizes, weight, bias, tail, (query, key, value), X, W)
        overlap = _scale(query, key, key_dim, scale, epsilon, UNIT)
        for i in range(key_dim if CHANNELS else 1):
            store(left, i, exp32(load(decay, at * load64(arguments, 11) + i, 0)), 0)
        _read_state(source, key_dim, value_dim, query, key, left, found, recalled, DELTA, CHANNELS)
        amount = load(beta, at * load64(arguments, 14), 0)
        out, place = load64(arguments, 19), at * load64(arguments, 20) + head * value_dim
        _answer(value, found, recalled, stored, value_dim, overlap, amount, skip, head, out, place, X)
        slot = load64(written, at) if states != 0 else 0
        target = states + 4 * (slot * num_heads + head) * size if slot != 0 else own
        _write_state(source, target, key_dim, value_dim, key, left, stored, CHANNELS)
        source = target
        if W != 0 and slot != 0:
            kept = tails + slot * tail_bytes
            for part in range(0 if head % group == 0 else 2, 3):
                _keep_tail(mixed, stride, first, token, places[part], sizes[part], tail, kept, X, W)


def make_recurrence(X, W, DELTA, CHANNELS, UNIT):
    """A recurrent layer, see `RecurrentSpec`. Heads of rows are shared among the threads.

    Arguments: mixed, its token stride, num_rows, query_lens int64, num_heads, group, key_dim, value_dim, weight
    [channels, W], bias or 0, decay fp32, its token stride, its head stride, beta fp32, its token stride, its head
    stride, skip fp32 or 0, scale, epsilon, out, its token stride, states [slots, num_heads, key_dim, value_dim] fp32 or
    0, tails [slots, channels, W - 1] fp32 or 0, read slots int64, write slots int64, scratch fp32, the floats of a
    thread. Without a convolution W is 0.
    """

    def recurrence(arguments, thread, num_threads):
        num_rows, lens, num_heads = load64(arguments, 2), load64(arguments, 3), load64(arguments, 4)
        own = load64(arguments, 25) + 4 * load64(arguments, 26) * thread
        first = 0
        for row in range(num_rows):
            # Threads take turns, beginning where the row before ended.
            for head in range((thread - row * num_heads) % num_threads, num_heads, num_threads):
                _recur(arguments, row, head, first, own, X, W, DELTA, CHANNELS, UNIT)
            first += load64(lens, row)

    return recurrence
