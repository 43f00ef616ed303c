"""Softmax attention for decode rows over a paged cache: one launch that also writes the cache, and one that merges.

`decode_shares` divides the work. Does not know plans or pools.
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
    weigh_new,
    weighed,
)
from sightline.kernels.triton.numbers import WARP_GROUP_ROWS, as_stored, product, stored_view
from sightline.kernels.triton.overlap import wait_for_previous


@dataclass(frozen=True, eq=False)
class DecodeLayer:
    """The cache of one layer, and how its scores are computed."""

    keys: Tensor
    """[num_slots, num_kv_heads, head_dim]."""
    values: Tensor
    """The same shape as the keys."""
    k_scale: Tensor | None
    """[1] fp32 for e4m3 entries, otherwise None."""
    v_scale: Tensor | None
    scale: float
    window: int | None
    softcap: float | None


def choose_decode(
    head_dim: int,
    group_size: int,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    *,
    multiprocessors: int,
    shared_bytes: int,
    overlaps: bool,
) -> DecodeConfig:
    """A good configuration: blocks of 32 KiB of keys and values, two programs per multiprocessor, prefetched blocks."""
    dims = max(16, triton.next_power_of_2(head_dim))
    entry_bytes = 2 * dims * cache_dtype.itemsize
    block = min(64, max(16, (1 << 15) // entry_bytes))
    # Fewer rows than a warp group's: the loaded memory may be unaligned (see `numbers.warps_for`).
    heads = min(WARP_GROUP_ROWS // 2, max(16, triton.next_power_of_2(group_size)))
    if dtype is torch.float32:
        # No tensor cores: the operands of the product are in registers.
        block, heads = min(block, 16 if dims > 128 else 32), 16
    while heads > 16 and (heads + 2 * block) * dims * dtype.itemsize > shared_bytes * 7 // 8:
        heads //= 2
    return DecodeConfig(
        block=block,
        heads=heads,
        num_programs=2 * multiprocessors,
        num_warps=4,
        depth=fitting_depth(block * entry_bytes, 3, shared_bytes * 7 // 16),
        overlaps=overlaps,
    )


def decode_softmax(
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
    layer: DecodeLayer,
    rows: DecodeRows,
    scratch: DecodeScratch,
    config: DecodeConfig,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Writes the `new` keys and values [num_tokens, num_kv_heads, head_dim] at the rows' slots, and `out` [num_tokens,
    num_q_heads, ...]. Without `new`, the slots hold them already, and nothing is written there.

    Also writes `lse` [num_tokens, num_q_heads] fp32 if it is given. `divide` must have filled `scratch`.
    """
    if (
        not out.is_contiguous()
        or layer.keys.stride() != layer.values.stride()
        or (sinks is not None and sinks.stride(0) != 1)
    ):
        raise ValueError("expected out and sinks without gaps, and keys and values that lie alike, got others")
    _, num_kv_heads, head_dim = layer.keys.shape
    num_q_heads = q.shape[1]
    group = num_q_heads // num_kv_heads
    k, v = new or (None, None)
    strides = [stride for each in (k, v) for stride in ((0, 0) if each is None else each.stride()[:2])]
    _decode_kernel[(config.num_programs,)](
        q, k, v,
        layer.keys, layer.values, stored_view(layer.keys), stored_view(layer.values),
        layer.k_scale, layer.v_scale, sinks,
        out, lse, rows.write_slots, rows.pages, rows.table_rows, rows.context_lens, rows.query_lens,
        scratch.starts, scratch.row_tokens, scratch.out, scratch.stats,
        layer.scale, layer.softcap or 1.0, layer.window or 0,
        num_kv_heads, group, config.num_subgroups(group), num_q_heads, rows.pages.stride(0), layer.keys.stride(0),
        q.stride(0), q.stride(1), *strides,
        HEAD_DIM=head_dim, DIMS=max(16, triton.next_power_of_2(head_dim)),
        HEADS=config.heads,
        PAGE_SIZE=rows.page_size, BLOCK=config.block, STAGES=config.num_stages,
        HAS_WINDOW=layer.window is not None, HAS_SOFTCAP=layer.softcap is not None,
        SINKS=sinks is not None, LSE=lse is not None, FP8=layer.keys.dtype is torch.float8_e4m3fn,
        WRITES=new is not None,
        INTERPRETED=q.device.type == "cpu", num_warps=config.num_warps, **config.launch(),
    )  # fmt: skip
    merge_parts(out, lse, sinks, layer.v_scale, scratch, config, rows.num_rows, num_kv_heads)


