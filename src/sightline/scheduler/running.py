"""Who runs, by rank, and how many rows each caller holds."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter

from sightline.scheduler.sequence import SequenceState


def _rank(sequence: SequenceState) -> tuple[int, int]:
    return sequence.rank


class RunningRows:
    """Sequences that run."""

    def __init__(self) -> None:
        self.by_rank: list[SequenceState] = []
        self.held: dict[str, int] = {}
        """Rows by caller, of those that have any."""

    def add(self, sequence: SequenceState) -> None:
        insort(self.by_rank, sequence, key=_rank)
        self.held[sequence.caller] = self.held.get(sequence.caller, 0) + 1

    def remove(self, sequence: SequenceState) -> None:
        """Takes one out; one that does not run is no matter."""
        place = bisect_left(self.by_rank, sequence.rank, key=_rank)
        if place == len(self.by_rank) or self.by_rank[place] is not sequence:
            return
        del self.by_rank[place]
        left = self.held.pop(sequence.caller, 0) - 1
        if left > 0:
            self.held[sequence.caller] = left

    def clear(self) -> None:
        self.by_rank.clear()
        self.held.clear()

    def recount(self) -> None:
        """Puts right what an interruption between two lines left half done."""
        self.held = dict(Counter(sequence.caller for sequence in self.by_rank))
