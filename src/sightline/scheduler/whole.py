"""Sequences that are computed whole: one step each, no pages. They take turns as other waiting sequences do."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sightline.scheduler.queue import WaitingQueue
from sightline.scheduler.sequence import SequenceState
from sightline.scheduler.shares import Shares


class WholeQueue:
    """Whole sequences, from submission until their step is over."""

    def __init__(self, max_rows: int, max_step_tokens: int) -> None:
        """A step has at most `max_rows` rows, and several rows have at most `max_step_tokens` tokens."""
        self._max_rows = max_rows
        self._max_step_tokens = max_step_tokens
        self._waiting = WaitingQueue()
        self._running: dict[SequenceState, None] = {}
        """Sequences whose step is scheduled or launched."""

    def __len__(self) -> int:
        """Number of sequences that wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[SequenceState]:
        """Waiting and running ones."""
        yield from self._waiting
        yield from self._running

    @property
    def running(self) -> Collection[SequenceState]:
        return self._running.keys()

    def add(self, sequence: SequenceState) -> None:
        self._waiting.add(sequence)

    def next_step(self, shares: Shares) -> list[SequenceState]:
        """Takes as many sequences in turn as a step holds. Returns the longest first: equal lengths are adjacent."""
        had = {caller: shares.of(caller) for caller in self._waiting.callers}
        chosen: list[SequenceState] = []
        num_tokens = 0
        for _, sequence in self._waiting.in_turn(had, {}):
            num_tokens += len(sequence.tokens)
            if len(chosen) == self._max_rows or (chosen and num_tokens > self._max_step_tokens):
                break
            chosen.append(sequence)
        for sequence in chosen:
            self._waiting.remove(sequence)
        self._running |= dict.fromkeys(chosen)
        return sorted(chosen, key=lambda each: len(each.tokens), reverse=True)

    def put_back(self, sequence: SequenceState) -> None:
        """Lets a sequence wait again whose step was not committed."""
        del self._running[sequence]
        sequence.restart()
        self._waiting.add(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Removes a sequence wherever it is. Idempotent."""
        self._running.pop(sequence, None)
        self._waiting.remove(sequence)

    def clear(self) -> None:
        """Forgets every sequence."""
        self._waiting = WaitingQueue()
        self._running.clear()
