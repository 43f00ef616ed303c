"""Kernels of look-ups, gates, activations, softcap and greedy choice. Arithmetic is fp32."""

from __future__ import annotations

import math
from enum import IntEnum

import numba
import numpy as np

from sightline.kernels.cpu.instructions import (
    exp32,
    float_of,
    load,
    load64,
    max32,
    min32,
    order32,
    store,
    store64,
    tanh32,
)

ZERO, ONE, HALF = np.float32(0.0), np.float32(1.0), np.float32(0.5)
MISSING = np.float32(np.nan)
ROOT_HALF = np.float32(math.sqrt(0.5))
ERFC_PLACE = np.float32(0.4)
ERFC = (
    np.float32(0.0810918199),
    np.float32(-0.431111968),
    np.float32(0.76875664),
    np.float32(-0.482850721),
    np.float32(0.494545129),
    np.float32(0.0975552084),
    np.float32(0.248993418),
    np.float32(0.222874684),
    np.float32(0.000145761827),
)
"""exp(z²) erfc(z) for z >= 0 as a polynomial in 1 / (1 + 0.4 z), the highest power first. Its relative error is below
3e-8: it was fitted by least squares with weights that even out the error."""
TANH_SCALE = np.float32(2.0 * math.sqrt(2.0 / math.pi))
CUBIC = np.float32(0.044715)
INFINITE, MINUS_INFINITE = np.int32(0x7F800000), np.int32(-0x7F800001)
"""The results of `order32` for infinities."""


