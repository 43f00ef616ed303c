"""Latent attention for decode rows over a paged cache: one launch that also writes the cache, and one that merges.

Entries are [latent | rope], shared by all heads, and their values are the latents: each is read once for all heads of a
unit. Latents are processed in two halves whose products do not wait for each other. `decode_shares` divides the work.
Does not know plans or pools.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.decode_shares import (
    FIELDS,
    LOG2_E,
    UNALIGNED,
    DecodeConfig,
    DecodeRows,
    DecodeScratch,
    block_places,
    entries_of,
    finish,
    fitting_depth,
    leave_part,
    merge_parts,
    next_row,
    num_blocks,
    totals_of_new,
    weighed,
)
from sightline.kernels.triton.numbers import as_stored, product, stored_view
from sightline.kernels.triton.overlap import wait_for_previous


@dataclass(frozen=True, eq=False)
class LatentLayer:
    """The cache of one layer, and how its scores are computed."""

    entries: Tensor
    """[num_slots, latent_dim + rope_dim]."""
    entry_scale: Tensor | None
    """[1] fp32 for e4m3 entries, otherwise None."""
    scale: float


def choose_latent_decode(
    latent_dim: int,
    rope_dim: int,
    num_heads: int,
    dtype: torch.dtype,
    *,
    multiprocessors: int,
    shared_bytes: int,
    overlaps: bool,
) -> DecodeConfig:
    """A good configuration: one program with large blocks per multiprocessor."""
    heads = 16 if num_heads <= 16 else 32
    block = 64
    if dtype is torch.float32:
        # No tensor cores: the operands of the product are in registers.
        block, heads = 16, 16
    dims = 2 * _half(latent_dim) + max(16, triton.next_power_of_2(rope_dim))
    room = shared_bytes * 15 // 16 - heads * dims * dtype.itemsize
    while block > 16 and block * dims * dtype.itemsize > room:
        block //= 2
    depth = fitting_depth(block * dims * dtype.itemsize, 2, room)
    return DecodeConfig(block, heads, multiprocessors, 4, depth, overlaps)


def _half(latent_dim: int) -> int:
    """The padded size of a half. If `latent_dim` is not a power of two, the second half is not full."""
    return max(16, triton.next_power_of_2(latent_dim) // 2)


def decode_latent(
    q_latent: Tensor,
    q_rope: Tensor,
    new: tuple[Tensor, Tensor] | None,
    layer: LatentLayer,
    rows: DecodeRows,
    scratch: DecodeScratch,
    config: DecodeConfig,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Writes the `new` latents and rope keys [num_tokens, ...] at the rows' slots, and `out` [num_tokens, num_q_heads,
    latent_dim]. Without `new`, rows attend to their contexts alone (zeros without any), and nothing is written.

    The queries [num_tokens, num_q_heads, ...] are absorbed. Also writes `lse` [num_tokens, num_q_heads] fp32 if it is
    given. `divide` must have filled `scratch`.
    """
    num_heads, latent_dim = q_latent.shape[1:]
    rope_dim = q_rope.shape[-1]
    latent, k_rope = new or (None, None)
    _latent_kernel[(config.num_programs,)](
        q_latent, q_rope, latent, k_rope, layer.entries, stored_view(layer.entries), layer.entry_scale,
        out, lse, rows.write_slots, rows.pages, rows.table_rows, rows.context_lens, rows.query_lens,
        scratch.starts, scratch.row_tokens, scratch.out, scratch.stats,
        layer.scale, num_heads, config.num_subgroups(num_heads),
        rows.pages.stride(0), layer.entries.stride(0),
        q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1),
        0 if latent is None else latent.stride(0), 0 if k_rope is None else k_rope.stride(0),
        LATENT_DIM=latent_dim, ROPE_DIM=rope_dim,
        HALF=_half(latent_dim), ROPES=max(16, triton.next_power_of_2(rope_dim)),
        HEADS=config.heads,
        PAGE_SIZE=rows.page_size, BLOCK=config.block, STAGES=config.num_stages,
        NEW=new is not None, LSE=lse is not None, FP8=layer.entries.dtype is torch.float8_e4m3fn,
        INTERPRETED=q_latent.device.type == "cpu", num_warps=config.num_warps, **config.launch(),
    )  # fmt: skip
    merge_parts(out, lse, None, layer.entry_scale, scratch, config, rows.num_rows, 1)


