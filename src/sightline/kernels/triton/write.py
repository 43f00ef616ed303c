"""Writes the new entries of a layer to the planes of a pool, in one launch.

A value is copied, or divided by a scale and rounded to e4m3. Does not know pages: the caller gives each token's slot.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.numbers import as_stored, stored_view

_BLOCK_ELEMENTS = 2048
"""The approximate number of elements that a program writes to a plane."""


def write_keys_values(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes k, v [n, kv_heads, head_dim] to `keys`, `values` [num_slots, kv_heads, head_dim] at `slots` [n] int64.

    The last dimension of each is contiguous. Planes of float8_e4m3fn get `saturate(value / scale)`, rounded to the
    nearest, ties to even; only they have `k_scale` and `v_scale`, one fp32 number each on the device. Several tokens
    may have the same slot, the padding slot, which then holds any one of them.
    """
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    is_fp8 = _require_scales(keys, k_scale, v_scale)
    block_dim = triton.next_power_of_2(head_dim)
    block_heads = max(1, _BLOCK_ELEMENTS // block_dim)
    num_token_heads = num_tokens * num_heads
    _write_keys_values[(triton.cdiv(num_token_heads, block_heads),)](
        k,
        v,
        stored_view(keys),
        stored_view(values),
        slots,
        k_scale,
        v_scale,
        num_token_heads,
        *(stride for each in (k, v, keys, values) for stride in each.stride()[:2]),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        IS_FP8=is_fp8,
        num_warps=4,
    )


def write_latents(latent: Tensor, k_rope: Tensor, entries: Tensor, slots: Tensor, scale: Tensor | None = None) -> None:
    """Writes rows [latent | rope] to `entries` [num_slots, latent_dim + rope_dim] at `slots` [n] int64.

    The last dimension of latent [n, latent_dim] and k_rope [n, rope_dim] is contiguous. `scale` is as in
    `write_keys_values`, one for the whole row.
    """
    num_tokens, latent_dim = latent.shape
    if num_tokens == 0:
        return
    block_latent = triton.next_power_of_2(latent_dim)
    block_tokens = max(1, _BLOCK_ELEMENTS // block_latent)
    _write_latents[(triton.cdiv(num_tokens, block_tokens),)](
        latent,
        k_rope,
        stored_view(entries),
        slots,
        scale,
        num_tokens,
        latent.stride(0),
        k_rope.stride(0),
        entries.stride(0),
        LATENT_DIM=latent_dim,
        ROPE_DIM=k_rope.shape[1],
        BLOCK_TOKENS=block_tokens,
        BLOCK_LATENT=block_latent,
        BLOCK_ROPE=triton.next_power_of_2(k_rope.shape[1]),
        IS_FP8=_require_scales(entries, scale),
        num_warps=4,
    )


def _require_scales(plane: Tensor, *scales: Tensor | None) -> bool:
    """True if the plane is e4m3. Raises unless e4m3 planes have all scales and others none."""
    is_fp8 = plane.dtype is torch.float8_e4m3fn
    if any((scale is not None) != is_fp8 for scale in scales):
        given = [None if scale is None else tuple(scale.shape) for scale in scales]
        raise ValueError(f"expected scales exactly for a float8_e4m3fn plane, got {plane.dtype} with scales {given}")
    return is_fp8


@triton.jit(do_not_specialize=["num_token_heads"], do_not_specialize_on_alignment=["slots"])
def _write_keys_values(
    k: tl.tensor,
    v: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    num_token_heads: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    keys_slot_stride: tl.tensor,
    keys_head_stride: tl.tensor,
    values_slot_stride: tl.tensor,
    values_head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    IS_FP8: tl.constexpr,
) -> None:
    """A program writes some heads of one or several tokens."""
    token_head = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = token_head < num_token_heads
    token = (token_head // NUM_HEADS).to(tl.int64)
    head = token_head % NUM_HEADS
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    inside = is_head[:, None] & (dim < HEAD_DIM)
    slot = tl.load(slots + token, mask=is_head, other=0)
    new_k = tl.load(k + (token * k_token_stride + head * k_head_stride)[:, None] + dim, mask=inside, other=0.0)
    new_v = tl.load(v + (token * v_token_stride + head * v_head_stride)[:, None] + dim, mask=inside, other=0.0)
    by_k = tl.load(k_scale) if IS_FP8 else 1.0
    by_v = tl.load(v_scale) if IS_FP8 else 1.0
    _, stored_k = as_stored(new_k, by_k, keys.dtype.element_ty, IS_FP8)
    _, stored_v = as_stored(new_v, by_v, values.dtype.element_ty, IS_FP8)
    tl.store(keys + (slot * keys_slot_stride + head * keys_head_stride)[:, None] + dim, stored_k, mask=inside)
    tl.store(values + (slot * values_slot_stride + head * values_head_stride)[:, None] + dim, stored_v, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def _write_latents(
    latent: tl.tensor,
    k_rope: tl.tensor,
    entries: tl.tensor,
    slots: tl.tensor,
    scale: tl.tensor,
    num_tokens: tl.tensor,
    latent_stride: tl.tensor,
    rope_stride: tl.tensor,
    entry_stride: tl.tensor,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    IS_FP8: tl.constexpr,
) -> None:
    """A program writes the rows of some tokens."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_token = token < num_tokens
    slot = tl.load(slots + token, mask=is_token, other=0)
    by = tl.load(scale) if IS_FP8 else 1.0
    entry = entries + (slot * entry_stride)[:, None]
    dim = tl.arange(0, BLOCK_LATENT)[None, :]
    inside = is_token[:, None] & (dim < LATENT_DIM)
    new = tl.load(latent + (token * latent_stride)[:, None] + dim, mask=inside, other=0.0)
    _, stored = as_stored(new, by, entries.dtype.element_ty, IS_FP8)
    tl.store(entry + dim, stored, mask=inside)
    rope = tl.arange(0, BLOCK_ROPE)[None, :]
    inside = is_token[:, None] & (rope < ROPE_DIM)
    new = tl.load(k_rope + (token * rope_stride)[:, None] + rope, mask=inside, other=0.0)
    _, stored = as_stored(new, by, entries.dtype.element_ty, IS_FP8)
    tl.store(entry + LATENT_DIM + rope, stored, mask=inside)
