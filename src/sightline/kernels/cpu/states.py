"""Kernels around recurrent states: gated norms, decays, and the share of a value that is stored. Arithmetic is fp32."""

from __future__ import annotations

import math

import numpy as np

from sightline.kernels.cpu.instructions import exp32, float_of, load, load64, max32, min32, store
from sightline.kernels.cpu.norms import inverse_root
from sightline.kernels.cpu.pointwise import GateCode, activated

ZERO, ONE = np.float32(0.0), np.float32(1.0)
SILU = int(GateCode.SILU)


def make_gated_norm(X, KIND):
    """out = x / sqrt(mean(x²) + epsilon) * weight * activation(gate) for each head. Heads are shared among the threads.

    Arguments: x, its token stride, its head stride, gate, its strides, out, its strides, num_tokens, num_heads, dim,
    weight fp32, epsilon.
    """

    def gated_norm(arguments, thread, num_threads):
        x, x_stride, x_head = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        gate, gate_stride, gate_head = load64(arguments, 3), load64(arguments, 4), load64(arguments, 5)
        out, out_stride, out_head = load64(arguments, 6), load64(arguments, 7), load64(arguments, 8)
        num_tokens, num_heads, dim = load64(arguments, 9), load64(arguments, 10), load64(arguments, 11)
        weight, epsilon = load64(arguments, 12), float_of(load64(arguments, 13))
        for place in range(thread, num_tokens * num_heads, num_threads):
            token, head = place // num_heads, place % num_heads
            source, target = token * x_stride + head * x_head, token * out_stride + head * out_head
            opening = token * gate_stride + head * gate_head
            factor = inverse_root(x, source, dim, epsilon, X)
            for i in range(dim):
                normed = load(x, source + i, X) * factor * load(weight, i, 0)
                store(out, target + i, normed * activated(load(gate, opening + i, X), KIND), X)

    return gated_norm


def make_delta_gates(X, BOUNDED):
    """decay = -exp(log_rate of the head) * log(1 + exp(x + bias)), beta = 1 / (1 + exp(-shares)), fp32.

    With a bound, decay = bound / (1 + exp(-exp(log_rate of the head) * (x + bias))). Columns are shared among the
    threads. Arguments: x, its row stride, num_rows, size, log_rates fp32 [num_heads], bias fp32 [size], num_heads, the
    bound, decay, its row stride, shares, their row stride, beta, its row stride. A head has size // num_heads columns.
    """

    def delta_gates(arguments, thread, num_threads):
        x, x_stride = load64(arguments, 0), load64(arguments, 1)
        num_rows, size = load64(arguments, 2), load64(arguments, 3)
        log_rates, bias, num_heads = load64(arguments, 4), load64(arguments, 5), load64(arguments, 6)
        bound, decay, decay_stride = float_of(load64(arguments, 7)), load64(arguments, 8), load64(arguments, 9)
        shares, share_stride = load64(arguments, 10), load64(arguments, 11)
        beta, beta_stride = load64(arguments, 12), load64(arguments, 13)
        per_head = size // num_heads
        for i in range(size * thread // num_threads, size * (thread + 1) // num_threads):
            rate, offset = exp32(load(log_rates, i // per_head, 0)), load(bias, i, 0)
            for row in range(num_rows):
                value = load(x, row * x_stride + i, X) + offset
                if BOUNDED:
                    result = bound / (ONE + exp32(-rate * value))
                else:
                    # No exponential that could overflow.
                    result = -rate * (max32(value, ZERO) + math.log1p(exp32(-abs(value))))
                store(decay, row * decay_stride + i, result, 0)
        for i in range(num_heads * thread // num_threads, num_heads * (thread + 1) // num_threads):
            for row in range(num_rows):
                share = ONE / (ONE + exp32(-load(shares, row * share_stride + i, X)))
                store(beta, row * beta_stride + i, share, 0)

    return delta_gates


def make_time_steps(X):
    """times = log(1 + exp(x + bias)) within limits, decays = -exp(log_rate) * times, fp32. Columns are shared.

    Arguments: x, its row stride, num_rows, num_heads, bias fp32, log_rates fp32, least, most, times, their row stride,
    decays, their row stride.
    """

    def time_steps(arguments, thread, num_threads):
        x, x_stride = load64(arguments, 0), load64(arguments, 1)
        num_rows, num_heads = load64(arguments, 2), load64(arguments, 3)
        bias, log_rates = load64(arguments, 4), load64(arguments, 5)
        least, most = float_of(load64(arguments, 6)), float_of(load64(arguments, 7))
        times, time_stride = load64(arguments, 8), load64(arguments, 9)
        decays, decay_stride = load64(arguments, 10), load64(arguments, 11)
        first, stop = num_heads * thread // num_threads, num_heads * (thread + 1) // num_threads
        for i in range(first, stop):
            rate, offset = exp32(load(log_rates, i, 0)), load(bias, i, 0)
            for row in range(num_rows):
                value = load(x, row * x_stride + i, X) + offset
                # No exponential that could overflow.
                time = max32(value, ZERO) + math.log1p(exp32(-abs(value)))
                time = min32(max32(time, least), most)
                store(times, row * time_stride + i, time, 0)
                store(decays, row * decay_stride + i, -rate * time, 0)

    return time_steps


def make_norm_gated(X):
    """out = y / sqrt(mean(y²) + epsilon) * weight, with y = x * silu(gate), for each group. Groups are shared.

    Arguments: x, its row stride, gate, its row stride, out, its row stride, num_rows, num_groups, size, weight fp32,
    epsilon.
    """

    def norm_gated(arguments, thread, num_threads):
        x, x_stride = load64(arguments, 0), load64(arguments, 1)
        gate, gate_stride = load64(arguments, 2), load64(arguments, 3)
        out, out_stride = load64(arguments, 4), load64(arguments, 5)
        num_rows, num_groups, size = load64(arguments, 6), load64(arguments, 7), load64(arguments, 8)
        weight, epsilon = load64(arguments, 9), float_of(load64(arguments, 10))
        for place in range(thread, num_rows * num_groups, num_threads):
            row, first = place // num_groups, place % num_groups * size
            total = ZERO
            for i in range(first, first + size):
                value = load(x, row * x_stride + i, X) * activated(load(gate, row * gate_stride + i, X), SILU)
                total += value * value
            factor = ONE / math.sqrt(total / np.float32(size) + epsilon)
            for i in range(first, first + size):
                value = load(x, row * x_stride + i, X) * activated(load(gate, row * gate_stride + i, X), SILU)
                store(out, row * out_stride + i, value * factor * load(weight, i, 0), X)

    return norm_gated


def make_gate_heads(X):
    """x *= sigmoid(gate of the head). Heads are shared among the threads.

    Arguments: gate, its row stride, x, its token stride, its head stride, num_tokens, num_heads, dim.
    """

    def gate_heads(arguments, thread, num_threads):
        gate, gate_stride = load64(arguments, 0), load64(arguments, 1)
        x, x_stride, x_head = load64(arguments, 2), load64(arguments, 3), load64(arguments, 4)
        num_tokens, num_heads, dim = load64(arguments, 5), load64(arguments, 6), load64(arguments, 7)
        for place in range(thread, num_tokens * num_heads, num_threads):
            token, head = place // num_heads, place % num_heads
            share = ONE / (ONE + exp32(-load(gate, token * gate_stride + head, X)))
            source = token * x_stride + head * x_head
            for i in range(dim):
                store(x, source + i, load(x, source + i, X) * share, X)

    return gate_heads
