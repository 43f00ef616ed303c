"""Attention of compressed layers: every token of a step over its window and over entries, in one softmax with sinks.

    keys of a token   | ring of the state | new keys of the row | entries |      whole blocks each
    rows of one token | ring of the new state                   | entries |

All heads share the keys, which are their values too, so a program reads a key once for the heads of a unit. Keys are
processed in two halves of their channels. A warp group's unit has 64 heads and gathers one half of the values alone:
512 values of 64 heads do not fit into its registers, and the product of SM90 needs so many heads. Every token is a row
for `decode_shares`, which divides the blocks of all tokens evenly among the programs, whatever their lengths: one
kernel for decode, for a few guesses and for prompts. Does not know plans or pools.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.compressed_tokens import CompressedTokens, EntryPages, SeenKeys, entry_slots, seen_keys
from sightline.kernels.triton.decode_shares import (
    FIELDS,
    LOG2_E,
    DecodeConfig,
    DecodeRows,
    DecodeScratch,
    entries_of,
    finish,
    fitting_depth,
    leave_part,
    merge_parts,
    next_row,
    num_blocks,
    weighed,
)
from sightline.kernels.triton.numbers import BORDER, begins_on_borders, product, warps_for
from sightline.kernels.triton.overlap import wait_for_previous

WARP_GROUP_HEADS = 64
"""Heads of a unit that a warp group computes."""
_GROUP_BLOCK, _GROUP_DEPTH = 32, 3
"""Keys of its blocks, and how many blocks are prefetched. Its products read one more from shared memory."""


@dataclass(frozen=True, eq=False)
class CompressedLayer:
    """The keys of one layer, and how its scores are computed. All have the dtype of the queries."""

    key: Tensor
    """[num_tokens, head_dim]: the step's."""
    window: Tensor | None
    """[num_slots, window, head_dim], each slot contiguous; None: rows have no context."""
    entries: Tensor | None
    """[num_slots, head_dim]; None: there are none."""
    sinks: Tensor
    """[num_q_heads]."""
    scale: float


@dataclass(frozen=True, eq=False)
class SeenEntries:
    """Which entries queries attend to."""

    places: EntryPages
    slots: Tensor | None
    """[num_tokens, top_k] int32: where the chosen entries are; None: queries attend to all that they see."""


def choose_compressed(
    head_dim: int,
    num_heads: int,
    dtype: torch.dtype,
    *,
    multiprocessors: int,
    shared_bytes: int,
    overlaps: bool,
) -> DecodeConfig:
    """A good configuration: one program per multiprocessor.

    A warp group computes with 64 heads at a time, whose queries take a third of the shared memory: small blocks leave
    room for several on their way. Devices without so much memory compute with fewer heads.
    """
    dims, room = 2 * _half(head_dim), shared_bytes * 15 // 16
    entry_bytes = dims * dtype.itemsize
    is_halved = head_dim == dims and head_dim >= 2 * BORDER
    groups = WARP_GROUP_HEADS + (_GROUP_DEPTH + 1) * _GROUP_BLOCK
    if dtype is not torch.float32 and num_heads >= WARP_GROUP_HEADS and is_halved and groups * entry_bytes <= room:
        return DecodeConfig(_GROUP_BLOCK, WARP_GROUP_HEADS, multiprocessors, 4, _GROUP_DEPTH, overlaps)
    heads, block = (16 if num_heads <= 16 else 32), 64
    if dtype is torch.float32:
        # No tensor cores: the operands of the product are in registers.
        block, heads = 16, 16
    room -= heads * entry_bytes
    while block > 16 and block * entry_bytes > room:
        block //= 2
    return DecodeConfig(block, heads, multiprocessors, 4, fitting_depth(block * entry_bytes, 2, room), overlaps)


def pieces_of(config: DecodeConfig, head_dim: int) -> int:
    """Into how many pieces values are divided among units: two if a warp group has 64 heads, whose values would not fit
    into the registers of one."""
    return 2 if config.heads == WARP_GROUP_HEADS and head_dim == 2 * _half(head_dim) else 1


