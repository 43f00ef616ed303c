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
)

ONE, HALF, TWO = np.float32(1.0), np.float32(0.5), np.float32(2.0)
ROOT_HALF = np.float32(math.sqrt(0.5))
TANH_SCALE = np.float32(2.0 * math.sqrt(2.0 / math.pi))
CUBIC = np.float32(0.044715)
THIRD, TWO_FIFTEENTHS, NEAR_ZERO = np.float32(1 / 3), np.float32(2 / 15), np.float32(0.01)
INFINITE, MINUS_INFINITE = np.int32(0x7F800000), np.int32(-0x7F800001)
"""The results of `order32` for infinities."""


class GateCode(IntEnum):
    """What is applied to the gate."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    CLAMPED_SWIGLU = 4
    """Applied to gate and up together, see `layers.activation.ClampedSwiglu`."""


@numba.njit(inline="always")
def tanh32(value):
    """The hyperbolic tangent. Near 0 a polynomial, because the difference from 1 would lose its digits."""
    square = value * value
    if square < NEAR_ZERO:
        return value * (ONE - square * (THIRD - square * TWO_FIFTEENTHS))
    return ONE - TWO / (ONE + exp32(TWO * value))


@numba.njit(inline="always")
def _activated(value, KIND):
    if KIND == 0:
        return value / (ONE + exp32(-value))
    if KIND == 1:
        return HALF * value * (ONE + np.float32(math.erf(value * ROOT_HALF)))
    if KIND == 2:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        return value / (ONE + exp32(-TANH_SCALE * (value + CUBIC * value * value * value)))
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
                if KIND == 4:
                    value = min32(value, limit)
                    other = max32(min32(other, limit), -limit)
                    result = (other + ONE) * value / (ONE + exp32(-alpha * value))
                else:
                    result = _activated(value, KIND) * other
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
                store(x, row * x_stride + i, _activated(load(x, row * x_stride + i, X), KIND), X)

    return activate


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

    Arguments: table, its row stride, rows int64, num_rows, features, scale, out, its row stride.
    """

    def take_rows(arguments, thread, num_threads):
        table, table_stride, rows = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        num_rows, features, scale = load64(arguments, 3), load64(arguments, 4), float_of(load64(arguments, 5))
        out, out_stride = load64(arguments, 6), load64(arguments, 7)
        for row in range(thread, num_rows, num_threads):
            first, target = load64(rows, row) * table_stride, row * out_stride
            for i in range(features):
                value = load(table, first + i, X)
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
