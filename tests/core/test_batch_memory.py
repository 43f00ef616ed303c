"""A batch in memory at fixed addresses is the padded batch, and overwrites the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sightline.core.batch import FULL, Batch, RowWork, StepWork
from sightline.core.batch_memory import StaticMemory, StepShape
from sightline.core.errors import BatchError
from sightline.core.staging import StagingRing

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Pages:
    """A pool whose slots tell their row and place."""

    key: str
    table_id: int = 3
    num_table_rows: int = 20

    def versions(self, rows: Sequence[int]) -> tuple[int, ...]:
        return tuple(10 * row for row in rows)

    def slots_of(self, rows: Tensor, entries: Tensor) -> Tensor:
        return 100 * rows + entries

    def slots_to_read(self, rows: Sequence[int], contexts: Sequence[int]) -> None:
        del rows, contexts

    def slots_to_write(
        self, rows: Sequence[int], firsts: Sequence[int], counts: Sequence[int], candidates: Sequence[int] = ()
    ) -> list[int]:
        spans = zip(rows, firsts, counts, strict=True)
        return [100 * row + place for row, first, count in spans for place in range(first, first + count)]


SOURCES = (Pages("kv"), Pages("window"))


def static(size: int, query_bound: int, num_pools: int = 2) -> StaticMemory:
    shape = StepShape(size, query_bound)
    return StaticMemory(shape, num_pools, CPU, StagingRing.of(StaticMemory.num_numbers(shape, num_pools), CPU))


def numbers(batch: Batch) -> dict[str, object]:
    """All that a batch consists of but its bounds of new tokens, its logits' padding and its identity."""
    return {
        "tokens": batch.tokens.tolist(),
        "positions": batch.positions.tolist(),
        "query_lens": (batch.query_lens.device.tolist(), batch.query_lens.host),
        "context_lens": (batch.context_lens.device.tolist(), batch.context_lens.bound, batch.context_lens.host),
        "rows": (batch.rows, batch.table_rows.tolist(), batch.masks),
        "pools": {key: (each.table_id, each.versions, each.write_slots.tolist()) for key, each in batch.pools.items()},
        "logits": (batch.logit_indices.tolist()[: len(batch.logit_places)], batch.logit_rows, batch.logit_places),
    }


@pytest.mark.parametrize("size", [3, 5, 8, 17])
@pytest.mark.parametrize(
    "work",
    [
        [RowWork(4, [7], 9, 1), RowWork(2, [8], 0, 1), RowWork(9, [5], 30, 1)],
        [RowWork(4, [7, 6], 9, 2), RowWork(2, [], 5, 1, unread=1)],
        [RowWork(1, [3], 0, 0)],
        [],
    ],
    ids=["decode", "mixed", "one", "none"],
)
def test_a_batch_in_static_memory_is_the_padded_one(size: int, work: list[RowWork]) -> None:
    memory = static(size, 2)
    memory._block.fill_(-7)
    chosen = torch.tensor([40, 41])
    batch = Batch.inside(StepWork.of(work), SOURCES, memory, chosen)
    assert numbers(batch) == numbers(Batch(StepWork.of(work), SOURCES, CPU, chosen).pad(size, size))
    assert batch.query_lens.bound == (2,) * size
    assert batch.logit_indices.shape == (size,)
    assert set(batch.logit_indices.tolist()[len(batch.logit_places) :]) <= {0}


def test_the_next_batch_overwrites_the_one_before_at_the_same_addresses() -> None:
    memory = static(4, 1)
    first = Batch.inside(StepWork.of([RowWork(row, [row], 5, 1) for row in (1, 2, 3, 4)]), SOURCES, memory)
    second = Batch.inside(StepWork.of([RowWork(7, [9], 3, 1)]), SOURCES, memory)
    assert (first.is_overwritten, second.is_overwritten) == (True, False)
    assert first.tokens.data_ptr() == second.tokens.data_ptr()
    assert second.tokens.tolist() == [9, 0, 0, 0]
    assert second.pools["window"].write_slots.tolist() == [703, 0, 0, 0]


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ([RowWork(row, [1], 0, 1) for row in (1, 2, 3)], "expected tokens to be at most 2 on cpu, got 3 on cpu"),
        ([RowWork(1, [1, 2], 0, 1)], "expected query_lens to be at most 1, got 2"),
    ],
    ids=["rows", "tokens"],
)
def test_a_batch_that_does_not_fit_is_refused_and_nothing_overwritten(work: list[RowWork], message: str) -> None:
    memory = static(2, 1)
    held = Batch.inside(StepWork.of([RowWork(1, [5], 0, 1)]), SOURCES, memory)
    with pytest.raises(BatchError, match=message):
        Batch.inside(StepWork.of(work), SOURCES, memory)
    assert (held.is_overwritten, held.tokens.tolist()) == (False, [5, 0])


