"""A decision follows from the state alone, and changes nothing."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.scheduler.decision import State
from sightline.scheduler.policy import decide
from support.deciding import PAGE, Standing, decoding, names, rows, state, waiting_in


def test_decoding_rows_go_first_and_prompts_take_what_is_left() -> None:
    decision = decide(state([Standing(40, 8), decoding(), decoding()], budget=10))
    assert rows(decision) == {2: 1, 3: 1, 1: 8}


def test_the_last_in_rank_gives_way_where_pages_are_missing() -> None:
    decision = decide(state([decoding(missing=True), decoding(), decoding()]))
    assert names(decision.retracted) == [3]
    assert dict(decision.growth) == {decision.growth[0][0]: 1}
    assert rows(decision) == {1: 1, 2: 1}
    assert decision.num_pages == 1


def test_a_higher_priority_number_gives_way_before_a_later_arrival() -> None:
    decision = decide(state([decoding(priority=3), decoding(missing=True), decoding()]))
    assert names(decision.retracted) == [1]


def test_what_is_reserved_and_unused_is_taken_before_anybody_gives_way() -> None:
    decision = decide(state([decoding(missing=True), decoding(num_spare=1)]))
    assert decision.retracted == ()
    assert rows(decision) == {1: 1, 2: 1}


def test_who_is_in_flight_is_held_back_and_not_retracted() -> None:
    decision = decide(state([decoding(missing=True), decoding(num_steps=1)]))
    assert decision.retracted == ()
    assert rows(decision) == {}, "the first has no page yet, the second gives its up when its step is over"


def test_the_only_one_that_runs_does_not_give_way_for_want_of_pages() -> None:
    decision = decide(state([decoding(missing=True)]))
    assert (decision.retracted, rows(decision)) == ((), {})


def test_nobody_overtakes_one_that_cannot_be_let_in() -> None:
    decision = decide(state([], [Standing(40, 0), Standing(4, 0)], free=5, budget=64))
    assert decision.admitted == ()


def test_who_is_let_in_leaves_a_page_for_each_that_runs() -> None:
    running = [decoding(), decoding()]
    assert decide(state(running, [Standing(4, 0)], free=2)).admitted == ()
    assert rows(decide(state(running, [Standing(4, 0)], free=3))) == {1: 1, 2: 1, 100: 4}


def test_urgency_takes_rows_and_pages_from_the_last_in_rank_only_where_that_is_enough() -> None:
    running = [decoding(9, priority=1), decoding(9, priority=1)]
    urgent = [Standing(8, 0)]
    assert names(decide(state(running, urgent, rows=0)).retracted) == [2]
    assert names(decide(state(running, urgent, rows=1)).retracted) == [2]
    hopeless = decide(state(running, [Standing(4 * 20, 0)], rows=1, budget=100))
    assert (hopeless.retracted, rows(hopeless)) == ((), {1: 1, 2: 1})


def test_urgency_waits_for_a_step_in_flight() -> None:
    decision = decide(state([decoding(priority=1, num_steps=1)], [Standing(4, 0)], rows=0))
    assert (decision.retracted, decision.admitted, rows(decision)) == ((), (), {})


standings = st.builds(
    lambda tokens, pending, spare, missing, priority, steps, caller: Standing(
        tokens, tokens - min(pending, tokens), spare, missing and spare == 0, priority, steps, caller
    ),
    st.integers(1, 30),
    st.sampled_from([1, 1, 1, 5, 20]),
    st.integers(0, 2),
    st.booleans(),
    st.integers(-1, 1),
    st.integers(0, 1),
    st.sampled_from("aaab"),
)


def snapshot(state: State) -> list[list[object]]:
    sequences = [*state.running, *waiting_in(state)]
    return [[getattr(sequence, field.name) for field in fields(sequence)] for sequence in sequences]


@settings(max_examples=300, deadline=None)
@given(
    running=st.lists(standings, max_size=6),
    waiting=st.lists(standings, max_size=5),
    free=st.integers(0, 12),
    free_rows=st.integers(0, 4),
    budget=st.integers(6, 40),
)
def test_a_decision_is_a_function_of_the_state_and_keeps_every_bound(
    running: list[Standing], waiting: list[Standing], free: int, free_rows: int, budget: int
) -> None:
    given_state = state(running, waiting, free=free, rows=free_rows, budget=budget)
    before = snapshot(given_state)
    decision = decide(given_state)
    assert decide(given_state) == decision
    assert snapshot(given_state) == before, "deciding changes nothing"
    scheduled = rows(decision)
    assert sum(scheduled.values()) <= budget
    assert all(count > 0 for count in scheduled.values())
    retracted = names(decision.retracted)
    assert not set(retracted) & scheduled.keys()
    assert all(sequence.num_steps == 0 for sequence in decision.retracted)
    assert len(decision.admitted) <= free_rows + len(retracted)
    unused = sum(
        max(0, each.num_pages - -(-each.num_expected // PAGE))
        for each in given_state.running
        if each.arrival not in retracted
    )
    given_back = sum(each.num_pages for each in decision.retracted)
    assert decision.num_pages <= free + unused + given_back, "only pages that there are"
    kept = [each for each in given_state.running if each.arrival not in retracted]
    assert all(
        each.rank < gone.rank
        for each in kept
        for gone in decision.retracted
        if each.num_steps == 0 and each.caller == gone.caller
    ), "of one caller, the last in rank"
    lacking = {each.arrival for each in kept if each.num_pages * PAGE < each.num_expected}
    assert lacking & scheduled.keys() <= {each.arrival for each, _ in decision.growth}
