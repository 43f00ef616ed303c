"""The waiting sequences, by priority, caller and arrival. Does not know whose turn it is."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping

from sightline.scheduler.decision import WaitingSequence
from sightline.scheduler.sequence import SequenceState


def _arrival(sequence: WaitingSequence) -> int:
    return sequence.arrival


class WaitingQueue:
    """Waiting sequences."""

    def __init__(self) -> None:
        self._sequences: dict[int, SequenceState] = {}
        """By arrival."""
        self._levels: dict[int, dict[str, list[WaitingSequence]]] = {}
        """By priority and caller, each list by arrival."""
        self._urgencies: dict[str, int] = {}
        self._leaders: Counter[SequenceState] = Counter()
        """How many waiting sequences follow each leader."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SequenceState]:
        """All of them, in arbitrary order."""
        return iter(self._sequences.values())

    def __getitem__(self, arrival: int) -> SequenceState:
        return self._sequences[arrival]

    @property
    def urgencies(self) -> Mapping[str, int]:
        """The lowest priority number per caller."""
        return self._urgencies

    def add(self, sequence: SequenceState) -> None:
        """Inserts by arrival, which may be long ago. Its tokens stay as they are while it waits."""
        caller, (priority, arrival), leader = sequence.caller, sequence.rank, sequence.leader
        self._sequences[arrival] = sequence
        view = WaitingSequence(
            priority,
            arrival,
            caller,
            num_tokens=len(sequence.tokens),
            was_admitted=sequence.was_admitted,
            scores_prompt=sequence.wants_scores,
            leader=None if leader is None else leader.arrival,
        )
        insort(self._levels.setdefault(priority, {}).setdefault(caller, []), view, key=_arrival)
        self._urgencies[caller] = min(priority, self._urgencies.get(caller, priority))
        if leader is not None:
            self._leaders[leader] += 1

    def remove(self, sequence: SequenceState) -> bool:
        """Removes a sequence; returns False if it was not in the queue."""
        caller, (priority, arrival), leader = sequence.caller, sequence.rank, sequence.leader
        if self._sequences.get(arrival) is not sequence:
            return False
        callers = self._levels.get(priority, {})
        line = callers.get(caller, [])
        place = bisect_left(line, arrival, key=_arrival)
        if place < len(line) and line[place].arrival == arrival:
            del line[place]
        if not line:
            callers.pop(caller, None)
        if not callers:
            self._levels.pop(priority, None)
        self._urgencies.pop(caller, None)
        levels = [level for level, waiting in self._levels.items() if caller in waiting]
        if levels:
            self._urgencies[caller] = min(levels)
        if leader is not None:
            self._leaders[leader] -= 1
            if not self._leaders[leader]:
                del self._leaders[leader]
        del self._sequences[arrival]
        return True

    def first_untouched(self) -> SequenceState | None:
        """The most urgent request of which nothing was ever computed; None if there is none."""
        untouched = (each for each in self._sequences.values() if each.leader is None and not each.was_admitted)
        return min(untouched, key=lambda each: each.rank, default=None)

    def take(self, first: SequenceState) -> tuple[SequenceState, ...]:
        """Removes all sequences of a request, and returns them, the first one first."""
        others = [each for each in self._sequences.values() if each.leader is first]
        found = (first, *sorted(others, key=lambda each: each.index))
        for each in found:
            self.remove(each)
        return found

    def has_followers(self, leader: SequenceState) -> bool:
        """True if other continuations of a sequence's prompt wait."""
        return leader in self._leaders

    def busy_leaders(self) -> Mapping[int, int]:
        """Leaders that compute their prompt, and how many waiting sequences follow each."""
        return {
            leader.arrival: count
            for leader, count in self._leaders.items()
            if not leader.is_out and not leader.is_paused and leader.num_generated == 0
        }

    def lines(self, depth: int) -> Mapping[int, Mapping[str, tuple[WaitingSequence, ...]]]:
        """The first `depth` sequences of each line, by priority and caller."""
        return {
            priority: {caller: tuple(line[:depth]) for caller, line in callers.items()}
            for priority, callers in self._levels.items()
        }
