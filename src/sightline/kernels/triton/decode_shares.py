"""How the work of rows of one new token is dealt out, and how what was cut is put together again.

A unit is one block of keys of one row and one group of heads, or the row's new token behind them. The units of a step,
in order, are dealt out evenly to a fixed number of programs:

    units     | row 0, heads 0 | row 0, heads 1 | row 1, heads 0        | row 1, heads 1        | ...
    programs  |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|---- 4 ----|

However many rows there are and however long, every program has as many as every other. A tile, which is all
keys of one row and one group of heads, is answered by the program that has it whole; of a tile that is cut, each
program leaves its part in scratch memory, and a second launch merges the parts. Where tiles are few, each begins with
a program, and programs may have one block more:

    programs  |- 0 -|- 1 -|- 2-|- 3 -|- 4 -|- 5-|--- 6 ---|--- 7 ---|-- 8 --| ...

The dealing is device work, once a step (`divide`), from lengths that only the device needs to know: nothing that is
launched depends on them.

Knows lengths, shares and parts. Does not know keys.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)
UNALIGNED = ("query_lens", "context_lens", "table_rows", "write_slots")
"""What lies at any place of a batch's memory: a kernel must not be compiled again for where."""
FIELDS = tl.constexpr(8)
"""Of a record."""
MERGED_AT_ONCE = 2048
"""Numbers of parts that a program of the merge reads together: few, so that one warp holds them, and all programs find
room beside those of decode, before these end."""
_SMALL_PAGE = tl.constexpr(4096)
"""Tokens of a page in which distances have 32 bits: an entry of half a million numbers would still be reached."""


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
    """Launches begin while the ones before still run, and wait where they need what those wrote: on SM90."""

    @property
    def num_stages(self) -> int:
        """Of the loop over blocks. Triton halves what is asked for where an address comes of another load."""
        return 2 * self.depth + 1

    def num_subgroups(self, group_size: int) -> int:
        """Units that the query heads of one key head take."""
        return -(-group_size // self.heads)

    def launch(self) -> dict[str, object]:
        """Settings of a launch; the interpreter does not know the last."""
        return {"OVERLAPS": self.overlaps, **({"launch_pdl": True} if self.overlaps else {})}


@dataclass(frozen=True, eq=False)
class DecodeScratch:
    """What `divide` fills for a step, and where programs leave their parts."""

    starts: Tensor
    """[num_programs, 8] int32: how many units a program has, the row of the first, the unit's place in the row, and of
    that row the token, the context's length and the page-table row."""
    cuts: Tensor
    """[num_programs, 8] int32: of tiles that may be cut, whether they are, the token, the group of heads, and the
    programs of their first and last part. Of every tile where there are not more than programs, else of the one that
    ends a program's share."""
    row_tokens: Tensor
    """[max_rows] int32: the token of each row."""
    out: Tensor
    """[2 * num_programs, heads, value_dim] fp32: parts; the second of a program's two is that of a tile that begins
    in it."""
    stats: Tensor
    """[2 * num_programs, 2, heads] fp32: of parts, the largest score and the sum of weights, to the base 2."""


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

    @property
    def num_rows(self) -> int:
        return self.query_lens.shape[0]


def divide(rows: DecodeRows, scratch: DecodeScratch, config: DecodeConfig, num_heads: int, window: int | None) -> None:
    """Deals out the units of a step; `num_heads` are groups of heads of a row."""
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
) -> None:
    """Puts tiles together that were cut, into `out` [num_tokens, num_q_heads, value_dim]."""
    _, num_q_heads, value_dim = out.shape
    group = num_q_heads // num_kv_heads
    tiles = num_rows * num_kv_heads * config.num_subgroups(group)
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
        num_warps=1,
        **config.launch(),
    )


