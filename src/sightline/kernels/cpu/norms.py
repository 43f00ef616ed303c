"""Kernels of norms: rows are shared among the threads. Sums are fp32."""

from __future__ import annotations

import math

import numba
import numpy as np

from sightline.kernels.cpu.instructions import float_of, load, load64, store

ONE = np.float32(1.0)


def make_rms_norm(X):
    """out[i] = x[i] / sqrt(mean(x²) + epsilon) * weight, for the rows of x in order, or those that `rows` names.

    Arguments: x, its row stride, rows or 0, num_rows, features, weight fp32, epsilon, out, its row stride.
    """

    def rms_norm(arguments, thread, num_threads):
        x, x_stride, rows = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        num_rows, features = load64(arguments, 3), load64(arguments, 4)
        weight, epsilon = load64(arguments, 5), float_of(load64(arguments, 6))
        out, out_stride = load64(arguments, 7), load64(arguments, 8)
        for row in range(thread, num_rows, num_threads):
            first = (load64(rows, row) if rows != 0 else row) * x_stride
            factor = inverse_root(x, first, features, epsilon, X)
            for i in range(features):
                store(out, row * out_stride + i, load(x, first + i, X) * factor * load(weight, i, 0), X)

    return rms_norm


def make_add_rms_norm(X):
    """stream += norm(result), and, if there is a next norm, out = next_norm(stream).

    Arguments: result, its row stride, stream, its row stride, num_rows, features, weight fp32, epsilon, next weight
    fp32 or 0, next epsilon, out, its row stride.
    """

    def add_rms_norm(arguments, thread, num_threads):
        result, result_stride = load64(arguments, 0), load64(arguments, 1)
        stream, stream_stride = load64(arguments, 2), load64(arguments, 3)
        num_rows, features = load64(arguments, 4), load64(arguments, 5)
        weight, epsilon = load64(arguments, 6), float_of(load64(arguments, 7))
        next_weight, next_epsilon = load64(arguments, 8), float_of(load64(arguments, 9))
        out, out_stride = load64(arguments, 10), load64(arguments, 11)
        for row in range(thread, num_rows, num_threads):
            first, target = row * result_stride, row * stream_stride
            factor = inverse_root(result, first, features, epsilon, X)
            for i in range(features):
                normed = load(result, first + i, X) * factor * load(weight, i, 0)
                store(stream, target + i, load(stream, target + i, X) + normed, X)
            if next_weight != 0:
                factor = inverse_root(stream, target, features, next_epsilon, X)
                for i in range(features):
                    normed = load(stream, target + i, X) * factor * load(next_weight, i, 0)
                    store(out, row * out_stride + i, normed, X)

    return add_rms_norm


def make_layer_norm(X):
    """out[i] = (x[i] - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias.

    Arguments: x, its row stride, num_rows, features, weight fp32, bias fp32, epsilon, out, its row stride.
    """

    def layer_norm(arguments, thread, num_threads):
        x, x_stride = load64(arguments, 0), load64(arguments, 1)
        num_rows, features = load64(arguments, 2), load64(arguments, 3)
        weight, bias, epsilon = load64(arguments, 4), load64(arguments, 5), float_of(load64(arguments, 6))
        out, out_stride = load64(arguments, 7), load64(arguments, 8)
        for row in range(thread, num_rows, num_threads):
            first = row * x_stride
            mean, factor = centre(x, first, features, epsilon, X)
            for i in range(features):
                normed = (load(x, first + i, X) - mean) * factor * load(weight, i, 0)
                store(out, row * out_stride + i, normed + load(bias, i, 0), X)

    return layer_norm


def make_turn(X):
    """Rotates heads, normalised before if there are weights. Dimension i pairs with i + head_dim / 2.

    Arguments: x, its token stride, its head stride, num_tokens, num_heads, head_dim, cos, its token stride, sin, its
    token stride, out, its token stride, its head stride, weight fp32 of the first heads or 0, their epsilon, num first
    heads, weight fp32 of the other heads, their epsilon. `out` must not overlap x.
    """

    def turn(arguments, thread, num_threads):
        x, x_stride, x_head = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        num_tokens, num_heads, head_dim = load64(arguments, 3), load64(arguments, 4), load64(arguments, 5)
        cos, cos_stride, sin, sin_stride = (
            load64(arguments, 6),
            load64(arguments, 7),
            load64(arguments, 8),
            load64(arguments, 9),
        )
        out, out_stride, out_head = load64(arguments, 10), load64(arguments, 11), load64(arguments, 12)
        num_first, half = load64(arguments, 15), head_dim // 2
        has_norms = load64(arguments, 13) != 0
        for unit in range(thread, num_tokens * num_heads, num_threads):
            token, head = unit // num_heads, unit % num_heads
            source = token * x_stride + head * x_head
            target = token * out_stride + head * out_head
            c, s = token * cos_stride, token * sin_stride
            if has_norms:
                place = 13 if head < num_first else 16
                weight, epsilon = load64(arguments, place), float_of(load64(arguments, place + 1))
                factor = inverse_root(x, source, head_dim, epsilon, X)
                for i in range(half):
                    low = load(x, source + i, X) * factor * load(weight, i, 0)
                    high = load(x, source + half + i, X) * factor * load(weight, half + i, 0)
                    store(out, target + i, low * load(cos, c + i, X) - high * load(sin, s + i, X), X)
                    turned = high * load(cos, c + half + i, X) + low * load(sin, s + i, X)
                    store(out, target + half + i, turned, X)
            else:
                for i in range(half):
                    low, high = load(x, source + i, X), load(x, source + half + i, X)
                    store(out, target + i, low * load(cos, c + i, X) - high * load(sin, s + i, X), X)
                    turned = high * load(cos, c + half + i, X) + low * load(sin, s + i, X)
                    store(out, target + half + i, turned, X)

    return turn


