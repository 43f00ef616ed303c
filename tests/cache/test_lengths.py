"""How much of a row may be read, after steps are launched, taken back, committed and settled in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sightline.cache.lengths import RowLengths
from sightline.core.batch import CAUSAL, Batch, BatchId, MaskKind, RowMask, RowWork, StepWork
from sightline.core.errors import BatchError
from support.fake_pages import FakePages

NUM_ROWS = 4
ROW, OTHER_ROW = 1, 2
FIRST_LANE, OTHER_LANE = 0, 1
SOURCES = (FakePages("kv", 50),)
TREE = RowMask(MaskKind.TREE, torch.ones(2, 2, dtype=torch.bool).tril())


def step(start: int, stop: int, row: int = ROW, mask: RowMask = CAUSAL) -> Batch:
    """A step that writes the entries `start` to `stop` of a row."""
    return Batch(StepWork.of([RowWork(row, [7] * (stop - start), start, 0, mask)]), SOURCES, torch.device("cpu"))


def launched(lengths: RowLengths, *spans: tuple[int, int]) -> list[Batch]:
    """Steps of one row, launched one after the other."""
    steps = [step(*span) for span in spans]
    for each in steps:
        lengths.launch(each, FIRST_LANE)
    return steps


def accepted(lengths: RowLengths, context: int, row: int = ROW, lane: int = FIRST_LANE) -> bool:
    """True if the row's next step may have this context."""
    try:
        lengths.check(step(context, context + 1, row), lane)
    except BatchError:
        return False
    return True


def contexts(lengths: RowLengths, row: int = ROW) -> list[int]:
    """Every context that the row's next step may have."""
    return [context for context in range(20) if accepted(lengths, context, row)]


@pytest.fixture
def lengths() -> RowLengths:
    return RowLengths(NUM_ROWS)


def test_taking_back_a_step_that_was_never_launched_changes_nothing(lengths: RowLengths) -> None:
    planned = step(0, 4)
    launched(lengths, (0, 8))
    lengths.take_back(planned)
    assert contexts(lengths) == [8]
    lengths.commit(ROW, 8)


@pytest.mark.parametrize("settled", [True, False])
def test_nor_does_it_in_a_row_whose_last_step_is_unknown(lengths: RowLengths, *, settled: bool) -> None:
    planned = step(0, 4)
    lengths.advance(ROW, 8)
    if settled:
        lengths.settle(ROW, 6)
    lengths.take_back(planned)
    assert contexts(lengths) == [6 if settled else 8]


def test_a_step_that_is_taken_back_before_it_is_launched_is_launched_all_the_same(lengths: RowLengths) -> None:
    late = step(0, 4)
    lengths.take_back(late)
    lengths.launch(late, FIRST_LANE)
    assert contexts(lengths) == [4]
    lengths.take_back(late)
    assert contexts(lengths) == [0]


def test_a_step_is_taken_back_once(lengths: RowLengths) -> None:
    [first] = launched(lengths, (0, 4))
    lengths.take_back(first)
    launched(lengths, (0, 8), (8, 9))
    lengths.take_back(first)
    assert contexts(lengths) == [9]
    lengths.commit(ROW, 9)


def test_taking_back_a_step_twice_does_not_take_back_those_behind_it(lengths: RowLengths) -> None:
    first, second = launched(lengths, (0, 4), (4, 8))
    for _ in range(2):
        lengths.take_back(first)
        assert contexts(lengths) == [], "the second step read what the first did not write"
    lengths.take_back(second)
    assert contexts(lengths) == [0]


def test_a_step_of_a_row_that_was_reused_is_taken_back_without_effect(lengths: RowLengths) -> None:
    early, late = launched(lengths, (0, 4), (4, 8))
    lengths.fill(ROW, 0)
    lengths.take_back(early)
    assert contexts(lengths) == [0]
    launched(lengths, (0, 6))
    lengths.take_back(late)
    lengths.take_back(early)
    assert contexts(lengths) == [6]
    lengths.commit(ROW, 6)


def test_a_failure_of_a_row_that_was_reused_is_forgotten(lengths: RowLengths) -> None:
    first, second = launched(lengths, (0, 4), (4, 8))
    lengths.take_back(first)
    lengths.fill(ROW, 5)
    assert contexts(lengths) == [5]
    lengths.take_back(second)
    assert contexts(lengths) == [5]


