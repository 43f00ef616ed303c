"""Divides the work of decode rows among programs, and merges the tiles that were cut.

A unit is one block of keys of one row and one group of heads, or the row's new token after them. The units of a step,
in order, are divided evenly among a fixed number of programs:

    units     | row 0, heads 0 | row 0, heads 1 | row 1, heads 0        | row 1, heads 1        | ...
    programs  |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|---- 4 ----|

So every program has the same number of units, whatever the rows' lengths. A tile is all keys of one row and one group
of heads. A program that has a whole tile writes its result. If a tile is cut, each program writes its part to scratch
memory, and a second launch merges the parts. If there are few tiles, each begins at the start of a program, and
programs may have one block more:

    programs  |- 0 -|- 1 -|- 2-|- 3 -|- 4 -|- 5-|--- 6 ---|--- 7 ---|-- 8 --| ...

`divide` does this on the device, once per step, from lengths that only the device needs to know: no launch depends on
them. Does not know keys.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sightline.kernels.triton.overlap import overlap_settings

LOG2_E = tl.constexpr(1.4426950408889634)
UNALIGNED = ("query_lens", "context_lens", "table_rows", "write_slots")
"""Arguments with any alignment in a batch's memory. Kernels must not be specialised on it."""
FIELDS = tl.constexpr(8)
"""The number of fields of a record."""
MERGED_AT_ONCE = 2048
"""How many numbers a program of the merge reads at a time: few enough for one warp, so that all programs of the merge
fit on the device beside those of decode before these end."""
_SMALL_PAGE = tl.constexpr(4096)
"""Up to this page size, offsets in a page have 32 bits, which suffices for entries of half a million numbers."""