@triton.jit(do_not_specialize=["num_heads", "subgroups"], do_not_specialize_on_alignment=UNALIGNED)
def _latent_kernel(
    q, q_rope, latent_new, rope_new, entries, written, entry_scale,
    out, lse, write_slots, pages, table_rows, context_lens, query_lens,
    starts, row_tokens, part_out, part_stats,
    scale, num_heads, subgroups, max_pages, slot_stride,
    q_token, q_head, q_rope_token, q_rope_head, latent_token, rope_token,
    LATENT_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, HALF: tl.constexpr, ROPES: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    NEW: tl.constexpr, LSE: tl.constexpr, FP8: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes its share of the step's units, tile by tile."""
    program = tl.program_id(0)
    compute_dtype = q.dtype.element_ty
    dim, rope = tl.arange(0, HALF), tl.arange(0, ROPES)
    dim_2 = dim + HALF
    in_dim, in_dim_2, in_rope = dim < LATENT_DIM, dim_2 < LATENT_DIM, rope < ROPE_DIM
    head_in_unit, in_block = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    wait_for_previous(OVERLAPS)
    start_of = starts + program * FIELDS
    left, row, unit = tl.load(start_of), tl.load(start_of + 1), tl.load(start_of + 2)
    token, context, table_row = tl.load(start_of + 3), tl.load(start_of + 4), tl.load(start_of + 5)
    by = 1.0
    if FP8:
        by = tl.load(entry_scale)
    factor = scale * by * LOG2_E
    while left > 0:
        table = pages + table_row.to(tl.int64) * max_pages
        blocks, _ = num_blocks(context, 0, False, BLOCK)
        subgroup, block = unit // blocks, unit % blocks
        count = tl.minimum(left, blocks - block)
        heads = (subgroup * HEADS + head_in_unit).to(tl.int64)
        in_heads = heads < num_heads
        q_place = q + token.to(tl.int64) * q_token + heads[:, None] * q_head + dim[None, :]
        queries = tl.load(q_place, mask=in_heads[:, None] & in_dim[None, :], other=0.0)
        queries_2 = tl.load(q_place + HALF, mask=in_heads[:, None] & in_dim_2[None, :], other=0.0)
        q_rope_place = q_rope + token.to(tl.int64) * q_rope_token + heads[:, None] * q_rope_head + rope[None, :]
        rope_queries = tl.load(q_rope_place, mask=in_heads[:, None] & in_rope[None, :], other=0.0)
        largest = tl.full([HEADS], float("-inf"), tl.float32)
        totals = tl.zeros([HEADS, BLOCK], tl.float32)
        gathered = tl.zeros([HEADS, HALF], tl.float32)
        gathered_2 = tl.zeros([HEADS, HALF], tl.float32)
        if NEW and block + count == blocks:
            # The new token: written to the cache, and used without being read back.
            new_slot = written + tl.load(write_slots + token) * slot_stride
            latent_place = latent_new + token.to(tl.int64) * latent_token
            new = tl.load(latent_place + dim, mask=in_dim, other=0.0)
            new_2 = tl.load(latent_place + dim_2, mask=in_dim_2, other=0.0)
            new_rope = tl.load(rope_new + token.to(tl.int64) * rope_token + rope, mask=in_rope, other=0.0)
            new, kept = as_stored(new, by, entries.dtype.element_ty, FP8)
            new_2, kept_2 = as_stored(new_2, by, entries.dtype.element_ty, FP8)
            new_rope, kept_rope = as_stored(new_rope, by, entries.dtype.element_ty, FP8)
            if subgroup == 0:
                tl.store(new_slot + dim, kept, mask=in_dim)
                tl.store(new_slot + dim_2, kept_2, mask=in_dim_2)
                tl.store(new_slot + LATENT_DIM + rope, kept_rope, mask=in_rope)
            score = tl.sum(queries.to(tl.float32) * new[None, :], 1)
            score += tl.sum(queries_2.to(tl.float32) * new_2[None, :], 1)
            largest = (score + tl.sum(rope_queries.to(tl.float32) * new_rope[None, :], 1)) * factor
            totals = totals_of_new(HEADS, BLOCK)
            gathered += new[None, :]
            gathered_2 += new_2[None, :]
        for start in tl.range(block * BLOCK, tl.minimum((block + count) * BLOCK, context), BLOCK, num_stages=STAGES):
            # Keys that are not seen are never read: a seen key is read instead and masked.
            key = start + in_block
            read = tl.minimum(key, context - 1)
            first, places = block_places(table, start, read, slot_stride, PAGE_SIZE, BLOCK)
            k = entries_of(entries + first, places, dim, LATENT_DIM, HALF).to(compute_dtype)
            k_2 = entries_of(entries + first + HALF, places, dim, LATENT_DIM - HALF, HALF).to(compute_dtype)
            k_rope = entries_of(entries + first + LATENT_DIM, places, rope, ROPE_DIM, ROPES).to(compute_dtype)
            none = tl.zeros([HEADS, BLOCK], tl.float32)
            scores = product(queries, tl.trans(k), none, INTERPRETED)
            scores_2 = product(rope_queries, tl.trans(k_rope), none, INTERPRETED)
            scores_2 = product(queries_2, tl.trans(k_2), scores_2, INTERPRETED)
            scores = (scores + scores_2) * factor
            weights, shrink, totals, largest = weighed(scores, key == read, largest, totals)
            weights = weights.to(compute_dtype)
            gathered = product(weights, k, gathered * shrink[:, None], INTERPRETED)
            gathered_2 = product(weights, k_2, gathered_2 * shrink[:, None], INTERPRETED)
        total = tl.sum(totals, 1)
        if not NEW:
            # A row without entries gives zeros.
            total = tl.where(total == 0.0, 1.0, total)
        if count == blocks:
            finish(
                out, lse, None, token, heads, num_heads, gathered, largest, total, by, dim, in_heads,
                False, LSE, LATENT_DIM,
            )  # fmt: skip
            finish(
                out, lse, None, token, heads, num_heads, gathered_2, largest, total, by, dim_2, in_heads,
                False, False, LATENT_DIM,
            )  # fmt: skip
        else:
            leave_part(
                part_out, part_stats, program, block == 0, head_in_unit, dim, in_heads, gathered, largest, total,
                HEADS, LATENT_DIM,
            )  # fmt: skip
            # This writes the same statistics again.
            leave_part(
                part_out, part_stats, program, block == 0, head_in_unit, dim_2, in_heads, gathered_2, largest, total,
                HEADS, LATENT_DIM,
            )  # fmt: skip
        left -= count
        unit += count
        if (unit == blocks * subgroups) & (left > 0):
            unit = 0
            row, token, context, table_row = next_row(query_lens, row_tokens, context_lens, table_rows, row)
