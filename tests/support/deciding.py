"""States made of standings, for tests of what is decided: no store, no cache and no queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sightline.scheduler import policy
from sightline.scheduler.decision import (
    Decision,
    Finding,
    Inquiry,
    RunningSequence,
    SchedulerState,
    WaitingLines,
    WaitingSequence,
)
from sightline.scheduler.tally import HeldPage, Holding, Tally

PAGE = 4
NOTHING = Finding(0, 0, None, ())


@dataclass(frozen=True)
class Standing:
    """Where a sequence stands."""

    num_tokens: int
    num_computed: int
    num_spare: int = 0
    """Pages beyond its need."""
    missing: bool = False
    """It lacks a page for its next token."""
    priority: int = 0
    num_steps: int = 0
    caller: str = ""
    scored: bool = False

    def running(self, arrival: int) -> RunningSequence:
        num_lacking = 1 if self.missing else -self.num_spare
        return RunningSequence(
            self.priority,
            arrival,
            self.caller,
            num_pending=self.num_tokens - self.num_computed,
            num_pages=-(-self.num_tokens // PAGE) - num_lacking,
            num_lacking=num_lacking,
            num_steps=self.num_steps,
            scores_prompt=self.scored,
            context_len=self.num_computed,
        )

    def waiting(self, arrival: int) -> WaitingSequence:
        return WaitingSequence(
            self.priority,
            arrival,
            self.caller,
            self.num_tokens,
            was_admitted=False,
            scores_prompt=self.scored,
            leader=None,
        )


def state(
    running: Sequence[Standing], waiting: Sequence[Standing] = (), *, free: int = 0, rows: int = 8, budget: int = 16
) -> SchedulerState:
    """A state in which nothing is shared, and everything is known."""
    runs = sorted(standing.running(arrival) for arrival, standing in enumerate(running, 1))
    waits = [standing.waiting(arrival) for arrival, standing in enumerate(waiting, 100)]
    levels: dict[int, dict[str, tuple[WaitingSequence, ...]]] = {}
    for each in waits:
        lines = levels.setdefault(each.priority, {})
        lines[each.caller] = (*lines.get(each.caller, ()), each)
    pages = {each.arrival: [1000 * each.arrival + index for index in range(each.num_pages)] for each in runs}
    return SchedulerState(
        running=tuple(runs),
        held=Counter(each.caller for each in runs),
        shares={each.caller: 0 for each in runs},
        urgencies={
            each.caller: min(every.priority for every in waits if every.caller == each.caller) for each in waits
        },
        tally=Tally(free),
        num_free_rows=rows,
        page_size=PAGE,
        max_step_tokens=budget,
        max_scored_tokens=budget,
        waiting=WaitingLines(levels, {each.caller: 0 for each in waits}, frozenset()),
        findings={each.arrival: NOTHING for each in waits},
        holdings={arrival: Holding(tuple(HeldPage(page, 1) for page in own), ()) for arrival, own in pages.items()},
    )


def decide(state: SchedulerState) -> Decision:
    """The decision about a state in which everything is known."""
    outcome = policy.decide(state)
    assert isinstance(outcome, Decision), outcome
    return outcome


def decide_by_asking(known: SchedulerState) -> tuple[Decision, int]:
    """The decision where every fact is told only when it is asked for, and the number of inquiries."""
    state = replace(known, waiting=None, findings={}, holdings={})
    count = 0
    while isinstance(outcome := policy.decide(state), Inquiry):
        new = {arrival: known.findings[arrival] for arrival in outcome.findings}
        held = {arrival: known.holdings[arrival] for arrival in outcome.holdings}
        assert new.keys() - state.findings.keys() or held.keys() - state.holdings.keys() or outcome.waiting
        assert not (outcome.waiting and state.waiting), "it is asked once"
        state = replace(
            state,
            waiting=known.waiting if outcome.waiting else state.waiting,
            findings={**state.findings, **new},
            holdings={**state.holdings, **held},
        )
        count += 1
    return outcome, count


def decoding(num_tokens: int = 5, **changes: int | bool | str) -> Standing:
    standing = Standing(num_tokens, num_tokens - 1)
    return replace(standing, **changes)  # type: ignore[arg-type]


def waiting_in(state: SchedulerState) -> list[WaitingSequence]:
    assert state.waiting is not None
    return [each for lines in state.waiting.levels.values() for line in lines.values() for each in line]
