"""Rotary tables, and the rotation of heads and of latent attention's rope parts, with the norms before it.

Dimension i of a head pairs with i + head_dim / 2. Computed in fp32. The dimensions of a head are contiguous; tokens and
heads may be strided.
"""

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.norms import row_stride, scaled_to_length
from sightline.kernels.triton.overlap import overlap_settings, wait_for_previous

_PAIRS = 256
"""The number of pairs of dimensions that a program rotates; several heads if they are small."""
HeadNorm = tuple[Tensor, float]
"""The weight [head_dim] fp32 and the epsilon of an RMS norm."""


def rotary_table(
    positions: Tensor, frequencies: Tensor, amplitude: float, cos: Tensor, sin: Tensor, minus_sin: Tensor
) -> None:
    """Writes cos [num_tokens, 1, head_dim], the same in both halves, and sin and -sin [num_tokens, 1, head_dim / 2].

    Positions are [num_tokens] int64, frequencies [head_dim / 2] fp32.
    """
    num_tokens, half = len(positions), len(frequencies)
    if num_tokens == 0:
        return
    _table_kernel[(num_tokens,)](
        positions,
        frequencies,
        cos,
        sin,
        minus_sin,
        amplitude,
        *(row_stride(each) for each in (cos, sin, minus_sin)),
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
        num_warps=1,
    )


def turn_heads(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    num_q_heads: int,
    norms: tuple[HeadNorm, HeadNorm] | None = None,
    *,
    overlaps: bool = False,
) -> None:
    """Writes the rotated heads of x [num_tokens, heads, head_dim], the first `num_q_heads` of which are queries.

    With norms, of queries and of keys, each head is normalised before. `out` has the shape of x and does not overlap
    it. Tables are as `rotary_table` writes them.
    """
    num_tokens, num_heads, head_dim = x.shape
    if num_tokens == 0:
        return
    (q_weight, q_epsilon), (k_weight, k_epsilon) = norms or ((None, 0.0), (None, 0.0))
    blocks = _head_blocks(head_dim)
    _turn_heads_kernel[(num_tokens, triton.cdiv(num_heads, blocks["HEADS"]))](
        x,
        q_weight,
        k_weight,
        cos,
        sin,
        out,
        q_epsilon,
        k_epsilon,
        *(row_stride(x), x.stride(1), row_stride(cos), row_stride(sin), row_stride(out), out.stride(1)),
        NUM_Q_HEADS=num_q_heads,
        NUM_HEADS=num_heads,
        NORMS=norms is not None,
        **blocks,
        num_warps=1,
        **overlap_settings(overlaps),
    )


def turn_latents(
    unnormed: Tensor,
    weight: Tensor,
    epsilon: float,
    latent: Tensor,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    *,
    overlaps: bool = False,
) -> None:
    """Writes the norm of `unnormed` [num_tokens, latent_dim] to `latent`, and rotated rope parts to `out`.

    q is [num_tokens, heads, rope_dim], k [num_tokens, rope_dim], and `out` [num_tokens, heads + 1, rope_dim], the key's
    part last. No output overlaps an input.
    """
    num_tokens, num_q_heads, rope_dim = q.shape
    if num_tokens == 0:
        return
    latent_dim, blocks = unnormed.shape[1], _head_blocks(rope_dim)
    num_blocks = triton.cdiv(num_q_heads + 1, blocks["HEADS"])
    _turn_latents_kernel[(num_tokens, num_blocks + 1)](
        unnormed,
        weight,
        latent,
        q,
        k,
        cos,
        sin,
        out,
        epsilon,
        *(row_stride(unnormed), row_stride(latent), row_stride(q), q.stride(1), row_stride(k)),
        *(row_stride(cos), row_stride(sin), row_stride(out), out.stride(1)),
        NUM_Q_HEADS=num_q_heads,
        NUM_BLOCKS=num_blocks,
        LATENT=latent_dim,
        LATENT_BLOCK=triton.next_power_of_2(latent_dim),
        **blocks,
        num_warps=2,
        **overlap_settings(overlaps),
    )


