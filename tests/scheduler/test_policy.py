"""A decision follows from the state alone, and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.core.request import Terms
from sightline.scheduler.costs import StepCosts, StepLimit
from sightline.scheduler.decision import Finding, Inquiry, SchedulerState
from sightline.scheduler.policy import decide as policy_decide
from sightline.scheduler.tally import HeldPage, Holding, LockedPage, Tally
from support.deciding import PAGE, Standing, decide, decide_by_asking, decoding, state, waiting_in
from support.scheduling import Loop, make_store


def test_decoding_rows_go_first_and_prompts_take_what_is_left() -> None:
    decision = decide(state([Standing(40, 8), decoding(), decoding()], budget=10))
    assert decision.rows == {2: 1, 3: 1, 1: 8}


def test_the_last_in_rank_gives_way_where_pages_are_missing() -> None:
    decision = decide(state([decoding(missing=True), decoding(), decoding()]))
    assert decision.retracted == (3,)
    assert decision.growth == {1: 1}
    assert decision.rows == {1: 1, 2: 1}
    assert decision.num_pages == 1


def test_a_higher_priority_number_gives_way_before_a_later_arrival() -> None:
    decision = decide(state([decoding(priority=3), decoding(missing=True), decoding()]))
    assert decision.retracted == (1,)


def test_what_is_reserved_and_unused_is_taken_before_anybody_gives_way() -> None:
    decision = decide(state([decoding(missing=True), decoding(num_spare=1)]))
    assert decision.retracted == ()
    assert decision.rows == {1: 1, 2: 1}


def test_who_is_in_flight_is_held_back_and_not_retracted() -> None:
    decision = decide(state([decoding(missing=True), decoding(num_steps=1)]))
    assert decision.retracted == ()
    assert decision.rows == {}, "the first has no page yet, the second gives its up when its step is over"


def test_the_only_one_that_runs_does_not_give_way_for_want_of_pages() -> None:
    decision = decide(state([decoding(missing=True)]))
    assert (decision.retracted, decision.rows) == ((), {})


def test_nobody_overtakes_one_that_cannot_be_let_in() -> None:
    decision = decide(state([], [Standing(40, 0), Standing(4, 0)], free=5, budget=64))
    assert decision.admitted == ()


def test_who_is_let_in_leaves_a_page_for_each_that_runs() -> None:
    running = [decoding(), decoding()]
    assert decide(state(running, [Standing(4, 0)], free=2)).admitted == ()
    assert decide(state(running, [Standing(4, 0)], free=3)).rows == {1: 1, 2: 1, 100: 4}


def test_urgency_takes_rows_and_pages_from_the_last_in_rank_only_where_that_is_enough() -> None:
    running = [decoding(9, priority=1), decoding(9, priority=1)]
    urgent = [Standing(8, 0)]
    assert decide(state(running, urgent, rows=0)).retracted == (2,)
    assert decide(state(running, urgent, rows=1)).retracted == (2,)
    hopeless = decide(state(running, [Standing(4 * 20, 0)], rows=1, budget=100))
    assert (hopeless.retracted, hopeless.rows) == ((), {1: 1, 2: 1})


LIMIT = StepLimit(20.0, StepCosts(logit=1.0, context=0.0), least=3)
"""Ten rows that generate, or nineteen tokens of a prompt and one of its logits."""


def limited(*standings: Standing, waiting: Sequence[Standing] = (), limit: StepLimit = LIMIT) -> dict[int, int]:
    """The rows of a step whose time is limited."""
    return dict(decide(replace(state(standings, waiting, free=99, budget=64), limit=limit)).rows)


def test_prompts_take_the_time_that_rows_that_generate_may_wait() -> None:
    prompt, scored = Standing(80, 0), Standing(80, 0, scored=True)
    assert limited(prompt) == {1: 64}, "nobody waits"
    assert limited(prompt, decoding()) == {2: 1, 1: 17}
    assert limited(scored, decoding()) == {2: 1, 1: 9}, "each token needs logits"
    assert limited(prompt, decoding(num_steps=1, num_computed=5)) == {1: 19}, "a row waits for a token in flight"
    assert limited(prompt, *[decoding()] * 12) == {**dict.fromkeys(range(2, 14), 1), 1: 3}, "the least"


def test_new_prompts_share_the_time_in_turn() -> None:
    assert limited(decoding(), waiting=[Standing(10, 0), Standing(30, 0)]) == {1: 1, 100: 10, 101: 6}
    assert limited(decoding(), waiting=[Standing(30, 0), Standing(10, 0)]) == {1: 1, 100: 17}
    assert limited(decoding(), waiting=[Standing(10, 0, scored=True), Standing(30, 0)]) == {1: 1, 100: 9}


def test_a_long_context_takes_its_time() -> None:
    far = StepLimit(20.0, StepCosts(logit=1.0, context=0.1), least=3)
    assert (
        limited(Standing(80, 0), Standing(1, 0), limit=far)[1] > limited(Standing(99, 19), Standing(1, 0), limit=far)[1]
    )


def test_urgency_waits_for_a_step_in_flight() -> None:
    decision = decide(state([decoding(priority=1, num_steps=1)], [Standing(4, 0)], rows=0))
    assert (decision.retracted, decision.admitted, decision.rows) == ((), (), {})


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


@settings(max_examples=120, deadline=None)
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
    before = deepcopy(given_state)
    decision = decide(given_state)
    assert decide(given_state) == decision
    assert given_state == before, "deciding changes nothing"
    scheduled = decision.rows
    assert sum(scheduled.values()) <= budget
    assert all(count > 0 for count in scheduled.values())
    retracted = decision.retracted
    gone = [each for each in given_state.running if each.arrival in retracted]
    assert not set(retracted) & scheduled.keys()
    assert all(sequence.num_steps == 0 for sequence in gone)
    assert len(decision.admitted) <= free_rows + len(retracted)
    unused = sum(each.num_unused for each in given_state.running if each.arrival not in retracted)
    given_back = sum(each.num_pages for each in gone)
    assert decision.num_pages <= free + unused + given_back, "only pages that there are"
    kept = [each for each in given_state.running if each.arrival not in retracted]
    assert all(
        each[:2] < victim[:2]
        for each in kept
        for victim in gone
        if each.num_steps == 0 and each.caller == victim.caller
    ), "of one caller, the last in rank"
    lacking = {each.arrival for each in kept if each.num_lacking > 0}
    assert lacking & scheduled.keys() <= decision.growth.keys()


pages = st.integers(1, 6)
"""Few, so that sequences share them."""
shared_pages = st.builds(
    lambda held, locked: Holding(
        tuple(HeldPage(page, owners) for page, owners in held.items()),
        tuple(LockedPage(page, owners, locks) for page, (owners, locks) in locked.items()),
    ),
    st.dictionaries(pages, st.integers(1, 3), max_size=4),
    st.dictionaries(pages, st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=3),
)


@settings(max_examples=120, deadline=None)
@given(
    running=st.lists(standings, max_size=6),
    waiting=st.lists(standings, max_size=6),
    free=st.integers(0, 12),
    free_rows=st.integers(0, 4),
    budget=st.integers(6, 40),
    data=st.data(),
)
def test_facts_that_are_told_when_asked_for_lead_to_the_decision_of_who_knew_them_all(
    running: list[Standing], waiting: list[Standing], free: int, free_rows: int, budget: int, data: st.DataObject
) -> None:
    known = state(running, waiting, free=free, rows=free_rows, budget=budget)
    forks = st.sampled_from([None, *(each.arrival for each in known.running)])
    findings = {
        each.arrival: Finding(
            tokens := data.draw(st.integers(0, each.num_tokens - 1)),
            tokens // PAGE,
            data.draw(forks),
            tuple(data.draw(st.lists(pages, max_size=tokens // PAGE, unique=True))),
        )
        for each in waiting_in(known)
    }
    known = replace(
        known,
        findings=findings,
        holdings={each.arrival: data.draw(shared_pages) for each in known.running},
        tally=replace(known.tally, idle=frozenset(data.draw(st.sets(pages)))),
    )
    before = deepcopy(known)
    decision, num_inquiries = decide_by_asking(known)
    assert decision == decide(known) == decide(known)
    assert known == before
    assert num_inquiries <= 1 + len(findings) + len(known.running)


def test_many_are_let_in_with_few_inquiries() -> None:
    crowd = [Standing(4, 0, caller=str(index % 3)) for index in range(64)]
    decision, num_inquiries = decide_by_asking(state([], crowd, free=640, rows=64, budget=1000))
    assert len(decision.admitted) == 64
    assert num_inquiries <= 8, "the number that is asked about doubles each time"


def assert_values(value: object) -> None:
    """Fails where something can be called, or can change."""
    if isinstance(value, dict):
        items: list[object] = [*value, *value.values()]
    elif isinstance(value, tuple | frozenset):
        items = list(value)
    elif is_dataclass(value):
        assert isinstance(value, SchedulerState | Tally), "of the classes with fields, these are frozen"
        items = [getattr(value, field.name) for field in fields(value)]
    else:
        assert value is None or isinstance(value, int | str), f"{value!r} is not a plain value"
        items = []
    for item in items:
        assert_values(item)


def test_a_state_is_made_of_values_that_stay_as_they_are_while_the_scheduler_goes_on() -> None:
    loop = Loop(make_store(9, 3), caches=True, depth=1)
    states: list[tuple[SchedulerState, SchedulerState]] = []
    num_inquiries = 0
    for step in range(40):
        if step % 3 == 0 and step < 24:
            loop.submit(str(step), 5 + step % 7, 6, terms=Terms("ab"[step % 2], priority=-(step % 4)))
        given_state = loop.scheduler._state()
        while isinstance(outcome := policy_decide(given_state), Inquiry):
            given_state = loop.scheduler._answer(outcome, given_state, {})
            num_inquiries += 1
        assert_values(given_state)
        states.append((given_state, deepcopy(given_state)))
        loop.step()
    assert num_inquiries > 10
    assert loop.scheduler.num_retractions > 0
    assert any(each.holdings for each, _ in states)
    assert all(each == before for each, before in states)
