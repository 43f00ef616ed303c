"""Several replicas: which one computes a request, and that each keeps its own rows and pages."""

from __future__ import annotations

from functools import partial

import pytest

from sightline.cache.prefix import PrefixCache
from sightline.cache.store import CacheStore
from sightline.core.errors import RequestError
from sightline.engine.observing import share_in_use
from sightline.scheduler.costs import LEAST_TOKENS, StepCosts
from sightline.scheduler.pace import Pace
from sightline.scheduler.replicas import ReplicaScheduler, schedule_replicas
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import RowResult, ScheduledRow, SequenceState
from support.scheduling import make_sequence, make_store


class Replicas:
    """Replicas that are driven as the engine drives them."""

    def __init__(self, count: int = 2, pace: Pace | None = None, **sizes: int) -> None:
        self.stores: list[CacheStore] = [make_store(**sizes) for _ in range(count)]
        self.prefixes = [PrefixCache(store) for store in self.stores]
        make = partial(Scheduler, max_step_tokens=64, max_scored_tokens=64, pace=pace)
        scheduler = schedule_replicas(self.stores, self.prefixes, make)
        assert isinstance(scheduler, ReplicaScheduler)
        self.scheduler = scheduler

    def submit(self, name: str, prompt_len: int, max_tokens: int = 4) -> SequenceState:
        sequence = make_sequence(name, prompt_len, max_tokens)
        self.scheduler.submit(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """Runs one step. Returns the replica of each request that was in it."""
        rows = self.scheduler.schedule().rows
        self.scheduler.launched(rows)
        for row in rows:
            self._commit(row)
        self.scheduler.landed(rows)
        for row in rows:
            if len(row.sequence.tokens) == row.sequence.max_expected:
                self.scheduler.remove(row.sequence)
        return {row.sequence.request.request_id: row.sequence.replica for row in rows}

    def _commit(self, row: ScheduledRow) -> None:
        self.stores[row.sequence.replica].lengths.advance(row.table_row, row.seq_len)
        chosen = (7,) if row.completes and row.seq_len < row.sequence.max_expected else ()
        self.scheduler.commit(row, RowResult(row.seq_len, chosen))

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()


def test_one_store_has_an_ordinary_scheduler() -> None:
    make = partial(Scheduler, max_step_tokens=64, max_scored_tokens=64)
    assert isinstance(schedule_replicas([make_store()], [], make), Scheduler)


def test_requests_go_where_the_least_is_to_compute() -> None:
    replicas = Replicas()
    assert [replicas.submit(name, length).replica for name, length in [("a", 40), ("b", 10), ("c", 10), ("d", 40)]] == [
        *(0, 1, 1, 1)
    ]
    replicas.scheduler.remove(replicas.scheduler.running[0] if replicas.scheduler.running else replicas.submit("e", 1))
    assert replicas.scheduler.num_waiting == 4


def test_work_that_is_over_counts_no_longer() -> None:
    replicas = Replicas()
    replicas.submit("a", 60)
    assert replicas.submit("b", 8).replica == 1
    replicas.finish()
    assert replicas.scheduler._loads == [0, 0]
    assert replicas.submit("c", 80).replica == 0


def test_a_request_goes_where_its_prefix_is_cached() -> None:
    replicas = Replicas()
    replicas.submit("other", 3)
    assert replicas.submit("first", 41).replica == 1
    replicas.finish()
    # The same tokens again: the first replica has less to do, and would compute all of them.
    light = replicas.submit("light", 2)
    assert light.replica == 0
    replicas.scheduler.remove(light)
    again = replicas.submit("again", 45)
    assert again.replica == 1
    replicas.step()
    assert again.num_cached == 40


def test_continuations_stay_with_the_first_one() -> None:
    replicas = Replicas()
    leader = make_sequence("n", 30, 4)
    followers = [SequenceState(leader.request, index, leader) for index in (1, 2)]
    replicas.submit("ballast", 1)
    for each in (leader, *followers):
        replicas.scheduler.submit(each)
    assert {each.replica for each in (leader, *followers)} == {1}
    replicas.finish()
    assert all(len(each.tokens) == 34 for each in (leader, *followers))


def test_each_replica_uses_rows_of_its_own() -> None:
    replicas = Replicas(max_rows=1)
    names = ["a", "b"]
    for name in names:
        replicas.submit(name, 5)
    assert replicas.step() == {"a": 0, "b": 1}
    assert [store.num_free_rows for store in replicas.stores] == [0, 0]
    replicas.finish()
    assert [store.num_free_rows for store in replicas.stores] == [1, 1]


def test_a_replica_with_a_free_row_takes_over_what_waits_elsewhere() -> None:
    replicas = Replicas(max_rows=1)
    replicas.submit("long", 5, max_tokens=40)
    replicas.submit("short", 20, max_tokens=2)
    waiting = replicas.submit("waiting", 12, max_tokens=30)
    assert (waiting.replica, waiting.num_computed) == (1, 0)
    second = replicas.submit("second", 2, max_tokens=2)
    assert second.replica == 0
    replicas.step()
    replicas.step()
    # The second replica goes on with its own request; when nothing waits for it, it takes the other's.
    replicas.scheduler.remove(waiting)
    assert replicas.step()["second"] == 1
    assert replicas.scheduler._loads[0] > 0
    replicas.finish()
    assert replicas.scheduler._loads == [0, 0]


def test_a_replica_with_free_pages_takes_over_what_waits_for_some_elsewhere() -> None:
    replicas = Replicas(usable_pages=16)
    long = replicas.submit("long", 57, max_tokens=5)
    short = replicas.submit("short", 4, max_tokens=2)
    waiting = [replicas.submit(name, 20, max_tokens=14) for name in ("w", "x")]
    assert [each.replica for each in (long, short, *waiting)] == [0, 1, 1, 1]
    late = replicas.submit("late", 9, max_tokens=2)
    assert late.replica == 0, "all have as much to do"
    replicas.step()
    while not short.is_out:
        replicas.step()
    assert replicas.stores[0].num_free_rows, "it waits for pages alone"
    for each in waiting:
        replicas.scheduler.remove(each)
    assert replicas.step()["late"] == 1


def test_requests_that_began_do_not_hide_others_that_wait() -> None:
    replicas = Replicas(count=3, max_rows=1)
    begun, last = replicas.submit("a", 8, max_tokens=9), [replicas.submit(name, 8, max_tokens=60) for name in "bc"]
    replicas.step()
    replicas.scheduler.pause(begun)
    heavy = replicas.submit("heavy", 8, max_tokens=80)
    replicas.step()
    replicas.scheduler.pause(heavy)
    assert [each.replica for each in (begun, heavy, *last)] == [0, 0, 1, 2]
    replicas.scheduler.resume(begun)
    replicas.step()
    replicas.scheduler.resume(heavy)
    waiting = replicas.submit("waiting", 2, max_tokens=2)
    assert waiting.replica == 1
    replicas.scheduler.remove(last[1])
    assert replicas.step()["waiting"] == 2


def test_a_replica_takes_over_all_continuations_of_a_prompt() -> None:
    replicas = Replicas(max_rows=1)
    replicas.submit("long", 5, max_tokens=60)
    short = replicas.submit("short", 20, max_tokens=58)
    leader = make_sequence("n", 8, 4)
    followers = [SequenceState(leader.request, index, leader) for index in (1, 2)]
    for each in (leader, *followers):
        replicas.scheduler.submit(each)
    assert {each.replica for each in (leader, *followers)} == {0}
    replicas.step()
    replicas.scheduler.remove(short)
    assert replicas.step()["n"] == 1
    assert {each.replica for each in (leader, *followers)} == {1}
    assert replicas.scheduler._loads == [64, 33]
    replicas.finish()
    assert all(len(each.tokens) == 12 for each in (leader, *followers))


def test_counts_are_of_all_replicas() -> None:
    replicas = Replicas()
    for _ in range(2):
        both = [replicas.submit(name, 21) for name in "ab"]
        assert sorted(each.replica for each in both) == [0, 1]
        replicas.finish()
    each = [scheduler.prefix_metrics()["prefix_cache_hits"] for scheduler in replicas.scheduler._each]
    assert each == [20, 20]
    assert replicas.scheduler.prefix_metrics()["prefix_cache_hits"] == 40
    assert replicas.scheduler.prefix_metrics()["prefix_cache_queries"] == 84
    replicas.scheduler.reset_counts()
    assert not any(replicas.scheduler.prefix_metrics().values())
    assert share_in_use(replicas.stores, replicas.prefixes) == 0.0
    second = [replicas.submit(name, 21, max_tokens=8) for name in "cd"][1]
    replicas.step()
    replicas.scheduler.remove(replicas.scheduler.running[0])
    assert replicas.scheduler.has_work
    assert share_in_use(replicas.stores, replicas.prefixes) == pytest.approx(second.num_pages / 128)


def test_dropping_all_leaves_no_work() -> None:
    replicas = Replicas()
    for name in "ab":
        replicas.submit(name, 9)
    replicas.scheduler.drop_all()
    assert replicas.scheduler._loads == [0, 0]
    assert not replicas.scheduler.has_work


def test_prompts_of_a_replica_are_limited_while_rows_of_another_generate() -> None:
    """They step together, so the row waits for the prompt."""
    pace = Pace(StepCosts(0.0, 0.0), 10.0)
    replicas = Replicas(pace=pace)
    replicas.submit("row", 2, max_tokens=20)
    replicas.step()
    prompt = replicas.submit("prompt", 60)
    assert prompt.replica == 1
    assert replicas.step() == {"row": 0, "prompt": 1}
    assert prompt.num_computed == LEAST_TOKENS
    replicas.scheduler.remove(replicas.scheduler.running[0])
    replicas.step()
    assert prompt.num_computed == 60, "nobody waits"


def test_a_request_that_began_stays_where_its_pages_are() -> None:
    replicas = Replicas(max_rows=1)
    first = replicas.submit("first", 5, max_tokens=9)
    replicas.step()
    assert replicas.scheduler._each[0].first_untouched() is None
    replicas.scheduler.pause(first)
    replicas.scheduler.resume(first)
    assert replicas.scheduler._each[0].num_waiting == 1
    assert replicas.scheduler._each[0].first_untouched() is None


def test_a_request_that_no_replica_can_hold_is_refused_and_leaves_nothing() -> None:
    replicas = Replicas(usable_pages=4)
    with pytest.raises(RequestError, match="at most 4 cache pages"):
        replicas.submit("large", 30)
    assert replicas.scheduler._loads == [0, 0]
    assert not replicas.scheduler.has_work


def test_removing_twice_takes_the_load_off_once() -> None:
    replicas = Replicas()
    first = replicas.submit("first", 10)
    for _ in range(2):
        replicas.scheduler.remove(first)
    assert replicas.scheduler._loads == [0, 0]
