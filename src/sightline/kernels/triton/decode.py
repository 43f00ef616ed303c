"""Attention of rows of one new token over a paged cache: one launch that also writes the cache, and one that merges.

Work is cut into units, a unit being one block of keys of one row and one group of heads, and the units of a step, in
order, are dealt out evenly to a fixed number of programs:

    units     | row 0, heads 0 | row 0, heads 1 | row 1, heads 0        | row 1, heads 1        | ...
    programs  |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|---- 4 ----|

However many rows there are and however long, every program reads as many keys as every other. A piece of a row that a
program has whole it answers; of a row that is cut, each program leaves its part in scratch memory, and the second
launch merges the parts. The dealing is device work, once a step (`divide`), from lengths that only the device needs to
know: nothing that is launched depends on them.

Softmax entries are keys and values of `num_kv_heads` heads; latent ones are [latent | rope] that all heads share, whose
values are the latents themselves. Knows tensors. Does not know plans or pools.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sightline.kernels.triton.numbers import as_stored, product, stored_view

LOG2_E = tl.constexpr(1.4426950408889634)
FIELDS = tl.constexpr(8)
"""Of a program's record."""
MERGED_VALUES = 128
"""Of a head, that one program of the merge has: a long head is merged by several."""
MERGED_PIECES = 32
"""Parts of a row that the merge reads at once."""


@dataclass(frozen=True)
class DecodeConfig:
    """How the work of a step is cut."""

    block: int
    """Keys of a unit."""
    heads: int
    """Query heads of a unit, all on one key head; at most so many are real."""
    num_programs: int
    num_warps: int
    depth: int
    """Blocks that are on their way while one is computed."""
    overlaps: bool = False
    """Launches begin while the one before ends, and wait where they need what it wrote: on SM90 and later."""


@dataclass(frozen=True, eq=False)
class DecodeScratch:
    """What `divide` fills for a step, and where programs leave their parts."""

    starts: Tensor
    """[num_programs, 8] int32: how many units a program has, the row of the first, the unit's place in the row, and of
    that row the token, the context's length and the page-table row."""
    splits: Tensor
    """[num_programs, 8] int32: whether a piece that is cut begins in a program, and of it the token, the group of heads,
    and the program of its last part."""
    row_tokens: Tensor
    """[max_rows] int32: the token of each row."""
    out: Tensor
    """[2 * num_programs, heads, value_dim] fp32: parts; the second of a program's two is that of a row that begins
    in it."""
    stats: Tensor
    """[2 * num_programs, 2, heads] fp32: of parts, the largest score and the sum of weights, to the base 2."""