def make_turn_index(X):
    """Rotates the first dimensions of an indexer's queries and key, the key behind its layer norm.

    Arguments: q, its token stride, its head stride, num_tokens, num_heads, head_dim, key, its token stride, weight fp32
    and bias fp32 of its norm, epsilon, cos, its token stride, sin, its token stride, rotated dimensions, out
    [num_tokens, num_heads + 1, head_dim] contiguous, its token stride. `out` must not overlap the others.
    """

    def turn_index(arguments, thread, num_threads):
        q, q_stride, q_head = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        num_tokens, num_heads, head_dim = load64(arguments, 3), load64(arguments, 4), load64(arguments, 5)
        key, key_stride, weight = load64(arguments, 6), load64(arguments, 7), load64(arguments, 8)
        bias, epsilon = load64(arguments, 9), float_of(load64(arguments, 10))
        cos, cos_stride = load64(arguments, 11), load64(arguments, 12)
        sin, sin_stride = load64(arguments, 13), load64(arguments, 14)
        half, out, out_stride = load64(arguments, 15) // 2, load64(arguments, 16), load64(arguments, 17)
        for unit in range(thread, num_tokens * (num_heads + 1), num_threads):
            token, head = unit // (num_heads + 1), unit % (num_heads + 1)
            target, c, s = token * out_stride + head * head_dim, token * cos_stride, token * sin_stride
            if head < num_heads:
                source = token * q_stride + head * q_head
                for i in range(half):
                    low, high = load(q, source + i, X), load(q, source + half + i, X)
                    store(out, target + i, low * load(cos, c + i, X) - high * load(sin, s + i, X), X)
                    turned = high * load(cos, c + half + i, X) + low * load(sin, s + i, X)
                    store(out, target + half + i, turned, X)
                for i in range(2 * half, head_dim):
                    store(out, target + i, load(q, source + i, X), X)
            else:
                source = token * key_stride
                mean, factor = centre(key, source, head_dim, epsilon, X)
                for i in range(half):
                    low = (load(key, source + i, X) - mean) * factor * load(weight, i, 0) + load(bias, i, 0)
                    high = (load(key, source + half + i, X) - mean) * factor * load(weight, half + i, 0)
                    high += load(bias, half + i, 0)
                    store(out, target + i, low * load(cos, c + i, X) - high * load(sin, s + i, X), X)
                    turned = high * load(cos, c + half + i, X) + low * load(sin, s + i, X)
                    store(out, target + half + i, turned, X)
                for i in range(2 * half, head_dim):
                    normed = (load(key, source + i, X) - mean) * factor * load(weight, i, 0)
                    store(out, target + i, normed + load(bias, i, 0), X)

    return turn_index


@numba.njit(inline="always")
def centre(x, first, count, epsilon, X):
    """The mean of `count` elements, and 1 / sqrt(variance + epsilon)."""
    total = np.float32(0.0)
    for i in range(count):
        total += load(x, first + i, X)
    mean = total / np.float32(count)
    squares = np.float32(0.0)
    for i in range(count):
        value = load(x, first + i, X) - mean
        squares += value * value
    return mean, ONE / math.sqrt(squares / np.float32(count) + epsilon)


@numba.njit(inline="always")
def inverse_root(x, first, count, epsilon, X):
    """1 / sqrt(mean(x²) + epsilon) of `count` elements."""
    squares = np.float32(0.0)
    for i in range(count):
        value = load(x, first + i, X)
        squares += value * value
    return ONE / math.sqrt(squares / np.float32(count) + epsilon)


def make_rotary_table(X):
    """The cosines and sines of positions.

    Arguments: positions int64, num_tokens, frequencies fp32, num_frequencies, amplitude, cos, its token stride, sin,
    its token stride, minus_sin, its token stride. Cosines are written twice, for both halves of a head.
    """

    def rotary_table(arguments, thread, num_threads):
        positions, num_tokens = load64(arguments, 0), load64(arguments, 1)
        frequencies, count = load64(arguments, 2), load64(arguments, 3)
        amplitude = float_of(load64(arguments, 4))
        cos, cos_stride = load64(arguments, 5), load64(arguments, 6)
        sin, sin_stride = load64(arguments, 7), load64(arguments, 8)
        minus_sin, minus_stride = load64(arguments, 9), load64(arguments, 10)
        for token in range(thread, num_tokens, num_threads):
            position = np.float32(load64(positions, token))
            for i in range(count):
                angle = position * load(frequencies, i, 0)
                c, s = math.cos(angle) * amplitude, math.sin(angle) * amplitude
                store(cos, token * cos_stride + i, c, X)
                store(cos, token * cos_stride + count + i, c, X)
                store(sin, token * sin_stride + i, s, X)
                store(minus_sin, token * minus_stride + i, -s, X)

    return rotary_table
