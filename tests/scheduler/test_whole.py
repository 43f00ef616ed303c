"""Sequences that are computed whole: no pages, callers in turn, beside sequences that have pages."""

from __future__ import annotations

from collections.abc import Sequence

from sightline.core.batch import PADDING_ROW
from sightline.core.request import Request, RowNeeds, Terms
from sightline.scheduler.costs import StepCosts
from sightline.scheduler.pace import Pace
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import RowResult, ScheduledRow, SequenceState
from support.scheduling import make_store

WHOLE = RowNeeds(0, is_whole=True)
PAGED = RowNeeds(0)


def make_scheduler(max_rows: int = 8, pace: Pace | None = None) -> Scheduler:
    store = make_store(usable_pages=8, max_rows=max_rows)
    return Scheduler(store, None, max_step_tokens=16, max_scored_tokens=16, max_whole_tokens=16, pace=pace)


def submit(
    scheduler: Scheduler, name: str, length: int, needs: RowNeeds = WHOLE, caller: str = "", priority: int = 0
) -> SequenceState:
    sequence = SequenceState(Request(name, None, tuple(range(length)), needs, Terms(caller, priority)))
    scheduler.submit(sequence)
    return sequence


def names(rows: Sequence[ScheduledRow]) -> list[str]:
    return [row.sequence.request.request_id for row in rows]


def run(scheduler: Scheduler) -> list[str]:
    """One step, committed."""
    rows = scheduler.schedule().rows
    for row in rows:
        if row.table_row != PADDING_ROW:
            scheduler._store.lengths.advance(row.table_row, row.seq_len)
    scheduler.launched(rows)
    for row in rows:
        scheduler.commit(row, RowResult(row.seq_len))
        if row.completes:
            scheduler.remove(row.sequence)
    scheduler.landed(rows)
    return names(rows)


def test_a_step_holds_as_many_as_fit_in_turn_the_longest_first_and_takes_no_page() -> None:
    scheduler = make_scheduler()
    for name, length in [("a", 3), ("b", 9), ("c", 4), ("d", 2)]:
        submit(scheduler, name, length)
    free = (scheduler._store.num_free_pages, scheduler._store.num_free_rows)
    rows = scheduler.schedule().rows
    assert names(rows) == ["b", "c", "a"]
    assert {(row.table_row, row.context_len, row.completes) for row in rows} == {(PADDING_ROW, 0, True)}
    assert (scheduler._store.num_free_pages, scheduler._store.num_free_rows) == free
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 1)


def test_several_take_no_longer_than_they_may_and_one_is_never_cut() -> None:
    pace = Pace(StepCosts(logit=0.0, context=0.0), 9.0)
    scheduler = make_scheduler(pace=pace)
    for name, length in [("first", 6), ("a", 3), ("b", 3), ("c", 3), ("d", 3), ("long", 12), ("e", 3)]:
        submit(scheduler, name, length)
    rows = scheduler.schedule().rows
    assert names(rows) == ["first"], "the rate is not known"
    pace.observe(rows, 0.0, 0.006)
    for row in rows:
        scheduler.remove(row.sequence)
    assert [run(scheduler) for _ in range(4)] == [["a", "b", "c"], ["d"], ["long"], ["e"]]


def test_rows_are_bounded_and_a_long_one_runs_alone() -> None:
    scheduler = make_scheduler(max_rows=2)
    for name, length in [("a", 1), ("b", 1), ("c", 1), ("long", 40), ("d", 1)]:
        submit(scheduler, name, length)
    assert [run(scheduler) for _ in range(4)] == [["a", "b"], ["c"], ["long"], ["d"]]
    assert not scheduler.has_work


def test_callers_take_turns_and_priorities_go_first() -> None:
    scheduler = make_scheduler()
    for index in range(6):
        submit(scheduler, f"many{index}", 8, caller="many")
    submit(scheduler, "one", 8, caller="one")
    submit(scheduler, "urgent", 8, caller="many", priority=-1)
    assert run(scheduler) == ["urgent", "one"]
    assert run(scheduler) == ["many0", "many1"]


def test_whole_and_paged_steps_alternate() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "paged", 32, PAGED)
    for index in range(3):
        submit(scheduler, f"whole{index}", 16)
    ran = [run(scheduler) for _ in range(5)]
    assert ran == [["paged"], ["whole0"], ["paged"], ["whole1"], ["whole2"]]
    assert not scheduler.has_work


def test_one_that_was_scheduled_and_not_launched_waits_again() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 3)
    scheduler.schedule()
    assert scheduler.num_waiting == 0
    scheduler.recount(())
    assert run(scheduler) == ["a"]


def test_one_whose_step_was_not_committed_is_computed_again() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 3)
    rows = scheduler.schedule().rows
    scheduler.launched(rows)
    scheduler.landed(rows)
    assert run(scheduler) == ["a"]
    assert not scheduler.has_work


def test_one_that_is_removed_in_flight_or_in_the_queue_leaves_nothing() -> None:
    scheduler = make_scheduler(max_rows=1)
    flying, waiting = submit(scheduler, "a", 3), submit(scheduler, "b", 3)
    rows = scheduler.schedule().rows
    scheduler.launched(rows)
    scheduler.remove(flying)
    scheduler.remove(waiting)
    assert scheduler.has_work, "its step is not over"
    scheduler.landed(rows)
    assert not scheduler.has_work


def test_a_lost_cache_drops_them_too() -> None:
    scheduler = make_scheduler(max_rows=1)
    both = [submit(scheduler, "a", 3), submit(scheduler, "b", 3)]
    scheduler.launched(scheduler.schedule().rows)
    scheduler.drop_all()
    assert not scheduler.has_work
    assert all(sequence.is_out for sequence in both)
