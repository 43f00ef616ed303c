"""Steps in flight, urgency, shares between callers, and forks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sightline.cache.pools import CacheLimits
from sightline.cache.store import CacheStore
from sightline.core.errors import SightlineError
from sightline.core.request import Terms
from sightline.scheduler.queue import WaitingQueue
from sightline.scheduler.sequence import SequenceState
from support.scheduling import CPU, PAGE_SIZE, SPECS, Loop, make_sequence, make_store


def has_row(loop: Loop, sequence: SequenceState) -> bool:
    return sequence.table_row is not None and loop.store.is_open(sequence.table_row)


def in_flight(loop: Loop) -> list[str]:
    return [row.sequence.request.request_id for rows in loop.flying for row in rows]


def test_a_step_is_scheduled_while_the_one_before_it_is_in_flight() -> None:
    loop = Loop(depth=1)
    sequence = loop.submit("a", 6, 4)
    assert [loop.step(), loop.step()] == [{"a": 6}, {"a": 1}]
    assert (sequence.num_generated, sequence.num_expected, sequence.num_steps) == (1, 8, 1)
    assert [loop.step(), loop.step(), loop.step()] == [{"a": 1}, {"a": 1}, {}], "its last token is not run"
    assert loop.finished == ["a"]
    loop.assert_baseline()


def test_a_choice_that_depends_on_the_token_before_it_waits_until_that_is_read() -> None:
    loop = Loop(depth=1)
    loop.submit("free", 3, 5)
    loop.submit("bad words", 3, 5, bad_words=((1, 2),))
    assert [set(loop.step()) for _ in range(4)] == [{"free", "bad words"}, {"free"}, {"free", "bad words"}, {"free"}]
    loop.run_to_the_end(20)
    loop.assert_baseline()


def test_a_choice_that_counts_tokens_is_one_token_ahead_of_the_host() -> None:
    loop = Loop(depth=1)
    loop.submit("free", 3, 5)
    loop.submit("penalised", 3, 5, penalty=0.5)
    assert [set(loop.step()) for _ in range(4)] == [{"free", "penalised"}] * 4
    loop.run_to_the_end(20)
    loop.assert_baseline()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_pages_of_what_is_removed_in_flight_come_back_when_its_last_step_is_over(steps: int) -> None:
    loop = Loop(depth=1, budget=8)
    sequence = loop.submit("a", 12, 9)
    for _ in range(steps):
        loop.step()
    loop.remove(sequence)
    assert in_flight(loop) == ["a"]
    assert has_row(loop, sequence)
    assert loop.scheduler.num_running == 0
    assert loop.step() == {}
    assert not has_row(loop, sequence)
    loop.assert_baseline()


def test_what_gives_way_in_flight_is_held_back_first_and_retracted_when_its_step_is_over() -> None:
    loop = Loop(make_store(4), depth=1)
    loop.submit("a", 3, 12)
    b = loop.submit("b", 3, 8)
    while "b" in loop.step():
        assert not loop.scheduler.num_retractions
    assert has_row(loop, b), "it keeps its pages until the step with it is over"
    while not loop.scheduler.num_retractions:
        loop.step()
    assert not has_row(loop, b)
    loop.run_to_the_end(60)
    assert loop.finished == ["a", "b"]
    loop.assert_baseline()


def test_the_more_urgent_are_let_in_first_and_push_back_what_is_less_urgent() -> None:
    loop = Loop(make_store(max_rows=2), budget=8)
    later, sooner = Terms(priority=5), Terms(priority=-1)
    first = loop.submit("first", 3, 9, terms=later)
    second = loop.submit("second", 3, 9, terms=later)
    loop.step()
    loop.submit("plain", 3, 3)
    loop.submit("urgent", 3, 3, terms=sooner)
    assert set(loop.step()) == {"urgent", "plain"}
    assert (first.table_row, second.table_row) == (None, None)
    loop.run_to_the_end(60)
    assert loop.finished == ["urgent", "plain", "first", "second"]
    assert (first.num_retractions, second.num_retractions) == (1, 1)
    loop.assert_baseline()


def test_of_the_same_urgency_nobody_is_pushed_back_for_who_comes_later() -> None:
    loop = Loop(make_store(max_rows=1))
    loop.submit("first", 3, 9)
    loop.step()
    loop.submit("second", 3, 3)
    loop.run_to_the_end(60)
    assert loop.finished == ["first", "second"]
    assert loop.scheduler.num_retractions == 0


def test_who_is_urgent_takes_pages_from_the_last_in_rank_and_leaves_the_rest() -> None:
    loop = Loop(make_store(12), budget=32)
    for name in "abc":
        loop.submit(name, 12, 2, terms=Terms(priority=1))
    loop.step()
    loop.submit("urgent", 8, 2)
    assert set(loop.step()) == {"a", "b", "urgent"}
    loop.run_to_the_end(40)
    loop.assert_baseline()


def test_a_caller_with_many_requests_leaves_half_the_engine_to_one_with_few() -> None:
    loop = Loop(make_store(max_rows=2), budget=16)
    for index in range(6):
        loop.submit(f"many{index}", 4, 4, terms=Terms("many"))
    for index in range(2):
        loop.submit(f"few{index}", 4, 4, terms=Terms("few"))
    loop.run_to_the_end(60)
    assert loop.admitted[:4] == ["many0", "few0", "many1", "few1"]


def test_a_long_prompt_of_one_caller_does_not_hold_up_the_prompts_of_others() -> None:
    loop = Loop(make_store(), budget=8)
    loop.submit("long", 80, 2, terms=Terms("one"))
    loop.step()
    loop.submit("short", 4, 2, terms=Terms("other"))
    assert [loop.step(), loop.step()] == [{"long": 8}, {"short": 4, "long": 4}]


def test_a_request_that_was_refused_leaves_no_trace_of_its_caller() -> None:
    loop = Loop(make_store(usable_pages=4))
    refused = make_sequence("too large", 10, 8, terms=Terms("nobody"))
    with pytest.raises(SightlineError):
        loop.scheduler.submit(refused)
    loop.scheduler.remove(refused)
    assert loop.scheduler._shares._present == {}


def test_a_prompt_that_is_let_in_counts_as_a_whole_before_it_is_computed() -> None:
    loop = Loop(make_store(max_rows=3), budget=16, scored=2)
    loop.submit("long", 80, 2, scored=True, terms=Terms("one"))
    loop.step()
    loop.submit("more", 4, 2, terms=Terms("one"))
    loop.submit("other", 4, 2, terms=Terms("other"))
    loop.scheduler._shares.charge("other", 20)
    loop.step()
    assert loop.admitted == ["long", "other", "more"], "of the long one 2 tokens are computed, and 80 count"


def test_what_is_computed_again_after_a_retraction_is_not_charged_again() -> None:
    loop = Loop(make_store(4))
    loop.submit("a", 3, 12, terms=Terms("a"))
    b = loop.submit("b", 3, 8, terms=Terms("b"))
    loop.run_to_the_end(60)
    assert b.num_retractions > 0
    assert loop.scheduler._shares.of("b") == b.max_len


def test_many_that_share_a_long_prefix_are_let_in_at_the_cost_of_one() -> None:
    store = CacheStore(SPECS, CacheLimits(2000, PAGE_SIZE, 64, 2048), CPU)
    loop = Loop(store, budget=4096, caches=True)
    loop.submit("first", 1600, 1)
    loop.run_to_the_end(3)
    for index in range(64):
        loop.submit(str(index), 1602, 2)
    supply, walked = loop.scheduler._supply, 0
    reuses = [supply.find(sequence) for sequence in loop.scheduler._waiting]
    tally = replace(supply.tally(), idle=supply.idle(reuses))
    for reuse in reuses:
        walked += sum(1 for _ in tally.newly_kept(reuse.finding.path))
        tally = tally.shared(reuse.finding.path)
    assert walked == 400, "each page of the prefix is looked at once"
    assert len(loop.step()) == 64


def test_callers_by_the_thousand_cost_little_where_nobody_can_be_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(make_store(max_rows=1))
    loop.submit("running", 3, 100)
    loop.step()
    for index in range(1000):
        loop.submit(str(index), 3, 2, terms=Terms(f"caller {index}"))
    monkeypatch.setattr(WaitingQueue, "lines", lambda queue, depth: pytest.fail("the queue is not looked at"))
    for _ in range(20):
        assert list(loop.step()) == ["running"]


def test_continuations_share_the_first_ones_pages_and_copy_its_tail_without_a_prefix_cache() -> None:
    loop = Loop()
    leader = loop.submit("a", 10, 4)
    others = [SequenceState(leader.request, index, leader) for index in (1, 2)]
    for other in others:
        loop.scheduler.submit(other)
    first = loop.scheduler.schedule().rows
    assert [row.sequence for row in first] == [leader], "the others wait for the prompt"
    loop.step()
    assert leader.table_row is not None
    pool = loop.store.pools[0]
    tail = slice(pool.table.page(leader.table_row, 2) * PAGE_SIZE, None)
    pool.plane("k")[:, tail][:, :1] = 7.0
    rows = {row.sequence: row for row in loop.scheduler.schedule().rows}
    for other in others:
        assert (rows[other].context_len, rows[other].num_tokens) == (9, 1)
        pages, shared = pool.table.owned(rows[other].table_row), pool.table.owned(leader.table_row)
        assert pages[:2] == shared[:2]
        assert pages[2] != shared[2], "the tail is its own"
        assert pool.plane("k")[0, pages[2] * PAGE_SIZE, 0] == 7.0, "with what the first had computed"


def test_what_was_let_in_half_when_a_schedule_was_broken_off_is_let_in_whole_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop(caches=True)
    loop.submit("a", 9, 2)
    loop.run_to_the_end(5)
    waiting = loop.submit("b", 9, 2)
    with monkeypatch.context() as broken:
        broken.setattr(loop.store, "grow_row", lambda row, count: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            loop.scheduler.schedule()
    assert has_row(loop, waiting), "it has a row and is in the queue"
    loop.scheduler.recount([])
    assert not has_row(loop, waiting)
    loop.run_to_the_end(5)
    assert loop.finished == ["a", "b"]
    loop.assert_baseline()


def test_pages_that_one_gives_up_and_another_shares_are_counted_once_in_any_order() -> None:
    loop = Loop(caches=True)
    running = loop.submit("a", 12, 4)
    loop.step()
    loop.step()
    waiting = loop.submit("b", 12, 4)
    supply = loop.scheduler._supply
    reuse = supply.find(waiting)
    path = reuse.finding.path
    assert len(path) == 2
    counts = []
    for shares_first in (True, False):
        tally = replace(supply.tally(), idle=supply.idle([reuse]))
        if shares_first:
            tally = tally.shared(path)
        tally = tally.retracted(supply.holding(running))
        if not shares_first:
            tally = tally.shared(path)
        counts.append(tally.num_pages)
    assert counts == [loop.store.num_usable_pages - 2] * 2, "all but the two pages that are shared"