def turn_index(
    q: Tensor,
    key: Tensor,
    norm: tuple[Tensor, Tensor, float],
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    *,
    overlaps: bool = False,
) -> None:
    """Writes an indexer's queries q [num_tokens, heads, head_dim], and the layer norm of `key` [num_tokens, head_dim]
    behind them, to `out` [num_tokens, heads + 1, head_dim]. The first dimensions of each, as many as the table has, are
    rotated.

    `norm` is weight and bias [head_dim] fp32, and epsilon. `out` does not overlap an input.
    """
    num_tokens, num_heads, head_dim = q.shape
    if num_tokens == 0:
        return
    weight, bias, epsilon = norm
    half = cos.shape[-1] // 2
    block = triton.next_power_of_2(half)
    heads = max(1, _PAIRS // block)
    num_blocks = triton.cdiv(num_heads, heads)
    _turn_index_kernel[(num_tokens, num_blocks + 1)](
        q,
        key,
        weight,
        bias,
        cos,
        sin,
        out,
        epsilon,
        *(row_stride(q), q.stride(1), row_stride(key), row_stride(cos), row_stride(sin)),
        *(row_stride(out), out.stride(1)),
        NUM_HEADS=num_heads,
        NUM_BLOCKS=num_blocks,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HALF=block,
        BLOCK_REST=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        HEADS=heads,
        num_warps=2,
        **overlap_settings(overlaps),
    )


def _head_blocks(head_dim: int) -> dict[str, int]:
    """The block sizes of a program that rotates heads."""
    block = triton.next_power_of_2(head_dim // 2)
    return {"HALF": head_dim // 2, "BLOCK_HALF": block, "HEADS": max(1, _PAIRS // block)}


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _table_kernel(
    positions, frequencies, cos, sin, minus_sin, amplitude, cos_stride, sin_stride, minus_sin_stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program writes the row of one token."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + pair, mask=inside, other=0.0)
    cosine = (tl.cos(angle) * amplitude).to(cos.dtype.element_ty)
    sine = tl.sin(angle) * amplitude
    tl.store(cos + token * cos_stride + pair, cosine, mask=inside)
    tl.store(cos + token * cos_stride + HALF + pair, cosine, mask=inside)
    tl.store(sin + token * sin_stride + pair, sine.to(sin.dtype.element_ty), mask=inside)
    tl.store(minus_sin + token * minus_sin_stride + pair, (-sine).to(sin.dtype.element_ty), mask=inside)


@triton.jit
def _store_rotated(first, second, cos, sin, out, pair, mask, HALF: tl.constexpr):
    """Stores both halves of heads [HEADS, pairs] at `out`; cos and sin point to the token's row."""
    inside = pair < HALF
    cosine = tl.load(cos + pair, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + pair, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, (first * cosine - second * sine).to(out.dtype.element_ty), mask=mask)
    tl.store(out + HALF, (second * cosine + first * sine).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _turn_heads_kernel(
    x, q_weight, k_weight, cos, sin, out, q_epsilon, k_epsilon,
    x_token, x_head, cos_token, sin_token, out_token, out_head,
    NUM_Q_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, NORMS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, HEADS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program turns some heads of one token."""
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    inside = pair < HALF
    mask = (head < NUM_HEADS) & inside
    places = x + token * x_token + head * x_head + pair
    first = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORMS:
        is_q = head < NUM_Q_HEADS
        mean = tl.sum(first * first + second * second, axis=1)[:, None] / (2 * HALF)
        scale = tl.rsqrt(mean + tl.where(is_q, q_epsilon, k_epsilon))
        q_first = tl.load(q_weight + pair, mask=inside, other=0.0)
        k_first = tl.load(k_weight + pair, mask=inside, other=0.0)
        q_second = tl.load(q_weight + HALF + pair, mask=inside, other=0.0)
        k_second = tl.load(k_weight + HALF + pair, mask=inside, other=0.0)
        first = first * scale * tl.where(is_q, q_first, k_first)
        second = second * scale * tl.where(is_q, q_second, k_second)
    to = out + token * out_token + head * out_head + pair
    _store_rotated(first, second, cos + token * cos_token, sin + token * sin_token, to, pair, mask, HALF)


@triton.jit
def _turn_latents_kernel(
    unnormed, weight, latent, q, k, cos, sin, out, epsilon,
    unnormed_token, latent_token, q_token, q_head, k_token, cos_token, sin_token, out_token, out_head,
    NUM_Q_HEADS: tl.constexpr, NUM_BLOCKS: tl.constexpr, LATENT: tl.constexpr, LATENT_BLOCK: tl.constexpr,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, HEADS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program rotates some rope parts of one token; the last one normalises its latent."""
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == NUM_BLOCKS:
        feature = tl.arange(0, LATENT_BLOCK)
        is_feature = feature < LATENT
        given = tl.load(unnormed + token * unnormed_token + feature, mask=is_feature, other=0.0).to(tl.float32)
        factors = tl.load(weight + feature, mask=is_feature, other=0.0)
        normed = scaled_to_length(given, factors, epsilon, LATENT)
        tl.store(latent + token * latent_token + feature, normed.to(latent.dtype.element_ty), mask=is_feature)
    else:
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
        pair = tl.arange(0, BLOCK_HALF)[None, :]
        is_q = (head < NUM_Q_HEADS) & (pair < HALF)
        is_k = (head == NUM_Q_HEADS) & (pair < HALF)
        of_q = q + token * q_token + head * q_head + pair
        of_k = k + token * k_token + head * 0 + pair
        q_first = tl.load(of_q, mask=is_q, other=0.0).to(tl.float32)
        q_second = tl.load(of_q + HALF, mask=is_q, other=0.0).to(tl.float32)
        first = tl.where(is_k, tl.load(of_k, mask=is_k, other=0.0).to(tl.float32), q_first)
        second = tl.where(is_k, tl.load(of_k + HALF, mask=is_k, other=0.0).to(tl.float32), q_second)
        to = out + token * out_token + head * out_head + pair
        _store_rotated(first, second, cos + token * cos_token, sin + token * sin_token, to, pair, is_q | is_k, HALF)


@triton.jit
def _turn_index_kernel(
    q, key, weight, bias, cos, sin, out, epsilon,
    q_token, q_head, key_token, cos_token, sin_token, out_token, out_head,
    NUM_HEADS: tl.constexpr, NUM_BLOCKS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, HEADS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program turns some queries of one token; the last one normalises and turns its key."""
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    still = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    cos += token * cos_token
    sin += token * sin_token
    if tl.program_id(1) == NUM_BLOCKS:
        turns, stays = pair < HALF, still < HEAD_DIM
        given = key + token * key_token
        first = tl.load(given + pair, mask=turns, other=0.0).to(tl.float32)
        second = tl.load(given + HALF + pair, mask=turns, other=0.0).to(tl.float32)
        rest = tl.load(given + still, mask=stays, other=0.0).to(tl.float32)
        mean = (tl.sum(first) + tl.sum(second) + tl.sum(rest)) / HEAD_DIM
        first, second = tl.where(turns, first - mean, 0.0), tl.where(turns, second - mean, 0.0)
        rest = tl.where(stays, rest - mean, 0.0)
        squares = tl.sum(first * first) + tl.sum(second * second) + tl.sum(rest * rest)
        scale = tl.rsqrt(squares / HEAD_DIM + epsilon)
        first = first * scale * tl.load(weight + pair, mask=turns, other=0.0)
        first += tl.load(bias + pair, mask=turns, other=0.0)
        second = second * scale * tl.load(weight + HALF + pair, mask=turns, other=0.0)
        second += tl.load(bias + HALF + pair, mask=turns, other=0.0)
        rest = rest * scale * tl.load(weight + still, mask=stays, other=0.0)
        rest += tl.load(bias + still, mask=stays, other=0.0)
        to = out + token * out_token + NUM_HEADS * out_head
        tl.store(to + still, rest.to(out.dtype.element_ty), mask=stays)
        _store_rotated(first, second, cos, sin, to + pair, pair, turns, HALF)
    else:
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
        # Names of their own: a variable must not have another shape in another branch.
        q_turns, q_stays = (head < NUM_HEADS) & (pair < HALF), (head < NUM_HEADS) & (still < HEAD_DIM)
        given_q, to_q = q + token * q_token + head * q_head, out + token * out_token + head * out_head
        q_first = tl.load(given_q + pair, mask=q_turns, other=0.0).to(tl.float32)
        q_second = tl.load(given_q + HALF + pair, mask=q_turns, other=0.0).to(tl.float32)
        tl.store(to_q + still, tl.load(given_q + still, mask=q_stays, other=0.0), mask=q_stays)
        _store_rotated(q_first, q_second, cos, sin, to_q + pair, pair, q_turns, HALF)