@triton.jit
def _capped(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores after the softcap, times log2(e)."""
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0))
    return scores * LOG2_E


@triton.jit(
    do_not_specialize=["window", "num_kv_heads", "group", "subgroups", "num_q_heads"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def _decode_kernel(
    q, k_new, v_new,
    keys, values, written_keys, written_values, k_scales, v_scales, sinks,
    out, lse, write_slots, pages, table_rows, context_lens, query_lens,
    starts, row_tokens, part_out, part_stats,
    scale, softcap, window, num_kv_heads, group, subgroups, num_q_heads, max_pages, slot_stride,
    q_token, q_head, k_token, k_head, v_token, v_head,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, FP8: tl.constexpr,
    WRITES: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes its share of the step's units, tile by tile."""
    program = tl.program_id(0)
    compute_dtype = q.dtype.element_ty
    wait_for_previous(OVERLAPS)
    start_of = starts + program * FIELDS
    left, row, unit = tl.load(start_of), tl.load(start_of + 1), tl.load(start_of + 2)
    token, context, table_row = tl.load(start_of + 3), tl.load(start_of + 4), tl.load(start_of + 5)
    k_scale, v_scale = 1.0, 1.0
    if FP8:
        k_scale, v_scale = tl.load(k_scales), tl.load(v_scales)
    head_in_unit = tl.arange(0, HEADS)
    dim = tl.arange(0, DIMS)
    in_block = tl.arange(0, BLOCK)
    in_dim = dim < HEAD_DIM
    while left > 0:
        table = pages + table_row.to(tl.int64) * max_pages
        blocks, first_block = num_blocks(context, window, HAS_WINDOW, BLOCK)
        heads_index, block = unit // blocks, unit % blocks
        count = tl.minimum(left, blocks - block)
        kv_head, subgroup = (heads_index // subgroups).to(tl.int64), heads_index % subgroups
        in_group = subgroup * HEADS + head_in_unit
        in_heads = in_group < group
        heads = (kv_head * group + in_group).to(tl.int64)
        q_place = q + token.to(tl.int64) * q_token + heads[:, None] * q_head + dim[None, :]
        queries = tl.load(q_place, mask=in_heads[:, None] & in_dim[None, :], other=0.0)
        largest = tl.full([HEADS], float("-inf"), tl.float32)
        totals = tl.zeros([HEADS, BLOCK], tl.float32)
        gathered = tl.zeros([HEADS, DIMS], tl.float32)
        # The new token's key and value: loaded before the cached keys, used after them.
        sees_new = block + count == blocks
        new_slot = tl.load(write_slots + token, mask=sees_new, other=0)
        slot = new_slot * slot_stride + kv_head * HEAD_DIM + dim
        if WRITES:
            new_k_place = k_new + token.to(tl.int64) * k_token + kv_head * k_head + dim
            new_v_place = v_new + token.to(tl.int64) * v_token + kv_head * v_head + dim
        else:
            new_k_place, new_v_place = keys + slot, values + slot
        new_k = tl.load(new_k_place, mask=dim < tl.where(sees_new, HEAD_DIM, 0), other=0.0)
        new_v = tl.load(new_v_place, mask=dim < tl.where(sees_new, HEAD_DIM, 0), other=0.0)
        begin = (first_block + block) * BLOCK
        lowest = 0
        if HAS_WINDOW:
            lowest = tl.maximum(context + 1 - window, 0)
        # There is no block if only the new token is seen.
        stop = tl.minimum(begin + count * BLOCK, tl.where(lowest < context, context, 0))
        for start in tl.range(begin, stop, BLOCK, num_stages=STAGES):
            # Keys that are not seen are never read: a seen key is read instead and masked.
            key = start + in_block
            read = tl.minimum(tl.maximum(key, lowest), context - 1)
            first, places = block_places(table, start, read, slot_stride, PAGE_SIZE, BLOCK)
            first += kv_head * HEAD_DIM
            k = entries_of(keys + first, places, dim, HEAD_DIM, DIMS).to(compute_dtype)
            v = entries_of(values + first, places, dim, HEAD_DIM, DIMS).to(compute_dtype)
            scores = product(queries, tl.trans(k), tl.zeros([HEADS, BLOCK], tl.float32), INTERPRETED)
            scores = _capped(scores * (scale * k_scale), softcap, HAS_SOFTCAP)
            weights, shrink, totals, largest = weighed(scores, key == read, largest, totals)
            gathered = product(weights.to(compute_dtype), v, gathered * shrink[:, None], INTERPRETED)
        total = tl.sum(totals, 1)
        if sees_new:
            if WRITES:
                # Written to the cache, and used without being read back.
                seen_k, kept_key = as_stored(new_k, k_scale, keys.dtype.element_ty, FP8)
                seen_v, kept_value = as_stored(new_v, v_scale, values.dtype.element_ty, FP8)
                if subgroup == 0:
                    tl.store(written_keys + slot, kept_key, mask=in_dim)
                    tl.store(written_values + slot, kept_value, mask=in_dim)
            else:
                seen_k, seen_v = new_k.to(tl.float32), new_v.to(tl.float32)
            score = tl.sum(queries.to(tl.float32) * seen_k[None, :], 1)
            score = _capped(score * (scale * k_scale), softcap, HAS_SOFTCAP)
            weight, shrink, total, largest = weigh_new(score, largest, total)
            gathered = gathered * shrink[:, None] + weight[:, None] * seen_v[None, :]
        if count == blocks:
            finish(
                out, lse, sinks, token, heads, num_q_heads, gathered, largest, total, v_scale, dim, in_heads,
                SINKS, LSE, HEAD_DIM,
            )  # fmt: skip
        else:
            leave_part(
                part_out, part_stats, program, block == 0, head_in_unit, dim, in_heads, gathered, largest, total,
                HEADS, HEAD_DIM,
            )  # fmt: skip
        left -= count
        unit += count
        if (unit == blocks * (num_kv_heads * subgroups)) & (left > 0):
            unit = 0
            row, token, context, table_row = next_row(query_lens, row_tokens, context_lens, table_rows, row)
