"""States made of standings, for tests of what is decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sightline.cache.prefix import PrefixMatch
from sightline.core.request import EffectiveParams, Request, Terms
from sightline.scheduler.decision import Decision, Finding, State
from sightline.scheduler.queue import WaitingQueue
from sightline.scheduler.sequence import SequenceState

PAGE = 4
NOTHING = Finding(None, None, 0, 0)


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


@dataclass
class Count:
    """A tally where nothing is shared."""

    num_pages: int

    def copy(self) -> Count:
        return replace(self)

    def cost(self, match: PrefixMatch | None) -> int:
        return 0

    def share(self, match: PrefixMatch | None) -> None:
        assert match is None

    def retract(self, sequence: SequenceState) -> None:
        self.num_pages += sequence.num_pages


def make(arrival: int, standing: Standing, *, running: bool) -> SequenceState:
    params = EffectiveParams(0.0, 1.0, 0, 0.0, 0, 1000, frozenset(), True)
    terms = Terms(standing.caller, standing.priority)
    sequence = SequenceState(Request(str(arrival), None, tuple(range(standing.num_tokens)), params.needs, terms))
    sequence.arrival, sequence.rank = arrival, (standing.priority, arrival)
    if running:
        sequence.table_row = arrival
        sequence.num_computed = sequence.num_scheduled = standing.num_computed
        sequence.num_steps = standing.num_steps
        needed = -(-standing.num_tokens // PAGE)
        sequence.num_pages = needed - 1 if standing.missing else needed + standing.num_spare
    return sequence


def state(
    running: Sequence[Standing], waiting: Sequence[Standing] = (), *, free: int = 0, rows: int = 8, budget: int = 16
) -> State:
    runs = [make(index, standing, running=True) for index, standing in enumerate(running, 1)]
    waits = [make(index, standing, running=False) for index, standing in enumerate(waiting, 100)]
    queue, had = WaitingQueue(), {each.caller: 0 for each in waits}
    for each in waits:
        queue.add(each)
    return State(
        running=sorted(runs, key=lambda each: each.rank),
        held=Counter(each.caller for each in runs),
        waiting=lambda held: queue.in_turn(had, held),
        most_urgent=queue.most_urgent,
        most_urgent_beside=queue.most_urgent_beside,
        share=lambda caller: 0,
        find=lambda sequence: NOTHING,
        tally=lambda: Count(free),
        num_free_rows=rows,
        page_size=PAGE,
        max_step_tokens=budget,
        max_scored_tokens=budget,
    )


def names(sequences: Sequence[SequenceState]) -> list[int]:
    return [sequence.arrival for sequence in sequences]


def rows(decision: Decision) -> dict[int, int]:
    return {sequence.arrival: count for sequence, count in decision.rows}


def decoding(num_tokens: int = 5, **changes: int | bool | str) -> Standing:
    standing = Standing(num_tokens, num_tokens - 1)
    return replace(standing, **changes)  # type: ignore[arg-type]


def waiting_in(state: State) -> list[SequenceState]:
    return [sequence for _, sequence in state.waiting(state.held)]