def test_the_rows_of_one_step_are_taken_back_each_as_it_stands(lengths: RowLengths) -> None:
    work = tuple(RowWork(row, [7] * 4, 0, 0) for row in (1, 2, 3))
    batch = Batch(StepWork.of(work), SOURCES, torch.device("cpu"))
    lengths.launch(batch, FIRST_LANE)
    lengths.commit(1, 4)
    lengths.launch(step(4, 8, row=2), FIRST_LANE)
    lengths.take_back(batch)
    assert [contexts(lengths, row) for row in (1, 2, 3)] == [[4], [], [0]]


def test_what_is_committed_of_a_step_that_is_taken_back_may_be_followed_and_no_more(lengths: RowLengths) -> None:
    [first] = launched(lengths, (0, 8))
    lengths.commit(ROW, 3)
    lengths.take_back(first)
    assert contexts(lengths) == [3]
    with pytest.raises(BatchError, match="expected committed length to be at most 3, as was launched, got 8"):
        lengths.commit(ROW, 8)


def test_a_step_behind_one_that_was_partly_committed_and_taken_back_is_not_followed(lengths: RowLengths) -> None:
    first, second = launched(lengths, (0, 8), (8, 9))
    lengths.commit(ROW, 3)
    lengths.take_back(first)
    assert contexts(lengths) == []
    for length in (4, 8, 9):
        with pytest.raises(BatchError, match="at most 3: the step that writes more failed"):
            lengths.commit(ROW, length)
    lengths.commit(ROW, 3)
    lengths.take_back(second)
    assert contexts(lengths) == [3]


def test_a_step_that_fails_between_two_others_leaves_the_first(lengths: RowLengths) -> None:
    _, second, third = launched(lengths, (0, 4), (4, 8), (8, 9))
    lengths.take_back(second)
    with pytest.raises(BatchError, match="at most 4: the step that writes more failed"):
        lengths.commit(ROW, 8)
    lengths.commit(ROW, 4)
    assert contexts(lengths) == []
    lengths.take_back(third)
    assert contexts(lengths) == [4]


def test_a_refusal_behind_a_failure_says_where_the_entries_end(lengths: RowLengths) -> None:
    first, _ = launched(lengths, (0, 4), (4, 8))
    lengths.take_back(first)
    with pytest.raises(BatchError, match="expected context_lens of row 0 to be 0, since a step that was"):
        lengths.check(step(8, 9), FIRST_LANE)


def test_what_is_left_of_a_step_that_was_settled_is_still_taken_back(lengths: RowLengths) -> None:
    first, second = launched(lengths, (0, 8), (8, 9))
    lengths.settle(ROW, 6)
    assert contexts(lengths) == [6]
    lengths.take_back(second)
    assert contexts(lengths) == [6]
    launched(lengths, (6, 9))
    lengths.take_back(first)
    assert contexts(lengths) == []
    lengths.settle(ROW, 6)
    assert contexts(lengths) == [0], "nothing is left behind the step that failed"


def test_settling_before_the_entries_that_are_missing_heals_a_row(lengths: RowLengths) -> None:
    _, second, _ = launched(lengths, (0, 4), (4, 8), (8, 9))
    lengths.take_back(second)
    lengths.settle(ROW, 9)
    assert contexts(lengths) == []
    lengths.settle(ROW, 4)
    assert contexts(lengths) == [4]


def test_a_step_that_was_settled_in_part_or_committed_is_not_run_again(lengths: RowLengths) -> None:
    [first] = launched(lengths, (0, 8))
    lengths.launch(first, FIRST_LANE)
    assert contexts(lengths) == [8]
    lengths.settle(ROW, 6)
    with pytest.raises(BatchError, match="expected context_lens of row 0 to be 6, as was launched, got 0"):
        lengths.launch(first, FIRST_LANE)
    [second] = launched(lengths, (6, 8))
    lengths.commit(ROW, 8)
    with pytest.raises(BatchError, match="expected context_lens of row 0 to be 8, as was launched, got 6"):
        lengths.launch(second, FIRST_LANE)


def test_a_step_that_ran_twice_is_taken_back_with_all_that_it_wrote(lengths: RowLengths) -> None:
    first, second = launched(lengths, (0, 4), (4, 8))
    lengths.launch(second, FIRST_LANE)
    lengths.take_back(second)
    assert contexts(lengths) == [4]
    lengths.take_back(first)
    assert contexts(lengths) == [0]


