"""How the work of decode is dealt out: every unit to one program, to each as many as to any other, or one more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.kernels.triton.decode_shares import divide, fitting_depth
from support.decode_cases import Case, Paged, make_scratch

ROW = st.tuples(st.integers(0, 200), st.integers(0, 1)).map(lambda row: (row[0] * row[1], row[1]))


def blocks_of(case: Case, context: int) -> int:
    """Blocks of keys that hold something that a query after such a context sees; one at least."""
    first = 0 if case.window is None else max(0, context + 1 - case.window)
    return max(1, len({key // case.block for key in range(first, context)})) if context else 1


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
    share, apart = share_wanted(blocks, num_heads, num_programs)
    wanted = pieces_wanted(blocks, num_heads, share, apart=apart)
    starts = scratch.starts.tolist()
    assert [start[0] for start in starts] == [*(count for _, _, count in wanted), *[0] * (num_programs - len(wanted))]
    for (_, row, unit, token, context, table_row, *_), piece in zip(starts, wanted, strict=False):
        assert (row, unit) == piece[:2]
        assert (token, context, table_row) == (tokens[row], rows[row][0], int(paged.table_rows[row]))
    assert cuts_told(scratch.cuts) == cuts_wanted(blocks, tokens, num_heads, share, apart=apart)


def share_wanted(blocks: list[int], num_heads: int, num_programs: int) -> tuple[int, bool]:
    """Units of a program at most, and whether each tile begins with one: where there are as many programs as tiles, and
    shares that are larger by one at most are enough for it."""
    share = max(1, -(-sum(blocks) * num_heads // num_programs))
    if len(blocks) * num_heads <= num_programs:
        for larger in (share, share + 1):
            if sum(-(-count // larger) for count in blocks) * num_heads <= num_programs:
                return larger, True
    return share, False


def pieces_wanted(blocks: list[int], num_heads: int, share: int, *, apart: bool) -> list[tuple[int, int, int]]:
    """Of each program that has any: the row and the unit in it that it begins with, and how many it has."""
    if apart:
        return [
            (row, heads * count + block, min(share, count - block))
            for row, count in enumerate(blocks)
            for heads in range(num_heads)
            for block in range(0, count, share)
        ]
    units = [(row, unit) for row, count in enumerate(blocks) for unit in range(count * num_heads)]
    return [(*units[first], len(units[first : first + share])) for first in range(0, len(units), share)]


def cuts_told(cuts: torch.Tensor) -> list[tuple[int, ...]]:
    return sorted(tuple(cut[1:5]) for cut in cuts.tolist() if cut[0])


def cuts_wanted(
    blocks: list[int], tokens: list[int], num_heads: int, share: int, *, apart: bool
) -> list[tuple[int, ...]]:
    """Of each tile that several programs have: token, group of heads, first and last program."""
    wanted, begin = [], 0
    for row, count in enumerate(blocks):
        for heads in range(num_heads if count else 0):
            first, last = begin // share, (begin + count - 1) // share
            if first != last:
                wanted.append((tokens[row], heads, first, last))
            begin += -(-count // share) * share if apart else count
    return sorted(wanted)


@pytest.mark.parametrize(("block_bytes", "wanted"), [(1, 3), (40, 2), (90, 1), (1000, 1)])
def test_as_many_blocks_are_on_their_way_as_fit(block_bytes: int, wanted: int) -> None:
    assert fitting_depth(block_bytes, 3, 100) == wanted