def _half(head_dim: int) -> int:
    """The padded size of a half. If `head_dim` is not a power of two, the second half is not full."""
    return max(16, triton.next_power_of_2(head_dim) // 2)


def attend_compressed(
    q: Tensor,
    layer: CompressedLayer,
    tokens: CompressedTokens,
    keys: SeenKeys,
    entries: SeenEntries | None,
    part: slice,
    rows: DecodeRows,
    scratch: DecodeScratch,
    config: DecodeConfig,
    out: Tensor,
) -> None:
    """Writes `out` [num_tokens, num_q_heads, head_dim], contiguous, for the tokens of `part`.

    q [num_tokens, num_q_heads, head_dim], the last dimension contiguous. `count_keys` has filled the `rows` of these
    tokens, one each, and `divide` the scratch. Rows read the states behind their contexts or, if they have one token
    each, the state behind it, which must have been written.
    """
    _, num_heads, head_dim = q.shape
    num_tokens = part.stop - part.start
    if num_tokens == 0:
        return
    slots, pieces = tokens.slots, pieces_of(config, head_dim)
    subgroups = config.num_subgroups(num_heads) * pieces
    ring = None if slots is None else slots.write if keys.one_by_one else slots.read
    places = None if entries is None else entries.places
    chosen = None if entries is None else entries.slots
    pages = None if places is None else places.pages
    window = layer.window if slots is not None else None
    loaded = [each for each in (layer.key, window, layer.entries) if each is not None]
    _attend_kernel[(config.num_programs,)](
        q, layer.key, window, layer.entries, layer.sinks, out,
        ring, tokens.context_lens, tokens.rows.offsets, pages, None if places is None else places.table_rows, chosen,
        rows.query_lens, rows.context_lens, rows.table_rows,
        scratch.starts, scratch.row_tokens, scratch.out, scratch.stats,
        layer.scale, num_heads, subgroups, part.start, keys.most_entries,
        q.stride(0), q.stride(1), layer.key.stride(0), 0 if window is None else window.stride(0),
        0 if layer.entries is None else layer.entries.stride(0), 0 if places is None else places.max_pages,
        0 if chosen is None else chosen.stride(0),
        HEAD_DIM=head_dim, HALF=_half(head_dim), PIECES=pieces, PIECE_DIM=head_dim // pieces, HEADS=config.heads,
        BLOCK=config.block, STAGES=config.num_stages if entries is not None else config.depth + 1,
        WINDOW=keys.window, RATIO=0 if entries is None else keys.ratio, ONE_BY_ONE=keys.one_by_one,
        RING=window is not None, CONTEXT=tokens.context_lens is not None, CHOSEN=chosen is not None,
        PAGED=pages is not None,
        IN_PAGE=1 if places is None else places.in_page, APART=1 if places is None else places.apart,
        ALIGNED=all(map(begins_on_borders, loaded)), SUMMED=config.heads >= WARP_GROUP_HEADS,
        INTERPRETED=q.device.type == "cpu", num_warps=warps_for(config.num_warps, config.heads, q, *loaded),
        **config.launch(),
    )  # fmt: skip
    merge_parts(out[part], None, layer.sinks, None, scratch, config, num_tokens, 1, pieces)


@triton.jit
def _elements_behind(base, place, ALIGNED: tl.constexpr):
    """How many elements a place is behind another, perhaps in another tensor."""
    SIZE: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    count = (place.to(tl.int64) - base.to(tl.int64)) // SIZE
    if ALIGNED:
        count = tl.multiple_of(count, 16 // SIZE)
    return count


@triton.jit(
    do_not_specialize=["num_heads", "subgroups", "begin", "most_entries"],
    do_not_specialize_on_alignment=[
        "query_lens", "counts", "token_rows", "ring_slots", "row_contexts", "offsets", "table_rows",
    ],
)  # fmt: skip
def _attend_kernel(
    q, key, window, entries, sinks, out,
    ring_slots, row_contexts, offsets, pages, table_rows, chosen,
    query_lens, counts, token_rows,
    starts, row_tokens, part_out, part_stats,
    scale, num_heads, subgroups, begin, most_entries,
    q_token, q_head, key_token, window_slot, entry_slot, max_pages, chosen_token,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PIECES: tl.constexpr, PIECE_DIM: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, RATIO: tl.constexpr, ONE_BY_ONE: tl.constexpr, RING: tl.constexpr, CONTEXT: tl.constexpr,
    CHOSEN: tl.constexpr, PAGED: tl.constexpr, IN_PAGE: tl.constexpr, APART: tl.constexpr,
    ALIGNED: tl.constexpr, SUMMED: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes its share of the step's units, tile by tile."""
    program = tl.program_id(0)
    compute_dtype = q.dtype.element_ty
    dim = tl.arange(0, HALF)
    dim_2 = dim + HALF
    in_dim, in_dim_2 = dim < HEAD_DIM, dim_2 < HEAD_DIM
    head_in_unit, in_block = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    wait_for_previous(OVERLAPS)
    start_of = starts + program * FIELDS
    left, place, unit = tl.load(start_of), tl.load(start_of + 1), tl.load(start_of + 2)
    count_of, row = tl.load(start_of + 4), tl.load(start_of + 5)
    factor = scale * LOG2_E
    while left > 0:
        token = place.to(tl.int64) + begin
        first = tl.load(offsets + row)
        context = tl.zeros([], tl.int32)
        if CONTEXT:
            context = tl.load(row_contexts + row).to(tl.int32)
        position = context + (token - first).to(tl.int32)
        in_ring, in_step, first_seen = seen_keys(position, context, WINDOW, ONE_BY_ONE)
        ring_blocks, step_blocks = (in_ring + BLOCK - 1) // BLOCK, (in_step + BLOCK - 1) // BLOCK
        # The step's keys as if their index were their position.
        step_keys = key + (token - position + tl.maximum(first_seen, context)) * key_token
        ring = step_keys
        if RING:
            if ONE_BY_ONE:
                ring = window + tl.load(ring_slots + token) * window_slot
            else:
                ring = window + tl.load(ring_slots + row) * window_slot
        num_entries = tl.zeros([], tl.int32)
        table, choice = pages, chosen
        if RATIO > 0:
            num_entries = (position + 1) // RATIO
            num_entries = tl.where(most_entries > 0, tl.minimum(num_entries, most_entries), num_entries)
            if PAGED:
                table = pages + tl.load(table_rows + row) * max_pages
            if CHOSEN:
                choice = chosen + token * chosen_token
        base = step_keys
        if RATIO > 0:
            base = entries
        ring_at, step_at = _elements_behind(base, ring, ALIGNED), _elements_behind(base, step_keys, ALIGNED)
        blocks, _ = num_blocks(count_of, 0, False, BLOCK)
        subgroup, block = unit // blocks, unit % blocks
        count = tl.minimum(left, blocks - block)
        heads = (subgroup // PIECES * HEADS + head_in_unit).to(tl.int64)
        in_heads = heads < num_heads
        # The half that is gathered comes first, if it is one.
        piece = subgroup % PIECES
        half, half_2 = piece * HALF, (1 - piece) * HALF
        q_place = q + token * q_token + heads[:, None] * q_head + dim[None, :]
        queries = tl.load(q_place + half, mask=in_heads[:, None] & in_dim[None, :], other=0.0)
        queries_2 = tl.load(q_place + half_2, mask=in_heads[:, None] & in_dim_2[None, :], other=0.0)
        largest = tl.full([HEADS], float("-inf"), tl.float32)
        totals = tl.zeros([HEADS, 1 if SUMMED else BLOCK], tl.float32)
        gathered = tl.zeros([HEADS, HALF], tl.float32)
        gathered_2 = gathered
        for at in tl.range(block, tl.minimum(block + count, blocks - 1), num_stages=STAGES):
            # Blocks of the ring come first, then those of the step, then those of entries.
            is_ring, is_window = at < ring_blocks, at < ring_blocks + step_blocks
            skipped = tl.where(is_ring, 0, tl.where(is_window, ring_blocks, ring_blocks + step_blocks))
            seen = tl.where(is_ring, in_ring, tl.where(is_window, in_step, num_entries))
            # Keys that are not seen are never read: a seen key is read instead and masked.
            index = (at - skipped) * BLOCK + in_block
            read = tl.minimum(index, seen - 1)
            # Sums of products, because the compiler does not know what a choice between places is a multiple of, and
            # would not copy entries ahead.
            ring_share, step_share = is_ring.to(tl.int32), (is_window & (not is_ring)).to(tl.int32)
            source = base + ring_at * ring_share + step_at * step_share
            in_its_ring = read
            if not ONE_BY_ONE:
                in_its_ring = (first_seen + read) % WINDOW
            places = in_its_ring * (HEAD_DIM * ring_share) + read * (key_token * step_share)
            if RATIO > 0:
                limit = tl.where(is_window, 0, num_entries)
                if CHOSEN:
                    slots = tl.load(choice + read, mask=read < limit, other=0).to(tl.int64)
                elif PAGED:
                    slots = entry_slots(table, read, read < limit, IN_PAGE, APART)
                else:
                    slots = tl.where(read < limit, first + read, 0)
                places = places.to(tl.int64) + slots * entry_slot
            k = entries_of(source + half, places, dim, HEAD_DIM, HALF)
            k_2 = entries_of(source + half_2, places, dim, HEAD_DIM - HALF, HALF)
            none = tl.zeros([HEADS, BLOCK], tl.float32)
            scores = product(queries, tl.trans(k), none, INTERPRETED)
            scores_2 = product(queries_2, tl.trans(k_2), none, INTERPRETED)
            scores = (scores + scores_2) * factor
            if SUMMED:
                # Every warp has all keys of its heads, so that their sum costs less than registers for their totals.
                scores = tl.where((index == read)[None, :], scores, float("-inf"))
                higher = tl.maximum(largest, tl.max(scores, 1))
                weights, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(largest - higher)
                totals = totals * shrink[:, None] + tl.sum(weights, 1)[:, None]
                largest = higher
            else:
                weights, shrink, totals, largest = weighed(scores, index == read, largest, totals)
            weights = weights.to(compute_dtype)
            gathered = product(weights, k, gathered * shrink[:, None], INTERPRETED)
            if PIECES == 1:
                gathered_2 = product(weights, k_2, gathered_2 * shrink[:, None], INTERPRETED)
        total = tl.sum(totals, 1)
        if count == blocks:
            finish(
                out, None, sinks, token, heads, num_heads, gathered, largest, total, 1.0, dim, in_heads,
                True, False, PIECE_DIM, piece, PIECES,
            )  # fmt: skip
            if PIECES == 1:
                finish(
                    out, None, sinks, token, heads, num_heads, gathered_2, largest, total, 1.0, dim_2, in_heads,
                    True, False, PIECE_DIM,
                )  # fmt: skip
        else:
            leave_part(
                part_out, part_stats, program, block == 0, head_in_unit, dim, in_heads, gathered, largest, total,
                HEADS, PIECE_DIM,
            )  # fmt: skip
            if PIECES == 1:
                # This writes the same statistics again.
                leave_part(
                    part_out, part_stats, program, block == 0, head_in_unit, dim_2, in_heads, gathered_2, largest,
                    total, HEADS, PIECE_DIM,
                )  # fmt: skip
        left -= count
        unit += count
        if (unit == blocks * subgroups) & (left > 0):
            unit = 0
            place, _, count_of, row = next_row(query_lens, row_tokens, counts, token_rows, place)