@dataclass(frozen=True)
class DecodeConfig:
    """How the work of a step is divided."""

    block: int
    """The number of keys of a unit."""
    heads: int
    """The number of query heads of a unit, all of one key head. Some may be padding."""
    num_programs: int
    num_warps: int
    depth: int
    """The number of blocks that are prefetched."""
    overlaps: bool = False
    """True if a launch may begin before the previous one ends and waits for its results (SM90)."""

    @property
    def num_stages(self) -> int:
        """The stages of the loop over blocks. Triton halves them if an address depends on another load."""
        return 2 * self.depth + 1

    def num_subgroups(self, group_size: int) -> int:
        """The number of units for the query heads of one key head."""
        return -(-group_size // self.heads)

    def launch(self) -> dict[str, object]:
        """Launch settings."""
        return overlap_settings(self.overlaps)


@dataclass(frozen=True, eq=False)
class DecodeScratch:
    """The tables that `divide` fills for a step, and the memory for parts."""

    starts: Tensor
    """[num_programs, 8] int32: a program's number of units, the row of the first unit, the unit's index in the row, and
    the row's token, context length and page-table row."""
    cuts: Tensor
    """[num_programs, 8] int32: whether a tile is cut, its token, its group of heads, and the programs of its first and
    last part. One record per tile if there are at most as many tiles as programs, otherwise one per program, for the
    tile at the end of its share."""
    row_tokens: Tensor
    """[max_rows] int32: the token of each row."""
    out: Tensor
    """[2 * num_programs, heads, value_dim] fp32: two parts per program; the second is for a tile that begins in it."""
    stats: Tensor
    """[2 * num_programs, 2, heads] fp32: the largest score and the sum of weights of each part, to the base 2."""


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """The rows of a step, on the device."""

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

    @property
    def num_rows(self) -> int:
        return self.query_lens.shape[0]


def divide(
    rows: DecodeRows,
    scratch: DecodeScratch,
    config: DecodeConfig,
    num_heads: int,
    window: int | None,
    *,
    by_row: bool = False,
) -> None:
    """Divides the units of a step; `num_heads` is the number of groups of heads per row.

    The outputs of rows without a token are left out, unless `by_row`: then every row has one.
    """
    _divide_kernel[(config.num_programs,)](
        rows.query_lens,
        rows.context_lens,
        rows.table_rows,
        scratch.starts,
        scratch.cuts,
        scratch.row_tokens,
        rows.num_rows,
        num_heads,
        config.num_programs,
        window or 0,
        HAS_WINDOW=window is not None,
        BLOCK=config.block,
        ROWS=triton.next_power_of_2(max(rows.num_rows, 1)),
        BY_TILE=rows.num_rows * num_heads <= config.num_programs,
        BY_ROW=by_row,
        num_warps=4,
    )


def merge_parts(
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    v_scale: Tensor | None,
    scratch: DecodeScratch,
    config: DecodeConfig,
    num_rows: int,
    num_kv_heads: int,
    pieces: int = 1,
) -> None:
    """Merges the parts of cut tiles into `out` [num_tokens, num_q_heads, value_dim].

    A tile may have a piece of the values alone, of `pieces` equal ones: those of a group of heads are side by side.
    """
    _, num_q_heads, value_dim = out.shape
    group, value_dim = num_q_heads // num_kv_heads, value_dim // pieces
    tiles = num_rows * num_kv_heads * config.num_subgroups(group) * pieces
    merged, heads = min(tiles, config.num_programs), min(config.heads, group)
    parts, values = _merge_sizes(tiles, value_dim, config.num_programs)
    _merge_kernel[(merged, heads, triton.cdiv(value_dim, values))](
        out,
        lse,
        sinks,
        v_scale,
        scratch.cuts,
        scratch.out,
        scratch.stats,
        num_q_heads,
        group,
        config.num_subgroups(group),
        VALUE_DIM=value_dim,
        VALUES=values,
        HEADS=config.heads,
        PARTS=parts,
        SINKS=sinks is not None,
        LSE=lse is not None,
        FP8=v_scale is not None,
        PIECES=pieces,
        num_warps=1,
        **config.launch(),
    )


def _merge_sizes(num_tiles: int, value_dim: int, num_programs: int) -> tuple[int, int]:
    """How many parts and values a program of the merge reads at a time: nearly all parts if tiles are equally long."""
    parts = 1 << (min(128, max(8, num_programs // max(num_tiles, 1))).bit_length() - 1)
    return parts, min(triton.next_power_of_2(value_dim), max(32, MERGED_AT_ONCE // parts))


@triton.jit
def num_blocks(context, window, HAS_WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """The number of blocks that a row's query sees, plus one for its new token; and the first block."""
    first = 0
    seen = (context + BLOCK - 1) // BLOCK
    if HAS_WINDOW:
        lowest = tl.maximum(context + 1 - window, 0)
        first = lowest // BLOCK
        seen = tl.where(lowest < context, seen - first, 0)
    return seen + 1, first


@triton.jit
def _at(values, row, wanted):
    """The element `wanted` of a vector."""
    return tl.sum(tl.where(row == wanted, values, 0), 0)


@triton.jit
def _shares(blocks, share):
    """The number of programs for tiles of these numbers of blocks, if each tile begins at the start of a program."""
    return tl.sum((blocks + share - 1) // share, 0)


@triton.jit(
    do_not_specialize=["num_rows", "num_heads", "num_programs", "window"],
    do_not_specialize_on_alignment=["query_lens", "context_lens", "table_rows"],
)
def _divide_kernel(
    query_lens,
    context_lens,
    table_rows,
    starts,
    cuts,
    row_tokens,
    num_rows,
    num_heads,
    num_programs,
    window,
    HAS_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BY_TILE: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """Each program computes its own share from all lengths."""
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)
    here = row < num_rows
    query = tl.load(query_lens + row, mask=here, other=0).to(tl.int32)
    context = tl.load(context_lens + row, mask=here, other=0).to(tl.int32)
    table_row = tl.load(table_rows + row, mask=here, other=0).to(tl.int32)
    token = row
    if not BY_ROW:
        token = tl.cumsum(query, 0) - query
    blocks, _ = num_blocks(context, window, HAS_WINDOW, BLOCK)
    blocks = tl.where(query > 0, blocks, 0)
    total = tl.sum(blocks, 0) * num_heads
    share = tl.maximum((total + num_programs - 1) // num_programs, 1)
    # `length` is the room of a tile: its blocks, or more, so that the next tile begins at the start of a program. A
    # program with the end of one tile and the beginning of another waits twice for its first keys, which costs about a
    # block. So tiles are kept apart if shares larger by one suffice; the new token then goes with the last keys.
    placed, length, apart = blocks, blocks, 0
    if BY_TILE:
        keyed = tl.where(query > 0, tl.maximum(blocks - 1, 1), 0)
        even = tl.maximum((tl.sum(keyed, 0) * num_heads + num_programs - 1) // num_programs, 1)
        larger = even + (_shares(keyed, even) * num_heads > num_programs).to(tl.int32)
        apart = (_shares(keyed, larger) * num_heads <= num_programs).to(tl.int32)
        share = tl.where(apart == 1, larger, share)
        placed = tl.where(apart == 1, keyed, blocks)
        length = tl.where(apart == 1, (keyed + share - 1) // share * share, blocks)
    places = length * num_heads
    ends = tl.cumsum(places, 0)
    begins = ends - places
    first = program * share
    start_row = tl.sum(((ends <= first) & here).to(tl.int32), 0)
    row_length, row_blocks = tl.maximum(_at(length, row, start_row), 1), _at(blocks, row, start_row)
    place = first - _at(begins, row, start_row)
    start_heads, start_block = place // row_length, place % row_length
    left = tl.minimum(share, total - first)
    if BY_TILE:
        is_last = start_block + share >= _at(placed, row, start_row)
        left = tl.where(apart == 1, tl.where(is_last, row_blocks - start_block, share), left)
    start = starts + program * FIELDS
    tl.store(start, tl.maximum(left, 0))
    tl.store(start + 1, start_row)
    tl.store(start + 2, start_heads * row_blocks + start_block)
    tl.store(start + 3, _at(token, row, start_row))
    tl.store(start + 4, _at(context, row, start_row))
    tl.store(start + 5, _at(table_row, row, start_row))

    if BY_TILE:
        cut_row, heads = program // num_heads, program % num_heads
    else:
        stop = tl.minimum(first + share, total)
        cut_row = tl.sum(((ends <= stop - 1) & here).to(tl.int32), 0)
        heads = (stop - 1 - _at(begins, row, cut_row)) // tl.maximum(_at(blocks, row, cut_row), 1)
    cut_placed = _at(placed, row, cut_row)
    begin = _at(begins, row, cut_row) + heads * _at(length, row, cut_row)
    first_program, last_program = begin // share, (begin + cut_placed - 1) // share
    is_cut = (cut_placed > 0) & (first_program != last_program)
    if not BY_TILE:
        # A tile that covers the ends of several shares is recorded by the program in which it begins.
        is_cut = is_cut & (first_program == program) & (left > 0)
    cut = cuts + program * FIELDS
    tl.store(cut, is_cut.to(tl.int32))
    tl.store(cut + 1, _at(token, row, cut_row))
    tl.store(cut + 2, heads)
    tl.store(cut + 3, first_program)
    tl.store(cut + 4, last_program)
    if program == 0:
        tl.store(row_tokens + row, token, mask=here)


@triton.jit
def block_places(
    table, start, key, slot_stride, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr = 1
):  # fmt: skip
    """The offsets of a block's entries: one for the block, and one for each key that is added to it. Of `APART` pages,
    the last has entries.

    A block within one page needs one look-up in the table, and 32-bit offsets within the page unless pages are very
    large. (Offsets from the start of the block would always be small, but the compiled code is a quarter slower with
    128 latent heads.)
    """
    if PAGE_SIZE % BLOCK == 0:
        first = tl.load(table + start // PAGE_SIZE * APART + (APART - 1)) * PAGE_SIZE * slot_stride
        in_page = key % PAGE_SIZE
        places = (in_page if PAGE_SIZE <= _SMALL_PAGE else in_page.to(tl.int64)) * slot_stride
    else:
        first = tl.zeros([], tl.int64)
        page = tl.load(table + key // PAGE_SIZE * APART + (APART - 1))
        places = (page * PAGE_SIZE + key % PAGE_SIZE) * slot_stride
    return first, places


@triton.jit
def entries_of(plane, places, dim, DIM: tl.constexpr, DIMS: tl.constexpr):
    """Loads entries [block, DIMS], with zeros from DIM on."""
    place = plane + places[:, None] + dim[None, :]
    if DIM >= DIMS:
        return tl.load(place)
    return tl.load(place, mask=(dim < DIM)[None, :], other=0.0)


@triton.jit
def weighed(scores, seen, largest, totals):
    """The weights [heads, block] of a block, the factor for previous results, and the new totals and largest score.

    At least one key of the block must be seen. Totals are kept per position in a block and added up once, at the end.
    """
    scores = tl.where(seen[None, :], scores, float("-inf"))
    higher = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(largest - higher)
    return weights, shrink, totals * shrink[:, None] + weights, higher


@triton.jit
def totals_of_new(HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """The totals [heads, block] if only a row's new token was seen."""
    return tl.where((tl.arange(0, BLOCK) == 0)[None, :], tl.full([HEADS, BLOCK], 1.0, tl.float32), 0.0)


@triton.jit
def weigh_new(score, largest, total):
    """The weight [heads] of one more key, the factor for previous results, and the new total and largest score."""
    higher = tl.maximum(largest, score)
    weight, shrink = tl.exp2(score - higher), tl.exp2(largest - higher)
    return weight, shrink, total * shrink + weight, higher


@triton.jit
def leave_part(
    part_out, part_stats, program, begins_here, head_in_unit, value, in_heads, gathered, largest, total,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Writes a program's part of a cut tile to scratch memory, for the merge."""
    part = 2 * program + begins_here.to(tl.int32)
    place = part_out + (part * HEADS + head_in_unit)[:, None] * VALUE_DIM + value[None, :]
    tl.store(place, gathered, mask=in_heads[:, None] & (value < VALUE_DIM)[None, :])
    tl.store(part_stats + part * 2 * HEADS + head_in_unit, largest)
    tl.store(part_stats + (part * 2 + 1) * HEADS + head_in_unit, total)


@triton.jit
def next_row(query_lens, row_tokens, context_lens, table_rows, row):
    """The number, token, context length and page-table row of the next row with a token. There must be one."""
    row += 1
    while tl.load(query_lens + row) == 0:
        row += 1
    context, table_row = tl.load(context_lens + row), tl.load(table_rows + row)
    return row, tl.load(row_tokens + row), context.to(tl.int32), table_row.to(tl.int32)


@triton.jit
def finish(
    out, lse, sinks, token, heads, num_heads, values, largest, total, v_scale, value, in_heads,
    SINKS: tl.constexpr, LSE: tl.constexpr, VALUE_DIM: tl.constexpr, piece=0, PIECES: tl.constexpr = 1,
):  # fmt: skip
    """Writes the result of a query for some heads; `values` [heads, value] is not divided by `total` yet.

    These are one of several pieces of `VALUE_DIM` values each.
    """
    if SINKS:
        sink = tl.load(sinks + heads, mask=in_heads, other=0.0).to(tl.float32) * LOG2_E
        higher = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - higher)
        values = values * shrink[:, None]
        total = total * shrink + tl.exp2(sink - higher)
        largest = higher
    values = values * (v_scale / total)[:, None]
    place = out + ((token.to(tl.int64) * num_heads + heads) * PIECES + piece)[:, None] * VALUE_DIM + value[None, :]
    tl.store(place, values.to(out.dtype.element_ty), mask=in_heads[:, None] & (value < VALUE_DIM)[None, :])
    if LSE:
        tl.store(lse + token * num_heads + heads, (largest + tl.log2(total)) / LOG2_E, mask=in_heads)


@triton.jit(do_not_specialize=["num_q_heads", "group", "subgroups"])
def _merge_kernel(
    out, lse, sinks, v_scales, cuts, part_out, part_stats, num_q_heads, group, subgroups,
    VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, FP8: tl.constexpr, PIECES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program merges some values of one head of a tile, if it is cut."""
    head_in_unit = tl.program_id(1)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    cut = cuts + tl.program_id(0) * FIELDS
    is_cut, token, heads_index = tl.load(cut), tl.load(cut + 1), tl.load(cut + 2)
    first, last = tl.load(cut + 3), tl.load(cut + 4)
    piece, heads_index = heads_index % PIECES, heads_index // PIECES
    in_group = (heads_index % subgroups) * HEADS + head_in_unit
    if (is_cut != 0) & (in_group < group):
        head = (heads_index // subgroups) * group + in_group
        largest = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        gathered = tl.zeros([1, VALUES], tl.float32)
        for start in range(first, last + 1, PARTS):
            program = start + tl.arange(0, PARTS)
            there = program <= last
            part = 2 * program + (program == first).to(tl.int32)
            # Loaded first because it is used last.
            place = part_out + (part * HEADS + head_in_unit)[:, None] * VALUE_DIM + value[None, :]
            parts = tl.load(place, mask=there[:, None] & (value < VALUE_DIM)[None, :], other=0.0)
            tops = tl.load(part_stats + part * 2 * HEADS + head_in_unit, mask=there, other=float("-inf"))
            sums = tl.load(part_stats + (part * 2 + 1) * HEADS + head_in_unit, mask=there, other=0.0)
            higher = tl.maximum(largest, tl.max(tops, 0))
            shrink = tl.exp2(largest - higher)
            weights = tl.exp2(tops - higher)
            total = total * shrink + tl.sum(sums * weights, 0)
            gathered = gathered * shrink[:, None] + tl.sum(parts * weights[:, None], 0)[None, :]
            largest = higher
        v_scale = 1.0
        if FP8:
            v_scale = tl.load(v_scales)
        one = tl.zeros([1], tl.int32)
        finish(
            out, lse, sinks, token, head + one, num_q_heads, gathered, largest, total, v_scale, value,
            one == 0, SINKS, LSE, VALUE_DIM, piece, PIECES,
        )  # fmt: skip


def fitting_depth(block_bytes: int, deepest: int, shared_bytes: int) -> int:
    """The number of prefetched blocks that fit in a program's shared memory, at least one."""
    return max(1, min(deepest, shared_bytes // block_bytes))
