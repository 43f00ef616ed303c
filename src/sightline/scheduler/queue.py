"""Who waits, and in which order they come up: by priority, then by how little their caller has had, then by arrival."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
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
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[SequenceState]:
        """All of them, in no order that means anything."""
        return (sequence for callers in self._levels.values() for line in callers.values() for sequence in line)

    @property
    def callers(self) -> set[str]:
        return {caller for callers in self._levels.values() for caller in callers}

    def add(self, sequence: SequenceState) -> None:
        """At the place of its arrival, which may be long ago."""
        callers = self._levels.setdefault(sequence.request.terms.priority, {})
        insort(callers.setdefault(sequence.caller, []), sequence, key=_arrival)
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
        if not line:
            del callers[sequence.caller]
        if not callers:
            del self._levels[priority]
        return True

    @property
    def most_urgent(self) -> int | None:
        """The lowest priority number of those that wait."""
        return min(self._levels, default=None)

    def in_turn(self, had: Mapping[str, int]) -> Iterator[tuple[Turn, SequenceState]]:
        """From the next on, as if each that is passed were let in: its prompt then counts as its caller's.

        `had` tells what every caller has had.
        """
        tokens = dict(had)
        for priority in sorted(self._levels):
            callers = self._levels[priority]
            heads = []
            for caller, line in callers.items():
                heads.append((Turn(priority, tokens[caller], line[0].arrival), caller, 0))
            heapq.heapify(heads)
            while heads:
                turn, caller, place = heads[0]
                line = callers[caller]
                sequence = line[place]
                yield turn, sequence
                if not sequence.was_admitted:
                    tokens[caller] += len(sequence.tokens)
                if place + 1 < len(line):
                    following = Turn(priority, tokens[caller], line[place + 1].arrival)
                    heapq.heapreplace(heads, (following, caller, place + 1))
                else:
                    heapq.heappop(heads)