def test_no_step_is_launched_where_it_may_not_run(lengths: RowLengths) -> None:
    with pytest.raises(BatchError, match="expected context_lens of row 0 to be 0, as was launched, got 4"):
        lengths.launch(step(4, 8), FIRST_LANE)
    assert lengths.launched(ROW) == 0


def test_nobody_read_the_branches_of_a_tree_that_is_taken_back(lengths: RowLengths) -> None:
    launched(lengths, (0, 4))
    tree = step(4, 6, mask=TREE)
    lengths.launch(tree, FIRST_LANE)
    launched(lengths, (4, 8))
    lengths.take_back(tree)
    assert contexts(lengths) == [8]
    lengths.commit(ROW, 8)


def test_a_tree_behind_a_step_that_failed_is_taken_back_too(lengths: RowLengths) -> None:
    [first] = launched(lengths, (0, 4))
    tree = step(4, 6, mask=TREE)
    lengths.launch(tree, FIRST_LANE)
    lengths.take_back(first)
    assert contexts(lengths) == []
    lengths.take_back(tree)
    assert contexts(lengths) == [0]


def test_padding_rows_have_no_length(lengths: RowLengths) -> None:
    batch = step(0, 4).pad(3, 8)
    lengths.launch(batch, FIRST_LANE)
    lengths.check(step(4, 5).pad(4, 4), FIRST_LANE)
    lengths.take_back(batch)
    assert contexts(lengths) == [0]


def test_a_row_only_advances(lengths: RowLengths) -> None:
    lengths.advance(ROW, 4)
    with pytest.raises(BatchError, match="expected launched length to be at least 4, as was launched, got 3"):
        lengths.advance(ROW, 3)
    lengths.advance(ROW, 6)
    lengths.commit(ROW, 6)
    assert contexts(lengths) == [6]


def test_a_row_waits_for_what_another_lane_launched_in_it(lengths: RowLengths) -> None:
    first = step(0, 4)
    lengths.launch(first, OTHER_LANE)
    assert not accepted(lengths, 4)
    tree = step(4, 6, mask=TREE)
    lengths.launch(tree, OTHER_LANE)
    lengths.commit(ROW, 4)
    assert not accepted(lengths, 4), "the tree's branches are still being written"
    with pytest.raises(BatchError, match="expected pages to be"):
        lengths.require_written(ROW)
    lengths.take_back(tree)
    lengths.require_written(ROW)
    assert accepted(lengths, 4)


def test_a_step_that_ran_in_two_lanes_is_followed_in_neither_until_it_is_committed(lengths: RowLengths) -> None:
    [first] = launched(lengths, (0, 4))
    lengths.launch(first, OTHER_LANE)
    assert not accepted(lengths, 4)
    assert not accepted(lengths, 4, lane=OTHER_LANE)
    with pytest.raises(BatchError, match="all that lane 1 launched in row 1 to be committed before its pages go"):
        lengths.require_written(ROW)
    lengths.commit(ROW, 4)
    lengths.require_written(ROW)
    assert accepted(lengths, 4)
    assert accepted(lengths, 4, lane=OTHER_LANE)


def test_many_rows_are_settled_in_one_call(lengths: RowLengths) -> None:
    rows = (1, 2, 3)
    for row in rows:
        lengths.launch(step(0, 4 + row, row), FIRST_LANE)
        lengths.commit(row, (0, 5, 6, 3)[row])
    lengths.settle_all(rows, (5, 9, 3))
    assert [lengths.launched(row) for row in rows] == [5, 6, 3]
    lengths.settle_all(rows, (5, 6, 3))
    with pytest.raises(BatchError, match="expected launched length to be at least 6, as is committed, got 5"):
        lengths.settle_all(rows, (5, 5, 3))


def test_settling_rows_of_which_all_is_committed_ends_their_trees(lengths: RowLengths) -> None:
    lengths.launch(step(0, 4), OTHER_LANE)
    lengths.launch(step(4, 6, mask=TREE), OTHER_LANE)
    lengths.commit(ROW, 4)
    lengths.settle_all((ROW, OTHER_ROW), (4, 0))
    lengths.require_written(ROW)


def test_a_step_that_runs_again_and_again_is_recorded_once(lengths: RowLengths) -> None:
    first, second = step(0, 4), step(0, 4, row=OTHER_ROW)
    for _ in range(100):
        lengths.launch(first, FIRST_LANE)
        lengths.launch(second, FIRST_LANE)
    assert max(len(launches) for launches in lengths._launches) <= 32
    lengths.take_back(second)
    assert [contexts(lengths, row) for row in (ROW, OTHER_ROW)] == [[4], [0]]


