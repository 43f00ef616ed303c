"""Sequences that are computed whole: one step each, no pages. They take turns as other waiting sequences do."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from itertools import islice

from sightline.core.batch import PADDING_ROW
from sightline.scheduler.costs import StepLimit
from sightline.scheduler.queue import WaitingQueue
from sightline.scheduler.sequence import Schedule, ScheduledRow, SequenceState
from sightline.scheduler.shares import Shares
from sightline.scheduler.turns import in_turn, usage_after


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

    def next_step(self, shares: Shares, limit: StepLimit | None = None) -> Schedule:
        """Takes as many sequences in turn as a step holds, and as may cost at most `limit`, but always one.

        The longest come first: equal lengths are adjacent.
        """
        chosen: list[SequenceState] = []
        num_tokens, work = 0, 0.0
        for sequence in self._in_turn(shares):
            count = len(sequence.tokens)
            num_tokens += count
            if limit is not None:
                work += limit.costs.work(count, 0, count if sequence.scores_prompt else 1)
            if chosen and (num_tokens > self._max_step_tokens or (limit is not None and work > limit.work)):
                break
            chosen.append(sequence)
        for sequence in chosen:
            self._waiting.remove(sequence)
        self._running |= dict.fromkeys(chosen)
        rows = [ScheduledRow(each, PADDING_ROW, 0, len(each.tokens), True, each.scores_prompt) for each in chosen]
        return Schedule(tuple(sorted(rows, key=lambda row: row.num_tokens, reverse=True)))

    def _in_turn(self, shares: Shares) -> list[SequenceState]:
        """Returns the next sequences in turn, by priority, as many as a step has rows."""
        levels = self._waiting.lines(self._max_rows)
        usage: Mapping[str, int] = {caller: shares.of(caller) for caller in self._waiting.urgencies}
        views = []
        for priority in sorted(levels):
            # Whole sequences leave their rows at once, so what counts beyond the first is tokens.
            turns = in_turn(priority, levels[priority], usage, {}, least_lead=math.inf)
            views += [view for _, view in islice(turns, self._max_rows)]
            if len(views) >= self._max_rows:
                break
            usage = usage_after(usage, levels[priority])
        return [self._waiting[view.arrival] for view in views[: self._max_rows]]

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
