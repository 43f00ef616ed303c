"""Running sequences by rank, and the number of rows that each caller holds."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from functools import partial

from sightline.scheduler.decision import RunningSequence
from sightline.scheduler.sequence import SequenceState


def _rank(sequence: SequenceState) -> tuple[int, int]:
    return sequence.rank


class RunningRows:
    """Running sequences."""

    def __init__(self) -> None:
        self.by_rank: list[SequenceState] = []
        self.by_arrival: dict[int, SequenceState] = {}
        self.held: dict[str, int] = {}
        """Rows per caller; callers without any are absent."""

    def add(self, sequence: SequenceState) -> None:
        insort(self.by_rank, sequence, key=_rank)
        self.by_arrival[sequence.arrival] = sequence
        self.held[sequence.caller] = self.held.get(sequence.caller, 0) + 1

    def remove(self, sequence: SequenceState) -> None:
        """Removes a sequence, if it is running."""
        place = bisect_left(self.by_rank, sequence.rank, key=_rank)
        if place == len(self.by_rank) or self.by_rank[place] is not sequence:
            return
        del self.by_rank[place]
        self.by_arrival.pop(sequence.arrival, None)
        left = self.held.pop(sequence.caller, 0) - 1
        if left > 0:
            self.held[sequence.caller] = left

    def clear(self) -> None:
        self.by_rank.clear()
        self.by_arrival.clear()
        self.held.clear()

    def recount(self) -> None:
        """Repairs the counts after an interruption between two statements."""
        self.by_arrival = {sequence.arrival: sequence for sequence in self.by_rank}
        self.held = dict(Counter(sequence.caller for sequence in self.by_rank))

    def views(self, page_size: int) -> tuple[RunningSequence, ...]:
        """The state of every sequence, by rank."""
        # One per row per step: `tuple.__new__` takes half the time of the constructor.
        facts = [
            (
                each.rank[0],
                each.arrival,
                each.caller,
                pending := each.num_expected - each.num_scheduled
                if (not each.num_steps and each.returning is None) or each.is_ready
                else 0,
                each.num_pages,
                -(-each.num_expected // page_size) - each.num_pages,
                each.num_steps,
                pending > 1 and each.scores_prompt,
                each.num_scheduled,
            )
            for each in self.by_rank
        ]
        return tuple(map(partial(tuple.__new__, RunningSequence), facts))
