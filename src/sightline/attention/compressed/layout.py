"""Which tokens of a step are summed, what becomes an entry, and which sums are kept.

    row    ...|-- window --|-- window --|- open     jobs: the tokens of each window that ends in the step,
               ^ context                 ^ kept           and those of the open window at each kept state

A job goes on from the sums that the row began with if its window was open then. Plain numbers: does not know tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from sightline.core.batch import Batch


class NewTokens(NamedTuple):
    """The new tokens of one row.

    |-- context --|-- length --|
    """

    row: int
    """Index in the batch."""
    place: int
    """Index among the rows of the step that have tokens."""
    first: int
    """Its first token in the step."""
    length: int
    context: int

    @property
    def stop(self) -> int:
        """Tokens of the row, context and new."""
        return self.context + self.length

    def token(self, position: int) -> int:
        """Index in the step of the row's token at a position."""
        return self.first + position - self.context


def row_parts(batch: Batch) -> tuple[NewTokens, ...]:
    """The rows that have tokens."""
    contexts, parts = batch.context_lens.exact(), list[NewTokens]()
    for row, (first, stop) in enumerate(pairwise(batch.query_offsets_host())):
        if stop > first:
            parts.append(NewTokens(row, len(parts), first, stop - first, contexts[row]))
    return tuple(parts)


class SumJob(NamedTuple):
    """Consecutive tokens of one window of a row."""

    first: int
    """The first token in the step."""
    length: int
    start: int
    """Index of the row whose sums it goes on from; the number of rows if it begins with none."""


class NewEntry(NamedTuple):
    """An entry whose window ends in the step."""

    job: int
    """The sums of its window."""
    before: int
    """With overlap, the sums of the window before: see `CompressionLayout.before`."""
    token: int
    """The token that completes it."""
    row: int
    """Index of its row among those with tokens."""


class KeptSums(NamedTuple):
    """The sums behind a token whose state is kept."""

    job: int | None
    """The sums of the open window; None if no token is in it."""
    before: int
    slot: int


@dataclass
class CompressionLayout:
    """The jobs of a step, and what is made of them.

    `before` of an entry or a kept state is a row's place, whose state has the sums, or the number of rows plus a job.
    """

    ratio: int
    num_rows: int
    jobs: list[SumJob] = field(default_factory=list)
    entries: list[NewEntry] = field(default_factory=list)
    kept: list[KeptSums] = field(default_factory=list)

    @staticmethod
    def of(ratio: int, rows: Sequence[NewTokens], kept: Sequence[int]) -> CompressionLayout:
        """`kept` has the slot of every token's state, 0 for none; it is empty if no state is kept."""
        layout = CompressionLayout(ratio, len(rows))
        for row in rows:
            layout._add_row(row, kept)
        return layout

    def _add_row(self, row: NewTokens, kept: Sequence[int]) -> None:
        open_window = row.context // self.ratio
        ended: dict[int, int] = {}
        for window in range(open_window, row.stop // self.ratio):
            ended[window] = job = self._job(row, window, (window + 1) * self.ratio)
            before = self._before(row, window, ended)
            self.entries.append(NewEntry(job, before, row.token((window + 1) * self.ratio - 1), row.place))
        for position in kept_positions(row, kept):
            window, stop = (position + 1) // self.ratio, position + 1
            is_open = stop > max(row.context, window * self.ratio)
            job_there = self._job(row, window, stop) if is_open else None
            self.kept.append(KeptSums(job_there, self._before(row, window, ended), kept[row.token(position)]))

    def _before(self, row: NewTokens, window: int, ended: dict[int, int]) -> int:
        return row.place if window - 1 not in ended else self.num_rows + ended[window - 1]

    def _job(self, row: NewTokens, window: int, stop: int) -> int:
        """Adds a job for the tokens of a window up to position `stop`; returns its index."""
        begin = window * self.ratio
        start = max(row.context, begin)
        self.jobs.append(SumJob(row.token(start), stop - start, row.place if row.context >= begin else self.num_rows))
        return len(self.jobs) - 1


def kept_positions(row: NewTokens, kept: Sequence[int]) -> Iterator[int]:
    """The positions of a row's tokens whose states are kept; see `CompressionLayout.of`."""
    return (row.context + place for place in range(row.length) if kept and kept[row.first + place])
