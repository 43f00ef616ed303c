"""Callers share the rows of the batch as they share the queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.core.request import Terms
from sightline.scheduler.queue import WaitingQueue
from sightline.scheduler.sequence import SequenceState
from support.scheduling import PAGE_SIZE, Loop, make_store

A, B, C = Terms("a"), Terms("b"), Terms("c")


def flooded(loop: Loop, count: int, max_tokens: int = 40) -> list[SequenceState]:
    """A loop in which caller a has so many that run and wait, and all that can run generate."""
    sequences = [loop.submit(f"a{index}", 3, max_tokens, terms=A) for index in range(count)]
    for _ in range(3):
        loop.step()
    return sequences


def steps_until(loop: Loop, name: str, most: int = 10) -> int:
    """How many steps it takes until a request is answered."""
    for count in range(1, most + 1):
        loop.step()
        if name in loop.finished:
            return count
    return most + 1


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize(("depth", "most"), [(0, 1), (1, 3)])
@pytest.mark.parametrize("num_waiting", [0, 6])
def test_a_caller_that_comes_is_answered_while_another_has_every_row(
    caches: bool, depth: int, most: int, num_waiting: int
) -> None:
    loop = Loop(make_store(max_rows=4), depth=depth, caches=caches)
    sequences = flooded(loop, 4 + num_waiting)
    assert loop.store.num_free_rows == 0
    loop.submit("b", 3, 1, terms=B)
    assert steps_until(loop, "b") <= most
    assert loop.scheduler.num_retractions == 1
    assert sequences[3].num_retractions == 1, "the last in rank of those that ran"
    loop.run_to_the_end(400)
    assert all(sequence.num_generated == 40 for sequence in sequences)
    loop.assert_baseline()


@pytest.mark.parametrize("depth", [0, 1])
def test_many_callers_that_come_at_once_have_rows_within_two_steps(depth: int) -> None:
    loop = Loop(make_store(max_rows=6), budget=32, depth=depth)
    flooded(loop, 9)
    for caller in "bcdefg":
        loop.submit(caller, 3, 20, terms=Terms(caller))
    for _ in range(1 + depth):
        loop.step()
    held = Counter(sequence.caller for sequence in loop.scheduler.running)
    assert held == dict.fromkeys("abcdef", 1), "the first caller keeps one, and the last waits: nobody has two"
    retractions = loop.scheduler.num_retractions
    for _ in range(10):
        loop.step()
    assert loop.scheduler.num_retractions == retractions == 5, "nobody pushes back"
    loop.run_to_the_end(600)
    loop.assert_baseline()


def test_a_caller_that_has_had_more_has_a_row_all_the_same() -> None:
    loop = Loop(make_store(max_rows=3))
    flooded(loop, 6)
    loop.submit("b", 3, 1, terms=B)
    loop.scheduler._shares.charge("b", 10_000)
    assert steps_until(loop, "b") == 1


def test_the_row_that_was_lent_goes_back_and_the_answer_goes_on_where_it_was() -> None:
    loop = Loop(make_store(max_rows=2))
    _, victim = flooded(loop, 2)
    tokens = list(victim.tokens)
    loop.submit("b", 3, 4, terms=B)
    loop.step()
    assert (victim.table_row, victim.tokens) == (None, tokens)
    for _ in range(5):
        loop.step()
    assert victim.table_row is not None
    assert victim.tokens[: len(tokens)] == tokens
    loop.run_to_the_end(200)
    assert loop.finished[0] == "b"
    assert victim.num_retractions == 1


def test_the_first_continuation_may_give_way_and_the_others_go_on() -> None:
    loop = Loop(make_store(max_rows=3), caches=True)
    leader = loop.submit("a", 9, 12, terms=A)
    others = [SequenceState(leader.request, index, leader) for index in (1, 2, 3)]
    for other in others:
        loop.scheduler.submit(other)
    for _ in range(3):
        loop.step()
    for name, terms in (("b", B), ("c", C)):
        loop.submit(name, 3, 6, terms=terms)
    loop.step()
    held = Counter(sequence.caller for sequence in loop.scheduler.running)
    assert held == {"a": 1, "b": 1, "c": 1}
    loop.run_to_the_end(200)
    assert all(sequence.num_generated == 12 for sequence in (leader, *others))
    loop.assert_baseline()


def test_the_queue_is_not_looked_at_where_every_caller_that_waits_has_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop(make_store(max_rows=4))
    flooded(loop, 2)
    for index in range(2):
        loop.submit(f"b{index}", 3, 40, terms=B)
    loop.step()
    for index in range(50):
        loop.submit(f"more {index}", 3, 2, terms=(A, B)[index % 2])
    loop.submit("patient", 3, 2, terms=Terms("c", priority=1))
    monkeypatch.setattr(WaitingQueue, "lines", lambda queue, depth: pytest.fail("the queue is not looked at"))
    for _ in range(10):
        assert len(loop.step()) == 4


def test_rows_are_counted_right_after_an_interruption() -> None:
    loop = Loop(make_store(max_rows=3))
    flooded(loop, 3)
    loop.scheduler._running.held.clear()
    loop.scheduler.recount([])
    assert loop.scheduler._running.held == {"a": 3}


def fair_shares(demands: Mapping[str, int], num_rows: int) -> Counter[str]:
    """Max-min shares: each row goes to a caller with the fewest that wants one more."""
    shares = Counter[str]()
    for _ in range(num_rows):
        wanting = [caller for caller in demands if shares[caller] < demands[caller]]
        if wanting:
            shares[min(wanting, key=lambda caller: (shares[caller], caller))] += 1
    return shares


@settings(max_examples=25, deadline=None)
@given(
    waves=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=5),
    max_rows=st.integers(1, 7),
    spare_budget=st.integers(0, 20),
    depth=st.integers(0, 1),
)
def test_with_constant_demand_shares_come_within_one_of_fair_ones_and_then_nobody_gives_way(
    waves: list[tuple[str, int, int]], max_rows: int, spare_budget: int, depth: int
) -> None:
    """A wave is a caller, how many requests it sends at once, and when. None ends before the test does."""
    loop = Loop(make_store(32 * max_rows + 8, max_rows), max_rows + spare_budget, depth=depth)
    sequences = list[SequenceState]()
    for step in range(90):
        for index, (caller, count, delay) in enumerate(waves):
            if delay == step:
                names = [f"{index}-{number}" for number in range(count)]
                sequences += [loop.submit(name, 3, 110, terms=Terms(caller)) for name in names]
        loop.step()
        if step == 70:
            num_retractions = loop.scheduler.num_retractions
    assert loop.scheduler.num_retractions == num_retractions, "rows are taken back and forth"
    # Each wave moves a row at most once: what comes later may change who has too many.
    assert num_retractions <= max_rows * len(waves)
    assert all(sequence.num_retractions <= len(waves) for sequence in sequences)
    demands = Counter(sequence.caller for sequence in sequences)
    held = Counter(sequence.caller for sequence in loop.scheduler.running)
    fair = fair_shares(demands, max_rows)
    assert held.total() == fair.total()
    assert all(abs(held[caller] - fair[caller]) <= 1 for caller in demands), (held, fair)


def test_sixteen_clients_beside_a_flood_have_sixteen_rows_at_once_and_keep_them() -> None:
    loop = Loop(make_store(400, max_rows=32), budget=128)
    flood = flooded(loop, 100)
    others = [loop.submit(f"b{index}", 3, 20, terms=B) for index in range(12)]
    loop.step()
    assert Counter(sequence.caller for sequence in loop.scheduler.running) == {"a": 20, "b": 12}
    assert loop.scheduler.num_retractions == 12
    for _ in range(18):
        loop.step()
    assert all(sequence.num_generated == 19 for sequence in others), "none of them waits for a row"
    assert max(sequence.num_retractions for sequence in flood) == 1


workloads = st.lists(
    st.tuples(st.sampled_from("aaabc"), st.integers(1, 12), st.integers(1, 8), st.integers(0, 6), st.integers(0, 1)),
    min_size=1,
    max_size=12,
)
"""(caller, prompt length, tokens to generate, steps before it arrives, priority)."""


@settings(max_examples=80, deadline=None)
@given(
    workload=workloads,
    spare_pages=st.integers(0, 12),
    max_rows=st.integers(1, 4),
    spare_budget=st.integers(0, 12),
    caches=st.booleans(),
    depth=st.integers(0, 1),
)
def test_everything_ends_however_callers_push_each_other(
    workload: list[tuple[str, int, int, int, int]],
    spare_pages: int,
    max_rows: int,
    spare_budget: int,
    caches: bool,
    depth: int,
) -> None:
    longest = max(prompt_len + max_tokens - 1 for _, prompt_len, max_tokens, *_ in workload)
    store = make_store(-(-longest // PAGE_SIZE) + spare_pages, max_rows, longest)
    loop = Loop(store, max_rows + spare_budget, caches=caches, depth=depth)
    total = sum(prompt_len + max_tokens for _, prompt_len, max_tokens, *_ in workload)
    for step in range(total * 4 + 40):
        for index, (caller, prompt_len, max_tokens, delay, priority) in enumerate(workload):
            if delay == step:
                loop.submit(str(index), prompt_len, max_tokens, terms=Terms(caller, priority))
        loop.step()
        held = Counter(sequence.caller for sequence in loop.scheduler.running)
        assert loop.scheduler._running.held == held
    assert len(loop.finished) == len(workload)
    loop.assert_baseline()


def test_a_free_row_goes_to_the_caller_that_would_take_one_back() -> None:
    """Caller a sends short requests beside a long one; each leaves a row that caller c, which has used less, wants."""
    loop = Loop(make_store(200, max_rows=6), budget=32)
    for index in range(6):
        loop.submit(f"c{index}", 3, 60, terms=C)
    loop.submit("a", 3, 60, terms=A)
    for index in range(2):
        loop.submit(f"b{index}", 3, 60, terms=B)
    loop.scheduler._shares.charge("a", 1_000)
    loop.step()
    num_retractions = loop.scheduler.num_retractions
    for index in range(20):
        loop.submit(f"short {index}", 3, 1, terms=A)
        loop.step()
    assert loop.scheduler.num_retractions <= num_retractions + 1, "a row is taken for each short request"