def _merge_sizes(num_tiles: int, value_dim: int, num_programs: int) -> tuple[int, int]:
    """How many parts and values a program of the merge reads together: of tiles that are alike, all parts or nearly."""
    parts = 1 << (min(128, max(8, num_programs // max(num_tiles, 1))).bit_length() - 1)
    return parts, min(triton.next_power_of_2(value_dim), max(32, MERGED_AT_ONCE // parts))


@triton.jit
def num_blocks(context, window, HAS_WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks of a row's keys that its query sees, and one for its new token, the last; and the first of them."""
    first = 0
    seen = (context + BLOCK - 1) // BLOCK
    if HAS_WINDOW:
        lowest = tl.maximum(context + 1 - window, 0)
        first = lowest // BLOCK
        seen = tl.where(lowest < context, seen - first, 0)
    return seen + 1, first


@triton.jit
def _at(values, row, wanted):
    """One of a vector's values."""
    return tl.sum(tl.where(row == wanted, values, 0), 0)


@triton.jit
def _shares(blocks, share):
    """Programs that tiles of so many blocks take, each of which begins with a program."""
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
):
    """Each program finds its own share: all of them read all lengths."""
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)
    here = row < num_rows
    query = tl.load(query_lens + row, mask=here, other=0).to(tl.int32)
    context = tl.load(context_lens + row, mask=here, other=0).to(tl.int32)
    table_row = tl.load(table_rows + row, mask=here, other=0).to(tl.int32)
    token = tl.cumsum(query, 0) - query
    blocks, _ = num_blocks(context, window, HAS_WINDOW, BLOCK)
    blocks = tl.where(query > 0, blocks, 0)
    total = tl.sum(blocks, 0) * num_heads
    share = tl.maximum((total + num_programs - 1) // num_programs, 1)
    # Places that a tile takes of shares: its blocks, or so many that the next tile begins with a program. One that has
    # the end of a tile and the beginning of another waits twice for its first keys, which costs about a block: tiles
    # are set apart where shares that are larger by one are enough for it. The new token then goes with the last keys.
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
        # A tile that ends several shares is the matter of the program in which it begins.
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
def block_places(table, start, key, slot_stride, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the entries of a block's keys begin: a number for the block, and one for each key that adds to it.

    A block that lies in one page has one look at the table, and distances in the page that 32 bits hold, unless pages
    are very large. (From the block's own beginning they would be small in any page, but what the assembler makes of
    that is slower by a quarter with 128 latent heads.)
    """
    if PAGE_SIZE % BLOCK == 0:
        first = tl.load(table + start // PAGE_SIZE) * PAGE_SIZE * slot_stride
        in_page = key % PAGE_SIZE
        places = (in_page if PAGE_SIZE <= _SMALL_PAGE else in_page.to(tl.int64)) * slot_stride
    else:
        first = tl.zeros([], tl.int64)
        places = (tl.load(table + key // PAGE_SIZE) * PAGE_SIZE + key % PAGE_SIZE) * slot_stride
    return first, places


@triton.jit
def entries_of(plane, places, dim, DIM: tl.constexpr, DIMS: tl.constexpr):
    """What is cached there, all of it the row's own: [block, DIMS], zeros from DIM on."""
    place = plane + places[:, None] + dim[None, :]
    if DIM >= DIMS:
        return tl.load(place)
    return tl.load(place, mask=(dim < DIM)[None, :], other=0.0)


@triton.jit
def weighed(scores, seen, largest, totals):
    """Weights [heads, block] of a block of which something is seen, how much what was found before shrinks, and the new
    totals and largest score.

    Totals are kept for each place in a block: the programs' warps add them up once, at the end.
    """
    scores = tl.where(seen[None, :], scores, float("-inf"))
    higher = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(largest - higher)
    return weights, shrink, totals * shrink[:, None] + weights, higher


@triton.jit
def totals_of_new(HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Totals [heads, block] where nothing but a row's new token was seen."""
    return tl.where((tl.arange(0, BLOCK) == 0)[None, :], tl.full([HEADS, BLOCK], 1.0, tl.float32), 0.0)


@triton.jit
def weigh_new(score, largest, total):
    """The weight [heads] of one more key, how much what was found before shrinks, the new total and largest score."""
    higher = tl.maximum(largest, score)
    weight, shrink = tl.exp2(score - higher), tl.exp2(largest - higher)
    return weight, shrink, total * shrink + weight, higher


@triton.jit
def leave_part(
    part_out, part_stats, program, begins_here, head_in_unit, value, in_heads, gathered, largest, total,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Puts a program's part of a tile that is cut where the merge finds it."""
    part = 2 * program + begins_here.to(tl.int32)
    place = part_out + (part * HEADS + head_in_unit)[:, None] * VALUE_DIM + value[None, :]
    tl.store(place, gathered, mask=in_heads[:, None] & (value < VALUE_DIM)[None, :])
    tl.store(part_stats + part * 2 * HEADS + head_in_unit, largest)
    tl.store(part_stats + (part * 2 + 1) * HEADS + head_in_unit, total)


@triton.jit
def next_row(query_lens, row_tokens, context_lens, table_rows, row):
    """The next row that has a token, which there is: its number, token, context and page-table row."""
    row += 1
    while tl.load(query_lens + row) == 0:
        row += 1
    context, table_row = tl.load(context_lens + row), tl.load(table_rows + row)
    return row, tl.load(row_tokens + row), context.to(tl.int32), table_row.to(tl.int32)


@triton.jit
def finish(
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


@triton.jit(do_not_specialize=["num_q_heads", "group", "subgroups"])
def _merge_kernel(
    out, lse, sinks, v_scales, cuts, part_out, part_stats, num_q_heads, group, subgroups,
    VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, FP8: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some values of one head of a tile, if it is cut."""
    head_in_unit = tl.program_id(1)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    cut = cuts + tl.program_id(0) * FIELDS
    is_cut, token, heads_index = tl.load(cut), tl.load(cut + 1), tl.load(cut + 2)
    first, last = tl.load(cut + 3), tl.load(cut + 4)
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
            # What is waited for last is asked for first.
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
            one == 0, SINKS, LSE, VALUE_DIM,
        )  # fmt: skip


def fitting_depth(block_bytes: int, deepest: int, shared_bytes: int) -> int:
    """As many blocks on their way as fit a program's shared memory, one at least."""
    return max(1, min(deepest, shared_bytes // block_bytes))
