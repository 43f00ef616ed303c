"""A batch's rows in a pool of states keep their slots, on the device and on the host, however the batch is changed."""

from __future__ import annotations

import torch

from sightline.core.pool_rows import PoolRows

WRITTEN = [0, 7, 8, 0, 9]
ROWS = PoolRows(1, (4, 5, 6), torch.tensor(WRITTEN), torch.tensor([1, 2, 3]), tuple(WRITTEN))
"""Three rows of 2, 1 and 2 tokens."""


def slots(rows: PoolRows) -> tuple[list[int], list[int]]:
    """What is read and written; the host knows what is written."""
    assert rows.read_slots is not None
    assert list(rows.kept) == rows.write_slots.tolist()
    return rows.read_slots.tolist(), rows.write_slots.tolist()


def test_padding_reads_and_writes_the_padding_slot() -> None:
    padded = ROWS.padded(1, 2, 0)
    assert slots(padded) == ([1, 2, 3, 0], [*WRITTEN, 0, 0])
    assert padded.versions == (4, 5, 6, 0)


def test_rows_can_be_taken_in_another_order() -> None:
    taken = ROWS.taken([2, 0], torch.tensor([2, 0]), [3, 4, 0, 1], torch.tensor([3, 4, 0, 1]))
    assert slots(taken) == ([3, 1], [0, 9, 0, 7])
    assert taken.versions == (6, 4)


def test_a_part_has_the_slots_of_its_own_rows_and_tokens() -> None:
    part = ROWS.part(slice(1, 3), slice(2, 5))
    assert slots(part) == ([2, 3], [8, 0, 9])
    assert part.versions == (5, 6)


def test_rows_that_are_placed_elsewhere_read_and_write_there() -> None:
    read, written = torch.zeros(3, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    placed = ROWS.placed_in(PoolRows(1, (0, 0, 0), written, read))
    assert slots(placed) == slots(ROWS)
    assert (placed.read_slots is read, placed.write_slots is written) == (True, True)


def test_a_pool_of_entries_stays_without_slots_to_read() -> None:
    entries = PoolRows(1, (4, 5, 6), torch.tensor(WRITTEN))
    index = torch.tensor([0])
    for rows in (entries.padded(1, 2, 0), entries.taken([0], index, [0], index), entries.part(slice(1), slice(2))):
        assert rows.read_slots is None
        assert rows.kept == ()
