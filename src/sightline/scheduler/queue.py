"""Who waits, and in which order they come up: by priority, then by how little their caller has had, then by arrival.

Of one priority, callers without a row come up first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple

from sightline.scheduler.sequence import SequenceState


class Turn(NamedTuple):
    """When a sequence comes up: the lowest first."""

    priority: int
    share: int
    """What its caller has had, in tokens."""
    arrival: int


def _arrival(sequence: SequenceState) -> int:
    return sequence.arrival


class WaitingQueue:
    """Sequences that wait."""

    def __init__(self) -> None:
        self._levels: dict[int, dict[str, list[SequenceState]]] = {}
        """By priority and caller, each by arrival."""
        self._callers: Counter[str] = Counter()
        """How many wait of each."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[SequenceState]:
        """All of them, in no order that means anything."""
        return (sequence for callers in self._levels.values() for line in callers.values() for sequence in line)

    @property
    def callers(self) -> Set[str]:
        return self._callers.keys()

    def add(self, sequence: SequenceState) -> None:
        """At the place of its arrival, which may be long ago."""
        callers = self._levels.setdefault(sequence.request.terms.priority, {})
        insort(callers.setdefault(sequence.caller, []), sequence, key=_arrival)
        self._callers[sequence.caller] += 1
        self._length += 1

    def remove(self, sequence: SequenceState) -> bool:
        """Takes one out; False where it was not there."""
        priority = sequence.request.terms.priority
        callers = self._levels.get(priority, {})
        line = callers.get(sequence.caller, [])
        place = bisect_left(line, sequence.arrival, key=_arrival)
        if place == len(line) or line[place] is not sequence:
            return False
        del line[place]
        self._length -= 1
        self._callers[sequence.caller] -= 1
        if not self._callers[sequence.caller]:
            del self._callers[sequence.caller]
        if not line:
            del callers[sequence.caller]
        if not callers:
            del self._levels[priority]
        return True

    @property
    def most_urgent(self) -> int | None:
        """The lowest priority number of those that wait."""
        return min(self._levels, default=None)

    def most_urgent_beside(self, held: Mapping[str, int]) -> int | None:
        """The lowest priority number of those whose callers hold nothing."""
        if self._callers.keys() <= held.keys():
            return None
        return min(priority for priority, callers in self._levels.items() if not callers.keys() <= held.keys())

    def in_turn(self, had: Mapping[str, int], held: Mapping[str, int]) -> Iterator[tuple[Turn, SequenceState]]:
        """From the next on, as if each that is passed were let in: its prompt then counts as its caller's.

        `had` tells what every caller has had. Callers that hold nothing when a priority comes up go before the others
        there, each with one, in the turn of the first of all.
        """
        tokens = dict(had)
        for priority in sorted(self._levels):
            yield from self._level_in_turn(priority, tokens, held)

    def _level_in_turn(
        self, priority: int, tokens: dict[str, int], held: Mapping[str, int]
    ) -> Iterator[tuple[Turn, SequenceState]]:
        callers = self._levels[priority]
        deprived: list[tuple[Turn, str, int]] = []
        others: list[tuple[Turn, str, int]] = []
        for caller, line in callers.items():
            heads = others if caller in held else deprived
            heads.append((Turn(priority, tokens[caller], line[0].arrival), caller, 0))
        heapq.heapify(deprived)
        heapq.heapify(others)
        while deprived or others:
            turn = min(heads[0][0] for heads in (deprived, others) if heads)
            _, caller, place = heapq.heappop(deprived or others)
            line = callers[caller]
            yield turn, line[place]
            if not line[place].was_admitted:
                tokens[caller] += len(line[place].tokens)
            if place + 1 < len(line):
                heapq.heappush(others, (Turn(priority, tokens[caller], line[place + 1].arrival), caller, place + 1))
