"""How the work of decode is dealt out: every unit to one program, to each as many as to any other but for rounding."""

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
    units = [(row, unit) for row, count in enumerate(blocks) for unit in range(count * num_heads)]
    starts = scratch.starts.tolist()
    counts = [start[0] for start in starts]
    assert sum(counts) == len(units)
    # As many as the others, but for the last programs, which may have fewer or none.
    share = max(1, -(-len(units) // num_programs))
    assert counts == [max(0, min(share, len(units) - program * share)) for program in range(num_programs)]
    first = 0
    for count, row, unit, token, context, table_row, *_ in starts:
        if count:
            assert (row, unit) == units[first]
            assert (token, context, table_row) == (tokens[row], rows[row][0], int(paged.table_rows[row]))
        first += count
    assert cuts_told(scratch.cuts) == cuts_wanted(blocks, tokens, num_heads, share)


def cuts_told(cuts: torch.Tensor) -> list[tuple[int, ...]]:
    return sorted(tuple(cut[1:5]) for cut in cuts.tolist() if cut[0])


def cuts_wanted(blocks: list[int], tokens: list[int], num_heads: int, share: int) -> list[tuple[int, ...]]:
    """Of each tile that lies in several shares: token, group of heads, first and last program."""
    wanted, begin = [], 0
    for row, count in enumerate(blocks):
        for heads in range(num_heads if count else 0):
            first, last = begin // share, (begin + count - 1) // share
            if first != last:
                wanted.append((tokens[row], heads, first, last))
            begin += count
    return sorted(wanted)


@pytest.mark.parametrize(("block_bytes", "wanted"), [(1, 3), (40, 2), (90, 1), (1000, 1)])
def test_as_many_blocks_are_on_their_way_as_fit(block_bytes: int, wanted: int) -> None:
    assert fitting_depth(block_bytes, 3, 100) == wanted
