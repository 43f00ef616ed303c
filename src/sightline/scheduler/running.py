"""Running sequences by rank, and the number of rows that each caller holds."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter

from sightline.scheduler.sequence import SequenceState


def _rank(sequence: SequenceState) -> tuple[int, int]:
    return sequence.rank


class RunningRows:
    """Running sequences."""

    def __init__(self) -> None:
        self.by_rank: list[SequenceState] = []
        self.held: dict[str, int] = {}
        """Rows per caller; callers without any are absent."""

    def add(self, sequence: SequenceState) -> None:
        insort(self.by_rank, sequence, key=_rank)
        self.held[sequence.caller] = self.held.get(sequence.caller, 0) + 1

    def remove(self, sequence: SequenceState) -> None:
        """Removes a sequence, if it is running."""
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
        """Repairs the counts after an interruption between two statements."""
        self.held = dict(Counter(sequence.caller for sequence in self.by_rank))
