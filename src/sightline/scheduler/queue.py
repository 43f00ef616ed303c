"""The waiting queue, ordered by priority, then by how little the caller has used, then by arrival.

Within a priority, callers without a row come first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple

from sightline.scheduler.sequence import SequenceState


class QueuePosition(NamedTuple):
    """Sort key of a waiting sequence: the lowest comes first."""

    priority: int
    share: int
    """Tokens that its caller has used."""
    arrival: int


def _arrival(sequence: SequenceState) -> int:
    return sequence.arrival


class WaitingQueue:
    """Waiting sequences."""

    def __init__(self) -> None:
        self._levels: dict[int, dict[str, list[SequenceState]]] = {}
        """By priority and caller, each list by arrival."""
        self._callers: Counter[str] = Counter()
        """Number of waiting sequences per caller."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[SequenceState]:
        """All of them, in arbitrary order."""
        return (sequence for callers in self._levels.values() for line in callers.values() for sequence in line)

    @property
    def callers(self) -> Set[str]:
        return self._callers.keys()

    def add(self, sequence: SequenceState) -> None:
        """Inserts by arrival, which may be long ago."""
        callers = self._levels.setdefault(sequence.request.terms.priority, {})
        insort(callers.setdefault(sequence.caller, []), sequence, key=_arrival)
        self._callers[sequence.caller] += 1
        self._length += 1

    def remove(self, sequence: SequenceState) -> bool:
        """Removes a sequence; returns False if it was not in the queue."""
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
        """The lowest priority number in the queue."""
        return min(self._levels, default=None)

    def most_urgent_beside(self, held: Mapping[str, int]) -> int | None:
        """The lowest priority number among callers without a running row."""
        if self._callers.keys() <= held.keys():
            return None
        return min(priority for priority, callers in self._levels.items() if not callers.keys() <= held.keys())

    def in_turn(self, had: Mapping[str, int], held: Mapping[str, int]) -> Iterator[tuple[QueuePosition, SequenceState]]:
        """Yields sequences in turn, counting each one's prompt as its caller's usage, as if it were admitted.

        `had` is each caller's usage. Within a priority, each caller that holds no row goes before the others, with one
        sequence, in the turn of the first of all.
        """
        tokens = dict(had)
        for priority in sorted(self._levels):
            yield from self._level_in_turn(priority, tokens, held)

    def _level_in_turn(
        self, priority: int, tokens: dict[str, int], held: Mapping[str, int]
    ) -> Iterator[tuple[QueuePosition, SequenceState]]:
        callers = self._levels[priority]
        deprived: list[tuple[QueuePosition, str, int]] = []
        others: list[tuple[QueuePosition, str, int]] = []
        for caller, line in callers.items():
            heads = others if caller in held else deprived
            heads.append((QueuePosition(priority, tokens[caller], line[0].arrival), caller, 0))
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
                heapq.heappush(
                    others, (QueuePosition(priority, tokens[caller], line[place + 1].arrival), caller, place + 1)
                )