class GateCode(IntEnum):
    """The function that is applied to the gate."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    CLAMPED_SWIGLU = 4
    """Applied to gate and up together, see `layers.activation.ClampedSwiglu`."""
    SIGMOID = 5
    CLAMPED_SILU = 6
    """Applied to gate and up together, see `layers.activation.ClampedSilu`."""


@numba.njit(inline="always")
def _erfc(z):
    """1 - erf(z) for z >= 0, without a branch or a table, so that loops over it become vector code."""
    t = ONE / (ONE + ERFC_PLACE * z)
    # Written out, in pairs of terms: a loop would not become vector code, and one term after the other would wait.
    t2 = t * t
    t4 = t2 * t2
    high = ERFC[0] * t4 + ((ERFC[1] * t + ERFC[2]) * t2 + (ERFC[3] * t + ERFC[4]))
    low = (ERFC[5] * t + ERFC[6]) * t2 + (ERFC[7] * t + ERFC[8])
    return (high * t4 + low) * exp32(-z * z)


@numba.njit(inline="always")
def activated(value, KIND):
    """The activation of a `GateCode` that has one, of a number."""
    if KIND == 0:
        return value / (ONE + exp32(-value))
    if KIND == 1:
        # Half of erfc is the share that is taken away from a positive number, and left of a negative one.
        share = HALF * _erfc(abs(value) * ROOT_HALF)
        return value * (ONE - share if value > ZERO else share)
    if KIND == 2:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        return value / (ONE + exp32(-TANH_SCALE * (value + CUBIC * value * value * value)))
    if KIND == 5:
        return ONE / (ONE + exp32(-value))
    return max32(value, np.float32(0.0))


def make_gate(X, KIND):
    """out = activation(gate) * up, or the clamped form. Columns are shared among the threads.

    Arguments: gate, its row stride, up, its row stride, out, its row stride, num_rows, size, alpha, limit.
    """

    def gate(arguments, thread, num_threads):
        gate, gate_stride = load64(arguments, 0), load64(arguments, 1)
        up, up_stride = load64(arguments, 2), load64(arguments, 3)
        out, out_stride = load64(arguments, 4), load64(arguments, 5)
        num_rows, size = load64(arguments, 6), load64(arguments, 7)
        alpha, limit = float_of(load64(arguments, 8)), float_of(load64(arguments, 9))
        first, stop = size * thread // num_threads, size * (thread + 1) // num_threads
        for row in range(num_rows):
            for i in range(first, stop):
                value, other = load(gate, row * gate_stride + i, X), load(up, row * up_stride + i, X)
                if KIND == 4 or KIND == 6:
                    value = min32(value, limit)
                    other = max32(min32(other, limit), -limit)
                    added = ONE if KIND == 4 else ZERO
                    result = (other + added) * value / (ONE + exp32(-alpha * value))
                else:
                    result = activated(value, KIND) * other
                store(out, row * out_stride + i, result, X)

    return gate


def make_activate(X, KIND):
    """x = activation(x). Columns are shared among the threads. Arguments: x, its row stride, num_rows, size."""

    def activate(arguments, thread, num_threads):
        x, x_stride = load64(arguments, 0), load64(arguments, 1)
        num_rows, size = load64(arguments, 2), load64(arguments, 3)
        first, stop = size * thread // num_threads, size * (thread + 1) // num_threads
        for row in range(num_rows):
            for i in range(first, stop):
                store(x, row * x_stride + i, activated(load(x, row * x_stride + i, X), KIND), X)

    return activate


def make_widen(X, OUT):
    """out = x, in a dtype that holds it. Columns are shared.

    Arguments: x, its row stride, num_rows, size, out, its row stride.
    """

    def widen(arguments, thread, num_threads):
        x, x_stride = load64(arguments, 0), load64(arguments, 1)
        num_rows, size = load64(arguments, 2), load64(arguments, 3)
        out, out_stride = load64(arguments, 4), load64(arguments, 5)
        first, stop = size * thread // num_threads, size * (thread + 1) // num_threads
        for row in range(num_rows):
            for i in range(first, stop):
                store(out, row * out_stride + i, load(x, row * x_stride + i, X), OUT)

    return widen


def make_multiply(X):
    """out = x * y. Columns are shared. Arguments: x, its row stride, y, its row stride, out, its row stride, num_rows,
    size."""

    def multiply(arguments, thread, num_threads):
        x, x_stride = load64(arguments, 0), load64(arguments, 1)
        y, y_stride = load64(arguments, 2), load64(arguments, 3)
        out, out_stride = load64(arguments, 4), load64(arguments, 5)
        num_rows, size = load64(arguments, 6), load64(arguments, 7)
        first, stop = size * thread // num_threads, size * (thread + 1) // num_threads
        for row in range(num_rows):
            for i in range(first, stop):
                value = load(x, row * x_stride + i, X) * load(y, row * y_stride + i, X)
                store(out, row * out_stride + i, value, X)

    return multiply


def make_scale():
    """x *= factor, fp32. Columns are shared. Arguments: x, its row stride, num_rows, size, factor."""

    def scale(arguments, thread, num_threads):
        x, x_stride = load64(arguments, 0), load64(arguments, 1)
        num_rows, size, factor = load64(arguments, 2), load64(arguments, 3), float_of(load64(arguments, 4))
        first, stop = size * thread // num_threads, size * (thread + 1) // num_threads
        for row in range(num_rows):
            for i in range(first, stop):
                store(x, row * x_stride + i, load(x, row * x_stride + i, 0) * factor, 0)

    return scale


def make_softcap():
    """x = cap * tanh(x / cap), fp32. Columns are shared. Arguments: x, its row stride, num_rows, size, cap."""

    def softcap(arguments, thread, num_threads):
        x, x_stride = load64(arguments, 0), load64(arguments, 1)
        num_rows, size, cap = load64(arguments, 2), load64(arguments, 3), float_of(load64(arguments, 4))
        first, stop = size * thread // num_threads, size * (thread + 1) // num_threads
        for row in range(num_rows):
            for i in range(first, stop):
                value = load(x, row * x_stride + i, 0) / cap
                store(x, row * x_stride + i, cap * tanh32(value), 0)

    return softcap


def make_take_rows(X, ADDS):
    """out[i] = table[rows[i]] * scale, or, if ADDS, out[i] += table[rows[i]].

    Arguments: table, its row stride, rows int64, num_rows, features, scale, out, its row stride, the number of rows of
    the table. A row that the table does not have is NaN, which fails its sequence alone.
    """

    def take_rows(arguments, thread, num_threads):
        table, table_stride, rows = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        num_rows, features, scale = load64(arguments, 3), load64(arguments, 4), float_of(load64(arguments, 5))
        out, out_stride, table_rows = load64(arguments, 6), load64(arguments, 7), load64(arguments, 8)
        for row in range(thread, num_rows, num_threads):
            asked, target = load64(rows, row), row * out_stride
            exists = 0 <= asked < table_rows
            first, factor = (asked * table_stride, ONE) if exists else (0, MISSING)
            for i in range(features):
                value = load(table, first + i, X) * factor
                if ADDS:
                    store(out, target + i, load(out, target + i, X) + value, X)
                else:
                    store(out, target + i, value * scale, X)

    return take_rows


def make_best_tokens():
    """The likeliest token of each row of logits fp32, and whether all of them are finite: `kernels.greedy`.

    Arguments: logits, row stride, num_rows, vocab_size, tokens int64, finite int64.
    """

    def best_tokens(arguments, thread, num_threads):
        logits, stride = load64(arguments, 0), load64(arguments, 1)
        num_rows, size = load64(arguments, 2), load64(arguments, 3)
        tokens, finite = load64(arguments, 4), load64(arguments, 5)
        for row in range(thread, num_rows, num_threads):
            first = row * stride
            highest, lowest = order32(logits, first), order32(logits, first)
            for i in range(1, size):
                order = order32(logits, first + i)
                highest = max(highest, order)
                lowest = min(lowest, order)
            best = 0
            while order32(logits, first + best) != highest:
                best += 1
            store64(tokens, row, best)
            store64(finite, row, 1 if highest < INFINITE and lowest > MINUS_INFINITE else 0)

    return best_tokens
