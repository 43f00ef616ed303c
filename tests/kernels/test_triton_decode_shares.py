"""How the work of decode is dealt out: every unit to one program, to each as many as to any other, or one more."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.kernels.triton.decode_shares import block_places, divide, fitting_depth
from support.decode_cases import DEVICE, Case, Paged, make_scratch

ROW = st.tuples(st.integers(0, 200), st.integers(0, 1)).map(lambda row: (row[0] * row[1], row[1]))


def blocks_of(case: Case, context: int) -> int:
    """Blocks of keys that hold something that a query after such a context sees, and one for the new token."""
    first = 0 if case.window is None else max(0, context + 1 - case.window)
    return 1 + len({key // case.block for key in range(first, context)})


@pytest.mark.prove
@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(ROW, min_size=1, max_size=9),
    num_heads=st.integers(1, 5),
    num_programs=st.integers(1, 20),
    block=st.sampled_from([16, 32]),
    window=st.sampled_from([None, 1, 16, 17, 60]),
)
def test_every_unit_belongs_to_one_program(
    rows: list[tuple[int, int]], num_heads: int, num_programs: int, block: int, window: int | None
) -> None:
    case = Case(tuple(rows), block=block, num_programs=num_programs, window=window)
    paged, scratch = Paged.shuffled(case), make_scratch(case, 1)
    divide(paged.rows, scratch, case.config, num_heads, window)
    tokens = [sum(query_len for _, query_len in rows[:row]) for row in range(len(rows))]
    assert scratch.row_tokens.tolist() == tokens
    blocks = [blocks_of(case, context) * query_len for context, query_len in rows]
    dealt: list[list[tuple[int, int]]] = []
    for count, row, unit, token, context, table_row, *_ in scratch.starts.tolist():
        if count:
            assert (token, context, table_row) == (tokens[row], rows[row][0], int(paged.table_rows[row]))
        following = [(each, place) for each in range(row, len(rows)) for place in range(blocks[each] * num_heads)]
        dealt.append(following[unit : unit + count] if count else [])
    assert [each for units in dealt for each in units] == [
        (row, place) for row in range(len(rows)) for place in range(blocks[row] * num_heads)
    ]
    # As many as if all had the same; or one more, and with it the new token.
    assert max(map(len, dealt)) <= -(-sum(blocks) * num_heads // num_programs) + 2
    programs_of: dict[tuple[int, int], list[int]] = {}
    for program, units in enumerate(dealt):
        for tile in dict.fromkeys((row, place // blocks[row]) for row, place in units):
            programs_of.setdefault(tile, []).append(program)
    assert cuts_told(scratch.cuts) == sorted(
        (tokens[row], heads, programs[0], programs[-1])
        for (row, heads), programs in programs_of.items()
        if len(programs) > 1
    )
    if can_be_apart(blocks, num_heads, num_programs):
        held = [program for programs in programs_of.values() for program in programs]
        assert len(held) == len(set(held))


def can_be_apart(blocks: list[int], num_heads: int, num_programs: int) -> bool:
    """Whether each tile can begin with a program, with shares of keys that are larger by one at most."""
    keyed = [max(count - 1, 1) for count in blocks if count]
    share = max(1, -(-sum(keyed) * num_heads // num_programs)) + 1
    return len(blocks) * num_heads <= num_programs and (
        sum(-(-count // share) for count in keyed) * num_heads <= num_programs
    )


def cuts_told(cuts: torch.Tensor) -> list[tuple[int, ...]]:
    return sorted(tuple(cut[1:5]) for cut in cuts.tolist() if cut[0])


@pytest.mark.parametrize(("block_bytes", "wanted"), [(1, 3), (40, 2), (90, 1), (1000, 1)])
def test_as_many_blocks_are_on_their_way_as_fit(block_bytes: int, wanted: int) -> None:
    assert fitting_depth(block_bytes, 3, 100) == wanted


@triton.jit  # type: ignore[untyped-decorator]
def _places_of(table, out, start, slot_stride, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    key = start + tl.arange(0, BLOCK)
    first, places = block_places(table, start, key, slot_stride, PAGE_SIZE, BLOCK)
    tl.store(out + tl.arange(0, BLOCK), first + places)


@pytest.mark.parametrize("start", [0, 64, 4032, 1 << 19, (1 << 20) + 64])
@pytest.mark.parametrize("page_size", [64, 4096, 8192, 1 << 20], ids=lambda size: f"page-{size}")
def test_places_in_pages_of_any_size_are_right_beyond_31_bits(page_size: int, start: int) -> None:
    slot_stride, block = 32 * 128, 64
    table = torch.arange(start // page_size + 1, device=DEVICE).flip(0) + 500_000
    out = torch.zeros(block, dtype=torch.int64, device=DEVICE)
    _places_of[(1,)](table, out, start, slot_stride, PAGE_SIZE=page_size, BLOCK=block)
    page, offset = int(table[start // page_size]), start % page_size
    assert out.tolist() == [(page * page_size + offset + key) * slot_stride for key in range(block)]