@triton.jit
def _num_blocks(context, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks of a row's keys that its query sees, and the first of them; the new token is not counted among keys."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context + 1 - WINDOW, 0) // BLOCK
    return tl.maximum((context + BLOCK - 1) // BLOCK - first, 1), first


@triton.jit
def _at(values, row, wanted):
    """One of a vector's values."""
    return tl.sum(tl.where(row == wanted, values, 0), 0)


@triton.jit
def _divide_kernel(
    query_lens,
    context_lens,
    table_rows,
    starts,
    splits,
    row_tokens,
    num_rows,
    num_heads,
    num_programs,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each program finds its own share: all of them read all lengths."""
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)
    here = row < num_rows
    query = tl.load(query_lens + row, mask=here, other=0).to(tl.int32)
    context = tl.load(context_lens + row, mask=here, other=0).to(tl.int32)
    table_row = tl.load(table_rows + row, mask=here, other=0).to(tl.int32)
    token = tl.cumsum(query, 0) - query
    blocks, _ = _num_blocks(context, WINDOW, BLOCK)
    blocks = tl.where(query > 0, blocks, 0)
    units = blocks * num_heads
    ends = tl.cumsum(units, 0)
    total = tl.sum(units, 0)
    share = tl.maximum((total + num_programs - 1) // num_programs, 1)
    first = tl.minimum(program * share, total)
    stop = tl.minimum(first + share, total)
    start_row = tl.sum(((ends <= first) & here).to(tl.int32), 0)
    start = starts + program * FIELDS
    tl.store(start, stop - first)
    tl.store(start + 1, start_row)
    tl.store(start + 2, first - _at(ends - units, row, start_row))
    tl.store(start + 3, _at(token, row, start_row))
    tl.store(start + 4, _at(context, row, start_row))
    tl.store(start + 5, _at(table_row, row, start_row))

    last_row = tl.sum(((ends <= stop - 1) & here).to(tl.int32), 0)
    last_begin = _at(ends - units, row, last_row)
    last_blocks = tl.maximum(_at(blocks, row, last_row), 1)
    heads = (stop - 1 - last_begin) // last_blocks
    piece_begin = last_begin + heads * last_blocks
    piece_end = piece_begin + last_blocks
    is_cut = (stop > first) & (piece_begin >= first) & (piece_end > stop)
    split = splits + program * FIELDS
    tl.store(split, is_cut.to(tl.int32))
    tl.store(split + 1, _at(token, row, last_row))
    tl.store(split + 2, heads)
    tl.store(split + 3, (piece_end - 1) // share)
    if program == 0:
        tl.store(row_tokens + row, token, mask=here)


@triton.jit
def _capped(scores, SOFTCAP: tl.constexpr):
    """Scores to the base 2, after the cap."""
    if SOFTCAP > 0.0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        scores = SOFTCAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / SOFTCAP)) + 1.0))
    return scores * LOG2_E


@triton.jit
def _finish(
    out, lse, sinks, token, heads, num_heads, values, largest, total, v_scale, value, in_heads,
    SINKS: tl.constexpr, LSE: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Writes what a query of some heads sees in all: `values` [heads, value] is not divided by `total` yet."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=in_heads, other=0.0).to(tl.float32) * LOG2_E
        higher = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - higher)
        values = values * shrink[:, None]
        total = total * shrink + tl.exp2(sink - higher)
        largest = higher
    values = values * (v_scale / total)[:, None]
    place = out + (token.to(tl.int64) * num_heads + heads)[:, None] * VALUE_DIM + value[None, :]
    tl.store(place, values.to(out.dtype.element_ty), mask=in_heads[:, None] & (value < VALUE_DIM)[None, :])
    if LSE:
        tl.store(lse + token * num_heads + heads, (largest + tl.log2(total)) / LOG2_E, mask=in_heads)


@triton.jit
def _decode_kernel(
    q, q_rope, k_new, v_new, rope_new,
    keys, values, written_keys, written_values, k_scales, v_scales, sinks,
    out, lse, write_slots, pages, table_rows, context_lens, query_lens,
    starts, row_tokens, part_out, part_stats,
    scale, max_pages, slot_stride, num_q_heads,
    q_token, q_head, q_rope_token, q_rope_head, k_token, k_head, v_token, v_head, rope_token,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    KEYS_PAD: tl.constexpr, VALUES_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SUBGROUPS: tl.constexpr, HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, FP8: tl.constexpr,
    INTERPRETED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program's share of a step's units, piece by piece."""
    program = tl.program_id(0)
    LATENT: tl.constexpr = ROPE_DIM > 0
    compute_dtype = q.dtype.element_ty
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    start_of = starts + program * FIELDS
    left, row, unit = tl.load(start_of), tl.load(start_of + 1), tl.load(start_of + 2)
    token, context, table_row = tl.load(start_of + 3), tl.load(start_of + 4), tl.load(start_of + 5)
    k_scale, v_scale = 1.0, 1.0
    if FP8:
        k_scale, v_scale = tl.load(k_scales), tl.load(v_scales)
    head_in_unit = tl.arange(0, HEADS)
    dim = tl.arange(0, KEYS_PAD)
    value = tl.arange(0, VALUES_PAD)
    rope = tl.arange(0, ROPE_PAD)
    in_block = tl.arange(0, BLOCK)
    in_dim, in_value, in_rope = dim < HEAD_DIM, value < VALUE_DIM, rope < ROPE_DIM
    while left > 0:
        table = pages + table_row.to(tl.int64) * max_pages
        blocks, first_block = _num_blocks(context, WINDOW, BLOCK)
        heads_index, block = unit // blocks, unit % blocks
        count = tl.minimum(left, blocks - block)
        kv_head, subgroup = heads_index // SUBGROUPS, heads_index % SUBGROUPS
        in_group = subgroup * HEADS + head_in_unit
        in_heads = in_group < GROUP
        heads = kv_head * GROUP + in_group
        q_place = q + token.to(tl.int64) * q_token + heads[:, None] * q_head + dim[None, :]
        queries = tl.load(q_place, mask=in_heads[:, None] & in_dim[None, :], other=0.0)
        if LATENT:
            rope_place = q_rope + token.to(tl.int64) * q_rope_token + heads[:, None] * q_rope_head + rope[None, :]
            rope_queries = tl.load(rope_place, mask=in_heads[:, None] & in_rope[None, :], other=0.0)
        largest = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        gathered = tl.zeros([HEADS, VALUES_PAD], tl.float32)
        begin = (first_block + block) * BLOCK
        for start in tl.range(begin, begin + count * BLOCK, BLOCK, num_stages=STAGES):
            key = start + in_block
            seen = key < context
            if WINDOW > 0:
                seen = seen & (key > context - WINDOW)
            if PAGE_SIZE % BLOCK == 0:
                # A block lies in one page. A row without context has none, and page 0 stands for it.
                page = tl.load(table + start // PAGE_SIZE)
                place = (page * PAGE_SIZE + start % PAGE_SIZE + in_block) * slot_stride
            else:
                pages_of_keys = tl.load(table + key // PAGE_SIZE, mask=key < context, other=0)
                place = (pages_of_keys * PAGE_SIZE + key % PAGE_SIZE) * slot_stride
            scores = tl.zeros([HEADS, BLOCK], tl.float32)
            if LATENT:
                k = tl.load(keys + place[:, None] + dim[None, :], mask=seen[:, None] & in_dim[None, :], other=0.0)
                k = k.to(compute_dtype)
                kr = tl.load(
                    keys + place[:, None] + HEAD_DIM + rope[None, :],
                    mask=seen[:, None] & in_rope[None, :],
                    other=0.0,
                )
                scores = product(queries, tl.trans(k), scores, INTERPRETED)
                scores = product(rope_queries, tl.trans(kr.to(compute_dtype)), scores, INTERPRETED)
                v = k
            else:
                place = place + kv_head * HEAD_DIM
                k = tl.load(keys + place[:, None] + dim[None, :], mask=seen[:, None] & in_dim[None, :], other=0.0)
                v = tl.load(
                    values + place[:, None] + value[None, :], mask=seen[:, None] & in_value[None, :], other=0.0
                )
                v = v.to(compute_dtype)
                scores = product(queries, tl.trans(k.to(compute_dtype)), scores, INTERPRETED)
            scores = _capped(scores * (scale * k_scale), SOFTCAP)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(largest, tl.max(scores, 1))
            # A block may hold nothing that is seen: -inf less -inf is no number.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(largest - base)
            total = total * shrink + tl.sum(weights, 1)
            gathered = product(weights.to(compute_dtype), v, gathered * shrink[:, None], INTERPRETED)
            largest = higher
        if block + count == blocks:
            # The new token: written, and seen without being read back.
            slot = tl.load(write_slots + token) * slot_stride
            k = tl.load(k_new + token.to(tl.int64) * k_token + kv_head * k_head + dim, mask=in_dim, other=0.0)
            k, kept = as_stored(k, k_scale, keys.dtype.element_ty, FP8)
            score = tl.sum(queries.to(tl.float32) * k[None, :], 1)
            if LATENT:
                kr = tl.load(rope_new + token.to(tl.int64) * rope_token + rope, mask=in_rope, other=0.0)
                kr, kept_rope = as_stored(kr, k_scale, keys.dtype.element_ty, FP8)
                score += tl.sum(rope_queries.to(tl.float32) * kr[None, :], 1)
                if subgroup == 0:
                    tl.store(written_keys + slot + dim, kept, mask=in_dim)
                    tl.store(written_keys + slot + HEAD_DIM + rope, kept_rope, mask=in_rope)
                v = k
            else:
                v = tl.load(v_new + token.to(tl.int64) * v_token + kv_head * v_head + value, mask=in_value, other=0.0)
                v, kept_value = as_stored(v, v_scale, values.dtype.element_ty, FP8)
                if subgroup == 0:
                    tl.store(written_keys + slot + kv_head * HEAD_DIM + dim, kept, mask=in_dim)
                    tl.store(written_values + slot + kv_head * HEAD_DIM + value, kept_value, mask=in_value)
            score = _capped(score * (scale * k_scale), SOFTCAP)
            higher = tl.maximum(largest, score)
            shrink, weight = tl.exp2(largest - higher), tl.exp2(score - higher)
            total = total * shrink + weight
            gathered = gathered * shrink[:, None] + weight[:, None] * v[None, :]
            largest = higher
        if count == blocks:
            _finish(
                out, lse, sinks, token, heads, num_q_heads, gathered, largest, total,
                k_scale if LATENT else v_scale, value, in_heads, SINKS, LSE, VALUE_DIM,
            )  # fmt: skip
        else:
            part = 2 * program + (block == 0).to(tl.int32)
            part_place = part_out + (part * HEADS + head_in_unit)[:, None] * VALUE_DIM + value[None, :]
            tl.store(part_place, gathered, mask=in_heads[:, None] & in_value[None, :])
            tl.store(part_stats + part * 2 * HEADS + head_in_unit, largest)
            tl.store(part_stats + (part * 2 + 1) * HEADS + head_in_unit, total)
        left -= count
        unit += count
        if (unit == blocks * (KV_HEADS * SUBGROUPS)) & (left > 0):
            row += 1
            while tl.load(query_lens + row) == 0:
                row += 1
            unit = 0
            token = tl.load(row_tokens + row)
            context = tl.load(context_lens + row).to(tl.int32)
            table_row = tl.load(table_rows + row).to(tl.int32)


@triton.jit
def _merge_kernel(
    out, lse, sinks, v_scales, splits, part_out, part_stats, num_q_heads,
    VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
    GROUP: tl.constexpr, SUBGROUPS: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, FP8: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some values of one head of the cut piece that begins in a program, if one does."""
    program = tl.program_id(0)
    head_in_unit = tl.program_id(1)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    split = splits + program * FIELDS
    is_cut, token = tl.load(split), tl.load(split + 1)
    heads_index, last = tl.load(split + 2), tl.load(split + 3)
    in_group = (heads_index % SUBGROUPS) * HEADS + head_in_unit
    if (is_cut != 0) & (in_group < GROUP):
        head = (heads_index // SUBGROUPS) * GROUP + in_group
        piece = tl.arange(0, PIECES)
        largest = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        gathered = tl.zeros([1, VALUES], tl.float32)
        for start in range(program, last + 1, PIECES):
            there = start + piece <= last
            part = 2 * (start + piece) + (start + piece == program).to(tl.int32)
            tops = tl.load(part_stats + part * 2 * HEADS + head_in_unit, mask=there, other=float("-inf"))
            sums = tl.load(part_stats + (part * 2 + 1) * HEADS + head_in_unit, mask=there, other=0.0)
            place = part_out + (part * HEADS + head_in_unit)[:, None] * VALUE_DIM + value[None, :]
            parts = tl.load(place, mask=there[:, None] & (value < VALUE_DIM)[None, :], other=0.0)
            higher = tl.maximum(largest, tl.max(tops, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp2(largest - base)
            weights = tl.exp2(tops - base)
            total = total * shrink + tl.sum(sums * weights, 0)
            gathered = gathered * shrink[:, None] + tl.sum(parts * weights[:, None], 0)[None, :]
            largest = higher
        v_scale = 1.0
        if FP8:
            v_scale = tl.load(v_scales)
        one = tl.zeros([1], tl.int32)
        _finish(
            out, lse, sinks, token, head + one, num_q_heads, gathered, largest, total, v_scale, value,
            one == 0, SINKS, LSE, VALUE_DIM,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """The rows of a step, as the device knows them."""

    query_lens: Tensor
    """[num_rows] int64, each 0 or 1."""
    context_lens: Tensor
    """[num_rows] int64."""
    table_rows: Tensor
    """[num_rows] int64."""
    write_slots: Tensor
    """[num_tokens] int64."""
    pages: Tensor
    """[num_table_rows, max_pages] int64."""
    page_size: int


@dataclass(frozen=True, eq=False)
class DecodeHeads:
    """What a layer's attention is, and the memory that it reads and writes beside its inputs."""

    keys: Tensor
    """[num_slots, num_kv_heads, head_dim], or [num_slots, latent + rope]."""
    values: Tensor
    """As the keys; of latent entries the keys again."""
    k_scale: Tensor
    """[1] fp32."""
    v_scale: Tensor
    """[1] fp32; of latent entries the keys' again."""
    sinks: Tensor | None
    scale: float
    window: int | None
    softcap: float | None


def divide(rows: DecodeRows, scratch: DecodeScratch, config: DecodeConfig, num_heads: int, window: int | None) -> None:
    """Deals out the units of a step; `num_heads` are groups of heads of a row."""
    num_rows = rows.query_lens.shape[0]
    _divide_kernel[(config.num_programs,)](
        rows.query_lens,
        rows.context_lens,
        rows.table_rows,
        scratch.starts,
        scratch.splits,
        scratch.row_tokens,
        num_rows,
        num_heads,
        config.num_programs,
        WINDOW=window or 0,
        BLOCK=config.block,
        ROWS=triton.next_power_of_2(max(num_rows, 1)),
        num_warps=4,
    )


def decode_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: DecodeHeads,
    rows: DecodeRows,
    scratch: DecodeScratch,
    config: DecodeConfig,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Writes k, v [num_tokens, num_kv_heads, head_dim] at the rows' slots, and `out` [num_tokens, num_q_heads, head_dim]
    of `q`; `lse` [num_tokens, num_q_heads] fp32 where it is wanted."""
    _, num_kv_heads, head_dim = heads.keys.shape
    _launch(
        q, q, k, v, k, heads, rows, scratch, config, out, lse,
        num_kv_heads=num_kv_heads, head_dim=head_dim, rope_dim=0,
    )  # fmt: skip


def decode_latent(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    heads: DecodeHeads,
    rows: DecodeRows,
    scratch: DecodeScratch,
    config: DecodeConfig,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Writes [latent | k_rope] at the rows' slots, and `out` [num_tokens, num_q_heads, latent_dim] of queries that
    were taken into the latent's space."""
    latent_dim, rope_dim = latent.shape[-1], k_rope.shape[-1]
    one_head = latent.unsqueeze(1)
    _launch(
        q_latent, q_rope, one_head, one_head, k_rope, heads, rows, scratch, config, out, lse,
        num_kv_heads=1, head_dim=latent_dim, rope_dim=rope_dim,
    )  # fmt: skip


def _launch(
    q: Tensor, q_rope: Tensor, k: Tensor, v: Tensor, k_rope: Tensor,
    heads: DecodeHeads, rows: DecodeRows, scratch: DecodeScratch, config: DecodeConfig,
    out: Tensor, lse: Tensor | None, *, num_kv_heads: int, head_dim: int, rope_dim: int,
) -> None:  # fmt: skip
    num_q_heads = q.shape[1]
    group = num_q_heads // num_kv_heads
    pad = triton.next_power_of_2(head_dim)
    sinks = out if heads.sinks is None else heads.sinks
    shared = {
        "VALUE_DIM": head_dim,
        "GROUP": group,
        "SUBGROUPS": num_subgroups(group, config),
        "HEADS": config.heads,
        "SINKS": heads.sinks is not None,
        "LSE": lse is not None,
        "FP8": heads.keys.dtype == torch.float8_e4m3fn,
        "OVERLAPS": config.overlaps,
        # A setting of the launch that the interpreter does not know.
        **({"launch_pdl": True} if config.overlaps else {}),
    }
    lse_out = out if lse is None else lse
    _decode_kernel[(config.num_programs,)](
        q, q_rope, k, v, k_rope,
        heads.keys, heads.values, stored_view(heads.keys), stored_view(heads.values),
        heads.k_scale, heads.v_scale, sinks,
        out, lse_out, rows.write_slots, rows.pages, rows.table_rows, rows.context_lens, rows.query_lens,
        scratch.starts, scratch.row_tokens, scratch.out, scratch.stats,
        heads.scale, rows.pages.stride(0), heads.keys.stride(0), num_q_heads,
        q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), k_rope.stride(0),
        HEAD_DIM=head_dim, ROPE_DIM=rope_dim, KEYS_PAD=pad, VALUES_PAD=pad, ROPE_PAD=triton.next_power_of_2(max(rope_dim, 1)),
        KV_HEADS=num_kv_heads, PAGE_SIZE=rows.page_size, BLOCK=config.block, STAGES=2 * config.depth + 1,
        WINDOW=heads.window or 0, SOFTCAP=heads.softcap or 0.0, INTERPRETED=q.device.type == "cpu",
        num_warps=config.num_warps, **shared,
    )  # fmt: skip
    values = min(pad, MERGED_VALUES)
    _merge_kernel[(config.num_programs, min(config.heads, group), triton.cdiv(head_dim, values))](
        out, lse_out, sinks, heads.v_scale, scratch.splits, scratch.out, scratch.stats, num_q_heads,
        VALUES=values, PIECES=MERGED_PIECES, num_warps=4, **shared,
    )  # fmt: skip


def num_subgroups(group: int, config: DecodeConfig) -> int:
    """Units that the query heads of one key head take."""
    return -(-group // config.heads)


def head_groups(num_q_heads: int, num_kv_heads: int, config: DecodeConfig) -> int:
    """Groups of heads of a row."""
    return num_kv_heads * num_subgroups(num_q_heads // num_kv_heads, config)