def test_launches_that_are_committed_are_dropped_in_time(lengths: RowLengths) -> None:
    for length in range(200):
        lengths.launch(step(length, length + 1), FIRST_LANE)
        lengths.commit(ROW, length + 1)
        assert len(lengths._launches[ROW]) <= 32
    assert contexts(lengths) == []
    assert accepted(lengths, 200)


@dataclass
class Written:
    """A launched step, and whether it read an entry that a failed step should have written."""

    batch: Batch
    is_tainted: bool = False


@dataclass
class Cells:
    """The truth about one row: who wrote each entry that exists, and how many of them are committed."""

    writers: list[BatchId | None] = field(default_factory=list)
    committed: int = 0
    steps: dict[BatchId, Written] = field(default_factory=dict)

    @property
    def is_tainted(self) -> bool:
        return any(step.is_tainted for step in self.steps.values())

    @property
    def end(self) -> int:
        """Entries before the first that is missing."""
        return next((place for place, writer in enumerate(self.writers) if writer is None), len(self.writers))

    def launch(self, batch: Batch) -> None:
        [context], [query] = batch.context_lens.exact(), batch.query_lens.exact()
        self.writers[context:] = [batch.batch_id] * query
        self.steps[batch.batch_id] = Written(batch)

    def take_back(self, batch: Batch) -> None:
        lost = [
            place
            for place, writer in enumerate(self.writers)
            if writer == batch.batch_id and place >= self.committed and batch.batch_id in self.steps
        ]
        self.steps.pop(batch.batch_id, None)
        for place in lost:
            self.writers[place] = None
        for step in self.steps.values():
            step.is_tainted |= any(place < step.batch.context_lens.exact()[0] for place in lost)
        self._forget()

    def commit(self, length: int) -> None:
        self.committed = max(self.committed, length)
        self._forget()

    def settle(self, length: int) -> None:
        del self.writers[length:]
        self._forget()

    def _forget(self) -> None:
        """Steps whose entries are all committed or gone play no part any more, nor do missing entries at the end."""
        while self.writers and self.writers[-1] is None:
            self.writers.pop()
        left = set(self.writers[self.committed :])
        self.steps = {batch_id: step for batch_id, step in self.steps.items() if batch_id in left}


@given(st.lists(st.tuples(st.sampled_from("LLLLTTTCCSRAF"), st.integers(0, 7), st.integers(1, 4)), max_size=40))
def test_a_step_is_accepted_exactly_where_all_that_it_reads_exists(moves: Sequence[tuple[str, int, int]]) -> None:
    lengths, rows = RowLengths(NUM_ROWS), {ROW: Cells(), OTHER_ROW: Cells()}
    made: list[tuple[int, Batch]] = []
    for move, pick, count in moves:
        row = (ROW, OTHER_ROW)[pick % 2]
        cells = rows[row]
        end = cells.end
        if move == "L" and not cells.is_tainted:
            made.append((row, step(end, end + count, row)))
            lengths.launch(made[-1][1], FIRST_LANE)
            cells.launch(made[-1][1])
        elif move == "A":
            made.append((row, step(end, end + count, row)))
        elif move == "T" and made:
            row, batch = made[-1 - pick % len(made)]
            lengths.take_back(batch)
            rows[row].take_back(batch)
        elif move == "C":
            length = cells.committed + count - 1
            if length <= end:
                lengths.commit(row, length)
                cells.commit(length)
            else:
                with pytest.raises(BatchError, match="committed length"):
                    lengths.commit(row, length)
        elif move == "S":
            lengths.settle(row, cells.committed + pick)
            cells.settle(cells.committed + pick)
        elif move == "R" and cells.steps and not cells.is_tainted:
            last = list(cells.steps.values())[-1].batch
            if sum(last.context_lens.exact() + last.query_lens.exact()) == len(cells.writers):
                lengths.launch(last, FIRST_LANE)
        elif move == "F":
            lengths.fill(row, 0)
            rows[row] = Cells()
        for each, known in rows.items():
            tried = {0, known.committed, known.end, known.end + 1, lengths.launched(each)}
            found = {context for context in tried if accepted(lengths, context, each)}
            assert found == (set() if known.is_tainted else {known.end})
            assert lengths.committed(each) == known.committed