def test_tokens_that_a_step_in_flight_chooses_are_put_in_place() -> None:
    memory = static(3, 1)
    chosen = torch.tensor([76, 77])
    work = [RowWork(1, [5], 0, 1), RowWork(2, [], 4, 1, unread=1)]
    batch = Batch.inside(StepWork.of(work), SOURCES, memory, chosen)
    assert (batch.tokens.tolist(), batch.is_overwritten) == ([5, 77, 0], False)
    following = Batch.inside(StepWork.of([replace(work[1], unread=0)]), SOURCES, memory, chosen[:1])
    assert (following.tokens.tolist(), following.tokens.data_ptr()) == ([76, 0, 0], batch.tokens.data_ptr())
    assert (batch.is_overwritten, following.is_overwritten) == (True, False)


@pytest.mark.parametrize("unread", [[0, 1], [1, 0]], ids=["in order", "in another order"])
def test_a_batch_reaches_the_device_by_one_copy_whatever_it_continues(
    unread: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []
    copy = StagingRing.copy

    def counted(ring: StagingRing, columns: Sequence[Sequence[int]], target: Tensor) -> None:
        copies.append(len(target))
        copy(ring, columns, target)

    def refused(*_: object) -> tuple[Tensor, ...]:
        raise AssertionError("a second copy")

    monkeypatch.setattr(StagingRing, "copy", counted)
    memory = static(4, 1)
    monkeypatch.setattr("sightline.core.lengths.sent", refused)
    work = [RowWork(row + 1, [], 4, 1, unread=place) for row, place in enumerate(unread)]
    batch = Batch.inside(StepWork.of(work), SOURCES, memory, torch.tensor([70, 71]))
    assert batch.tokens.tolist() == [70 + unread[0], 70 + unread[1], 0, 0]
    assert copies == [4 * (8 + len(SOURCES))]


def test_a_batch_that_is_padded_or_taken_from_has_memory_of_its_own() -> None:
    memory = static(3, 1)
    batch = Batch.inside(StepWork.of([RowWork(1, [5], 0, 1), RowWork(2, [6], 4, 1)]), SOURCES, memory)
    others = [batch.pad(5, 6), batch.take([1])]
    Batch.inside(StepWork.of([]), SOURCES, memory)
    assert [other.is_overwritten for other in others] == [False, False]
    assert others[1].tokens.tolist() == [6]


@pytest.mark.parametrize(
    "change", [lambda batch: batch.take([0]), lambda batch: batch.pad(9, 9), lambda batch: batch.placed_in(batch)]
)
def test_an_overwritten_batch_is_not_copied(change: Callable[[Batch], Batch]) -> None:
    memory = static(4, 1)
    before = Batch.inside(StepWork.of([RowWork(1, [7], 0, 1)]), SOURCES, memory)
    after = Batch.inside(StepWork.of([RowWork(2, [9], 0, 1)]), SOURCES, memory)
    with pytest.raises(BatchError, match=f"tensors to be those of batch {before.batch_id}, got overwritten"):
        change(before)
    assert not after.is_overwritten
    assert change(after).tokens[0] == 9


def test_rows_that_are_not_causal_are_refused_before_anything_is_overwritten() -> None:
    memory = static(4, 1)
    before = Batch.inside(StepWork.of([RowWork(1, [7], 0, 1)]), SOURCES, memory)
    rows = [RowWork(1, [7], 0, 1), RowWork(2, [9], 0, 1, FULL)]
    with pytest.raises(BatchError, match=r"masks of row 1 to be causal, as the graph was captured, got .*FULL"):
        Batch.inside(StepWork.of(rows), SOURCES, memory)
    assert not before.is_overwritten
