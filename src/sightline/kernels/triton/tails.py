"""Rotation of the last dimensions of heads, in pairs of neighbours, with or without a norm of the head, in one launch.

The oracle is `kernels.tail_rotation`. Arithmetic is fp32.
"""

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.overlap import overlap_settings, wait_for_previous

_PAIRS = 128
"""Pairs that a program turns at once, at least those of one head."""


def turn_tails(
    x: Tensor, weight: Tensor | None, epsilon: float, cos: Tensor, sin: Tensor, *, overlaps: bool = False
) -> None:
    """Rotates the last 2 * pairs dimensions of x [num_tokens, heads, dim] in place.

    With `weight` [dim] fp32, each head is normalised before. `cos` and `sin` are [num_tokens, 1, pairs]. Each head is
    contiguous.
    """
    num_tokens, num_heads, dim = x.shape
    if num_tokens == 0:
        return
    num_pairs = sin.shape[-1]
    block = triton.next_power_of_2(num_pairs)
    heads = max(1, _PAIRS // block)
    _turn_tails_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        x,
        weight,
        cos,
        sin,
        epsilon,
        *(x.stride(0), x.stride(1), cos.stride(0), sin.stride(0)),
        NUM_HEADS=num_heads,
        STILL=dim - 2 * num_pairs,
        PAIRS=num_pairs,
        BLOCK_STILL=triton.next_power_of_2(max(1, dim - 2 * num_pairs)),
        BLOCK_PAIRS=block,
        HEADS=heads,
        **overlap_settings(overlaps),
    )


@triton.jit
def _turn_tails_kernel(
    x, weight, cos, sin, epsilon, x_token, x_head, cos_token, sin_token,
    NUM_HEADS: tl.constexpr, STILL: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_STILL: tl.constexpr, BLOCK_PAIRS: tl.constexpr, HEADS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program turns some heads of one token. Nothing is written before all of its threads have read."""
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    is_head, is_pair = head < NUM_HEADS, pair < PAIRS
    rows = x + token * x_token + head * x_head
    places = rows + STILL + 2 * pair
    mask = is_head & is_pair
    first = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(places + 1, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        still = tl.arange(0, BLOCK_STILL)[None, :]
        is_still = still < STILL
        rest = tl.load(rows + still, mask=is_head & is_still, other=0.0).to(tl.float32)
        squares = tl.sum(rest * rest, axis=1) + tl.sum(first * first + second * second, axis=1)
        factor = tl.rsqrt(squares / (STILL + 2 * PAIRS) + epsilon)[:, None]
        normed = rest * factor * tl.load(weight + still, mask=is_still, other=0.0)
        tl.debug_barrier()
        tl.store(rows + still, normed.to(x.dtype.element_ty), mask=is_head & is_still)
        first *= factor * tl.load(weight + STILL + 2 * pair, mask=is_pair, other=0.0)
        second *= factor * tl.load(weight + STILL + 2 * pair + 1, mask=is_pair, other=0.0)
    c = tl.load(cos + token * cos_token + pair, mask=is_pair, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_token + pair, mask=is_pair, other=0.0).to(tl.float32)
    tl.debug_barrier()
    tl.store(places, (first * c - second * s).to(x.dtype.element_ty), mask=mask)
    tl.store(places + 1, (second * c + first * s).to(x.dtype.element_ty), mask=mask)
