"""A row's pages and its version change together; the padding row never does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.cache.table import PageTable
from sightline.core.batch import PADDING_ROW

CPU = torch.device("cpu")


def make_table(num_rows: int = 3, max_pages: int = 4) -> PageTable:
    return PageTable(num_rows, max_pages, CPU)


def test_a_new_table_holds_only_the_padding_page() -> None:
    table = make_table()
    assert table.pages.shape == (4, 4)
    assert table.pages.dtype == torch.int64
    assert table.pages.count_nonzero() == 0
    assert [table.owned(row) for row in range(4)] == [()] * 4


def test_each_table_has_an_identity_of_its_own() -> None:
    assert make_table().table_id != make_table().table_id


def test_appended_pages_follow_those_that_are_there() -> None:
    table = make_table()
    table.append(2, [7, 3])
    table.append(2, [5])
    assert table.owned(2) == (7, 3, 5)
    assert table.num_owned(2) == 3
    assert table.pages[2].tolist() == [7, 3, 5, 0]
    assert table.pages[[0, 1, 3]].count_nonzero() == 0, "another row changed"


def test_pages_that_leave_a_row_move_its_version_and_no_other() -> None:
    table = make_table()
    table.append(1, [4])
    seen = [table.version(1)]
    table.append(1, [5])
    assert table.version(1) == seen[0], "growth takes no page away"
    table.trim(1, 1)
    seen.append(table.version(1))
    table.clear(1)
    seen.append(table.version(1))
    assert len(set(seen)) == 3
    assert table.versions([0, 2, 3]) == (0, 0, 0)
    assert table.versions([1, 0, 1]) == (seen[-1], 0, seen[-1])


def test_a_row_that_is_filled_again_with_the_same_pages_has_another_version() -> None:
    table = make_table()
    table.append(1, [4, 5])
    before = table.version(1)
    table.append(1, table.clear(1))
    assert table.owned(1) == (4, 5)
    assert table.version(1) != before


def test_clearing_returns_the_pages_and_leaves_the_padding_page() -> None:
    table = make_table()
    table.append(3, [9, 8, 7, 6])
    table.append(1, [5])
    assert table.clear(3) == (9, 8, 7, 6)
    assert table.owned(3) == ()
    assert table.pages[3].tolist() == [0, 0, 0, 0]
    assert table.owned(1) == (5,)
    assert table.clear(3) == ()


def test_more_pages_than_a_row_holds_are_refused_and_change_nothing() -> None:
    table = make_table()
    table.append(1, [2, 3, 4])
    version = table.version(1)
    with pytest.raises(ValueError, match=r"expected at most 4 pages in a row, got 3 \+ 2"):
        table.append(1, [5, 6])
    assert (table.owned(1), table.version(1)) == ((2, 3, 4), version)
    assert table.pages[1].tolist() == [2, 3, 4, 0]
    table.append(1, [5])
    assert table.owned(1) == (2, 3, 4, 5)


@pytest.mark.parametrize("row", [PADDING_ROW, -1, 4])
def test_the_padding_row_and_rows_outside_cannot_be_written(row: int) -> None:
    table = make_table()
    with pytest.raises(ValueError, match=f"expected a row from 1 to 3, got {row}"):
        table.append(row, [1])
    with pytest.raises(ValueError, match=f"expected a row from 1 to 3, got {row}"):
        table.clear(row)
    assert table.pages.count_nonzero() == 0
    assert table.version(PADDING_ROW) == 0


@settings(max_examples=60, deadline=None)
@given(
    page_size=st.integers(1, 9),
    pages=st.lists(st.integers(1, 99), min_size=1, max_size=6, unique=True),
    data=st.data(),
)
def test_slots_are_those_that_walking_the_pages_finds(page_size: int, pages: list[int], data: st.DataObject) -> None:
    table = PageTable(2, 6, CPU)
    table.append(1, pages)
    table.append(2, pages[::-1])
    walked = {
        row: [page * page_size + offset for page in table.owned(row) for offset in range(page_size)] for row in (1, 2)
    }
    places = st.tuples(st.integers(1, 2), st.integers(0, len(walked[1]) - 1))
    wanted = data.draw(st.lists(places, min_size=1, max_size=8))
    rows, entries = torch.tensor([row for row, _ in wanted]), torch.tensor([entry for _, entry in wanted])
    slots = table.slots(rows.unsqueeze(1), entries.unsqueeze(1), page_size)
    assert slots.squeeze(1).tolist() == [walked[row][entry] for row, entry in wanted]
    assert slots.shape == (len(wanted), 1)


def test_slots_of_the_padding_row_lie_in_the_padding_page() -> None:
    table = make_table()
    table.append(1, [3])
    assert table.slots(torch.tensor([PADDING_ROW] * 3), torch.tensor([0, 1, 7]), 4).tolist() == [0, 1, 3]


def test_entries_side_by_side_are_a_run_and_others_are_not() -> None:
    table = PageTable(num_rows=3, max_pages=8, device=torch.device("cpu"))
    table.append(1, [4, 5, 6])
    table.append(2, [7, 9, 8])
    assert table.run(1, 0, 12, page_size=4) == slice(16, 28)
    assert table.run(1, 3, 9, page_size=4) == slice(19, 25)
    assert table.run(1, 4, 5, page_size=4) == slice(20, 21)
    assert table.run(2, 0, 12, page_size=4) is None
    assert table.run(2, 0, 5, page_size=4) is None
    assert table.run(2, 4, 8, page_size=4) == slice(36, 40)


def test_pages_that_fall_are_no_run() -> None:
    table = PageTable(num_rows=1, max_pages=8, device=torch.device("cpu"))
    table.append(1, [6, 5, 4])
    assert table.run(1, 0, 12, page_size=4) is None


@pytest.mark.parametrize(("first", "stop"), [(0, 13), (12, 16), (40, 44), (3, 3), (5, 2), (-1, 4)])
def test_a_run_of_entries_that_the_row_has_no_pages_for_is_refused(first: int, stop: int) -> None:
    table = make_table(max_pages=8)
    table.append(1, [4, 5, 6])
    table.append(2, [7, 8])
    with pytest.raises(ValueError, match="expected entries that row 1 has pages for"):
        table.run(1, first, stop, page_size=4)


def test_a_negative_number_of_pages_to_keep_is_refused() -> None:
    table = make_table()
    table.append(1, [7, 3])
    with pytest.raises(ValueError, match="at least 0 pages to keep in row 1, got -1"):
        table.trim(1, -1)
    assert (table.owned(1), table.pages[1].tolist()) == ((7, 3), [7, 3, 0, 0])


def test_tables_that_the_host_keeps_twice_hold_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table()
    # As on a GPU, where the host has numbers of its own.
    monkeypatch.setattr(table, "_is_shared", False)
    monkeypatch.setattr(table, "on_host", table.on_host.copy())
    table.append(2, [7, 3, 5])
    table.append(1, [6, 4])
    table.trim(2, 1)
    table.clear(1)
    table.append(1, [8])
    assert table.on_host.tolist() == table.pages.tolist() == [[0] * 4, [8, 0, 0, 0], [7, 0, 0, 0], [0] * 4]
