"""Rows are shared: who has at least two fewer than the caller with the most gets one of them, and nobody loses its only
one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sightline.scheduler.decision import Decision, RunningSequence, SchedulerState
from sightline.scheduler.victims import victims
from support.deciding import Standing, decide, decoding, state, waiting_in

PROMPT = Standing(4, 0)
"""Of one that waits."""


def of(callers: str, **changes: int | bool) -> list[Standing]:
    """One that generates for each letter, in the order of arrival."""
    return [decoding(caller=caller, **changes) for caller in callers]


def waits(callers: str, priority: int = 0) -> list[Standing]:
    return [replace(PROMPT, caller=caller, priority=priority) for caller in callers]


@pytest.mark.parametrize(
    ("running", "waiting", "retracted", "let_in"),
    [
        ("aaa", "b", [3], [100]),
        ("aaa", "bb", [3], [100]),
        ("aaa", "bc", [3, 2], [100, 101]),
        ("aaa", "bcd", [3, 2], [100, 101]),
        ("aabbb", "c", [5], [100]),
        ("aabb", "c", [4], [100]),
        ("bbaa", "cd", [4, 2], [100, 101]),
        ("aaab", "c", [3], [100]),
        ("abc", "d", [], []),
        ("a", "b", [], []),
        ("aab", "ab", [], []),
        ("aaa", "a", [], []),
        ("aaa", "aab", [3], [102]),
        ("aaab", "b", [3], [100]),
        ("aaaab", "bbb", [4], [100]),
        ("aaaaab", "bbb", [5, 4], [100, 101]),
        ("aaaaaa", "bbbbb", [6, 5, 4], [100, 101, 102]),
        ("aaaabbbc", "cc", [4], [100]),
        ("aaaabbbbc", "ccc", [8, 4], [100, 101]),
        ("aaaaab", "bc", [5, 4], [101, 100]),
    ],
)
def test_who_has_two_fewer_gets_the_last_of_the_caller_that_holds_the_most(
    running: str, waiting: str, retracted: list[int], let_in: list[int]
) -> None:
    decision = decide(state(of(running), waits(waiting), free=90, rows=0, budget=64))
    assert (list(decision.retracted), list(decision.admitted)) == (retracted, let_in)
    assert decision.rows.keys() == {*range(1, len(running) + 1), *let_in} - {*retracted}


@pytest.mark.parametrize(
    ("priorities", "waiting", "retracted"),
    [
        ([0, 0, 0], 0, [3]),
        ([0, 0, 0], 1, []),
        ([0, 1, 1], 1, [3]),
        ([0, 0, 1], 1, [3]),
        ([1, 0, 0], 0, [1]),
        ([0, 0, 5], 1, [3]),
    ],
)
def test_a_row_is_not_given_up_to_one_that_is_less_urgent(
    priorities: list[int], waiting: int, retracted: list[int]
) -> None:
    running = [decoding(priority=priority, caller="a") for priority in priorities]
    decision = decide(state(running, waits("b", priority=waiting), free=90, rows=0))
    assert list(decision.retracted) == retracted


def test_a_caller_that_may_not_be_asked_leaves_it_to_the_next() -> None:
    running = [*of("aaa", priority=-1), *of("bb")]
    assert decide(state(running, waits("c"), free=90, rows=0)).retracted == (5,)


def test_a_free_row_is_for_the_caller_that_has_none() -> None:
    decision = decide(state(of("a"), waits("ab"), free=90, rows=1))
    assert (decision.admitted, decision.retracted) == ((101,), ())
    assert decide(state(of("a"), waits("ab"), free=90, rows=2)).admitted == (101, 100)
    assert decide(state(of("a"), [*waits("a"), *waits("b", priority=1)], free=90, rows=1)).admitted == (100,)


def test_as_many_give_way_as_there_are_pages_to_find_and_none_in_vain() -> None:
    running = [decoding(9, caller=caller) for caller in "aaab"]
    large = [Standing(16, 0, caller="c")]
    assert decide(state(running, large, free=1, rows=4, budget=64)).retracted == (3, 2)
    hopeless = decide(state(running, [Standing(32, 0, caller="c")], free=1, rows=4, budget=64))
    assert (hopeless.retracted, hopeless.admitted) == ((), ())
    assert len(hopeless.rows) == 4


def test_several_rows_give_way_for_one_only_where_its_caller_has_none() -> None:
    running = [decoding(9, caller=caller) for caller in "aaaaaab"]
    large = Standing(16, 0, caller="b")
    assert decide(state(running, [large], free=1, rows=4, budget=64)).retracted == ()
    assert decide(state(running, [large], free=8, rows=4, budget=64)).retracted == (6,)
    first = replace(large, caller="c")
    assert decide(state(running, [first], free=1, rows=4, budget=64)).retracted == (6, 5, 4)


def test_who_cannot_be_let_in_is_overtaken_by_callers_without_a_row_only() -> None:
    running = of("aabb")
    large, small = Standing(80, 0, caller="a"), Standing(4, 0, caller="b")
    decision = decide(state(running, [large, small, replace(small, caller="c")], free=9, rows=4, budget=64))
    assert decision.admitted == (102,)
    hopeless = replace(large, caller="d")
    assert decide(state(running, [hopeless, small, *waits("c")], free=9, rows=4, budget=64)).admitted == ()
    urgent = replace(large, priority=-1)
    assert decide(state(running, [urgent, *waits("c")], free=9, rows=4, budget=64)).admitted == ()


def test_one_that_is_in_flight_is_held_back_and_so_are_those_that_others_need() -> None:
    decision = decide(state(of("aaaa", num_steps=1), waits("bc"), free=90, rows=0))
    assert (decision.retracted, decision.admitted) == ((), ())
    assert decision.rows == {1: 1, 2: 1}, "two rows are there at the next decision"
    mixed = [*of("aa", num_steps=1), *of("a")]
    large = decide(state(mixed, [Standing(16, 0, caller="b")], free=3, rows=0))
    assert (large.retracted, large.rows) == ((), {1: 1}), "nobody is retracted before all are"


def test_rows_that_fill_the_budget_do_not_keep_a_caller_out() -> None:
    decision = decide(state(of("aaa"), waits("b"), free=90, rows=0, budget=3))
    assert (decision.retracted, decision.rows) == ((3,), {1: 1, 2: 1, 100: 1})


def numbers(sequences: Iterable[RunningSequence]) -> list[int]:
    return [sequence.arrival for sequence in sequences]


def test_what_somebody_forks_does_not_give_way_to_share_rows() -> None:
    running = state(of("aab")).running
    held = {"a": 2, "b": 1}
    assert numbers(victims(running, held, 0, 0)) == [2]
    assert numbers(victims(running, held, 0, 0, spared={2})) == [1]
    assert numbers(victims(running, held, 0, 1)) == []
    assert numbers(victims(running, held, 0, None)) == []


def rows_after(given_state: SchedulerState, decision: Decision) -> list[tuple[str, int]]:
    """(caller, priority) of everybody who has a row."""
    kept = [(each.caller, each.priority) for each in given_state.running if each.arrival not in decision.retracted]
    let_in = [each for each in waiting_in(given_state) if each.arrival in decision.admitted]
    return [*kept, *((each.caller, each.priority) for each in let_in)]


sharers = st.lists(st.tuples(st.sampled_from("aaabcd"), st.integers(0, 1)), max_size=6)


@settings(max_examples=150, deadline=None)
@given(running=sharers, waiting=sharers, free_rows=st.integers(0, 2), spare_budget=st.integers(0, 40))
@example(running=[("a", 0), ("b", 1)], waiting=[("a", 0), ("b", 0)], free_rows=0, spare_budget=0)
@example(running=[("a", 0)] * 4, waiting=[("a", 0), ("b", 0)], free_rows=0, spare_budget=0)
def test_where_there_are_pages_nobody_waits_while_another_has_two_more_that_are_not_more_urgent(
    running: Sequence[tuple[str, int]], waiting: Sequence[tuple[str, int]], free_rows: int, spare_budget: int
) -> None:
    given_state = state(
        [decoding(caller=caller, priority=priority) for caller, priority in running],
        [replace(PROMPT, caller=caller, priority=priority) for caller, priority in waiting],
        free=200,
        rows=free_rows,
        budget=max(1, len(running)) + spare_budget,
    )
    decision = decide(given_state)
    held = Counter(caller for caller, _ in rows_after(given_state, decision))
    let_in = [each for each in waiting_in(given_state) if each.arrival in decision.admitted]
    kept = [each for each in given_state.running if each.arrival not in decision.retracted]
    gone = [each for each in given_state.running if each.arrival in decision.retracted]
    # Rows that generate do not keep anybody out; prompts that come before do.
    is_full = spare_budget > 0 and sum(decision.rows.values()) == given_state.max_step_tokens
    for sequence in (each for each in waiting_in(given_state) if each not in let_in):
        others = [each for each in kept if each.priority >= sequence.priority]
        is_behind = any(held[each.caller] >= held[sequence.caller] + 2 for each in others)
        assert not is_behind or is_full or sequence.caller in {each.caller for each in gone}
    for victim in gone:
        pushed = any(each.priority < victim.priority for each in let_in)
        assert pushed or held[victim.caller] > 0, "nobody loses the only row"
        takers = [each.caller for each in let_in if each.caller != victim.caller]
        assert pushed or any(held[caller] <= held[victim.caller] for caller in takers), "nor for nothing"
    again = decide(given_state)
    assert again == decision
