"""Kernels beside absorbed latent attention: queries into latent space, and weighted latents to values.

Both read each weight once and share the work by parts of heads. Arithmetic is fp32. Do not know pages.
"""

from __future__ import annotations

import numpy as np

from sightline.kernels.cpu.attend import FIELDS
from sightline.kernels.cpu.instructions import load, load64, store

COLUMNS = 64
"""Features of a latent that a thread computes at a time."""
ZERO = np.float32(0.0)


def make_absorb(X, W):
    """Queries in latent space: out[token, head] = [ q_nope @ key_up | q_rope ], fp32.

    Arguments: q_nope, its token stride, its head stride; q_rope, its token stride, its head stride; key_up [heads,
    nope, latent], its head stride, its row stride; out [num_tokens, heads, latent + rope] fp32, contiguous; num_tokens,
    heads, nope, latent, rope.
    """

    def absorb(arguments, thread, num_threads):
        nope, nope_token, nope_head = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        rope, rope_token, rope_head = load64(arguments, 3), load64(arguments, 4), load64(arguments, 5)
        key_up, up_head, up_row = load64(arguments, 6), load64(arguments, 7), load64(arguments, 8)
        out, num_tokens, num_heads = load64(arguments, 9), load64(arguments, 10), load64(arguments, 11)
        nope_dim, latent_dim, rope_dim = load64(arguments, 12), load64(arguments, 13), load64(arguments, 14)
        parts = (latent_dim + COLUMNS - 1) // COLUMNS
        for unit in range(thread, num_heads * parts, num_threads):
            head, part = unit // parts, unit % parts
            first, stop = part * COLUMNS, min(latent_dim, (part + 1) * COLUMNS)
            for token in range(num_tokens):
                source = token * nope_token + head * nope_head
                target = (token * num_heads + head) * (latent_dim + rope_dim)
                for i in range(first, stop):
                    store(out, target + i, ZERO, 0)
                for n in range(nope_dim):
                    factor, row = load(nope, source + n, X), head * up_head + n * up_row
                    for i in range(first, stop):
                        store(out, target + i, load(out, target + i, 0) + factor * load(key_up, row + i, W), 0)
                if part == 0:
                    source = token * rope_token + head * rope_head
                    for i in range(rope_dim):
                        store(out, target + latent_dim + i, load(rope, source + i, X), 0)

    return absorb


def make_project(W, OUT):
    """Values of heads: out[token, head] = value_up @ found[token, head], for tokens that belong to a row.

    Arguments: found [num_tokens, heads, latent] fp32, contiguous; value_up [heads, values, latent], its head stride,
    its row stride; out, its token stride, its head stride; located [num_tokens, FIELDS]; num_tokens, heads, values,
    latent.
    """

    def project(arguments, thread, num_threads):
        found, value_up = load64(arguments, 0), load64(arguments, 1)
        up_head, up_row = load64(arguments, 2), load64(arguments, 3)
        out, out_token, out_head = load64(arguments, 4), load64(arguments, 5), load64(arguments, 6)
        located, num_tokens, num_heads = load64(arguments, 7), load64(arguments, 8), load64(arguments, 9)
        value_dim, latent_dim = load64(arguments, 10), load64(arguments, 11)
        units = num_heads * value_dim
        for unit in range(units * thread // num_threads, units * (thread + 1) // num_threads):
            head, value = unit // value_dim, unit % value_dim
            row = head * up_head + value * up_row
            for token in range(num_tokens):
                if load64(located, token * FIELDS + 2) < 0:
                    continue
                source, total = (token * num_heads + head) * latent_dim, ZERO
                for i in range(latent_dim):
                    total += load(found, source + i, 0) * load(value_up, row + i, W)
                store(out, token * out_token + head * out_head + value, total, OUT)

    return project
