"""Which rows the next step computes.

Continuous batching under a token budget: running rows first, so that none stalls, then prompts in chunks, then new
requests in order of arrival. A request is admitted when the pages of its whole possible length are there, so that
what runs never runs out. Knows requests and pages; knows no tensor and no model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from sightline.cache.pools import CacheStore
from sightline.core.request import Request


@dataclass(eq=False)
class SequenceState:
    """One running continuation of a request."""

    request: Request
    tokens: list[int] = field(init=False)
    """Prompt and generated."""
    num_computed: int = 0
    """Tokens whose entries are committed to the cache."""
    table_row: int | None = None
    """Its page-table row while it runs."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def max_len(self) -> int:
        """Tokens that it may ever hold in the cache; the last one generated is never run."""
        return len(self.request.prompt_token_ids) + self.request.params.max_tokens - 1


@dataclass(frozen=True, eq=False)
class ScheduledRow:
    """A sequence and how many of its pending tokens the step computes."""

    sequence: SequenceState
    table_row: int
    num_tokens: int

    @property
    def completes(self) -> bool:
        """True where the step computes its last pending token: the next one can be sampled."""
        return self.num_tokens == self.sequence.num_pending


@dataclass(frozen=True)
class Schedule:
    """The rows of one step, in order."""

    rows: tuple[ScheduledRow, ...]


class Scheduler:
    """Holds the queue and the running rows."""

    def __init__(self, store: CacheStore, max_step_tokens: int) -> None:
        self._store = store
        self._max_step_tokens = max_step_tokens
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, sequence: SequenceState) -> None:
        """Adds a sequence at the end of the queue."""
        self._waiting.append(sequence)

    def schedule(self) -> Schedule:
        """The next step's rows, with pages for their new tokens."""
        budget = self._max_step_tokens
        decoding = [sequence for sequence in self._running if sequence.num_pending == 1]
        prefilling = [sequence for sequence in self._running if sequence.num_pending > 1]
        rows: list[ScheduledRow] = []
        for sequence in (*decoding, *prefilling, *self._admissible()):
            count = min(sequence.num_pending, budget)
            if count == 0:
                break
            rows.append(ScheduledRow(sequence, self._start(sequence), count))
            budget -= count
        for row in rows:
            self._store.grow_row(row.table_row, row.sequence.num_computed + row.num_tokens)
        return Schedule(tuple(rows))

    def commit(self, row: ScheduledRow) -> None:
        """The step went through: the row's new entries are in the cache for good."""
        row.sequence.num_computed += row.num_tokens

    def remove(self, sequence: SequenceState) -> None:
        """Takes a sequence out, in whatever phase it is, and its pages back."""
        if sequence.table_row is None:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
        self._store.close_row(sequence.table_row)
        sequence.table_row = None

    def _admissible(self) -> Iterable[SequenceState]:
        """Waiting sequences, in order, while rows and pages for their whole length are there."""
        reserved = sum(self._store.pages_for(sequence.max_len) for sequence in self._running)
        free_rows = self._store.num_free_rows
        for sequence in tuple(self._waiting):
            reserved += self._store.pages_for(sequence.max_len)
            if free_rows == 0 or reserved > self._store.num_usable_pages:
                return
            free_rows -= 1
            yield sequence

    def _start(self, sequence: SequenceState) -> int:
        """The sequence's row; one that waited gets it now."""
        if sequence.table_row is None:
            self._waiting.remove(sequence)
            self._running.append(sequence)
            sequence.table_row = self._store.open_row()
        return sequence.table_row
