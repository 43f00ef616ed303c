"""Which rows the next step computes.

Continuous batching under a token budget: running rows first, so that none stalls, then prompts in chunks, then new
requests in order of arrival. A request is admitted when there are pages for what it holds so far; what else is free is
reserved for it, so that its pages lie side by side, and taken back when somebody needs it. Whole pages of a cached
prefix are shared; cached pages that nobody uses give way. Where all that is not enough, the last to arrive is
retracted: it waits at its old place in the queue, and what it had is computed again or found in the cache.

Knows requests and pages; knows no tensor and no model.
"""

from __future__ import annotations

import itertools
from bisect import insort
from dataclasses import dataclass

from sightline.cache.pools import Bundle, CacheStore
from sightline.cache.prefix import PrefixCache
from sightline.core.errors import RequestError
from sightline.scheduler.sequence import Schedule, ScheduledRow, SequenceState


@dataclass
class _Room:
    """What a step has left."""

    num_tokens: int
    num_scored: int
    """Of the tokens, those that may all want logits."""

    def allows(self, sequence: SequenceState) -> bool:
        return self._limit(sequence) > 0

    def take(self, sequence: SequenceState) -> int:
        """As many of its pending tokens as there is room for, which is then taken."""
        count = min(sequence.num_pending, self._limit(sequence))
        self.num_tokens -= count
        if sequence.scores_prompt:
            self.num_scored -= count
        return count

    def _limit(self, sequence: SequenceState) -> int:
        return min(self.num_tokens, self.num_scored) if sequence.scores_prompt else self.num_tokens


class Scheduler:
    """Holds the queue and the running rows."""

    def __init__(
        self, store: CacheStore, prefixes: PrefixCache | None, max_step_tokens: int, max_scored_tokens: int
    ) -> None:
        """`max_scored_tokens` bounds the prompt tokens of a step that all want logits: each costs a vocabulary.

        Without `prefixes` nothing is shared and nothing outlives its request.
        """
        self._store = store
        self._prefixes = prefixes
        self._max_step_tokens = max_step_tokens
        self._max_scored_tokens = max_scored_tokens
        self._arrivals = itertools.count(1)
        self._waiting: list[SequenceState] = []
        """By arrival."""
        self._running: list[SequenceState] = []
        self.num_retractions = 0
        """Times that a running sequence had to give its pages back."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, sequence: SequenceState) -> None:
        """Adds a sequence at the end of the queue; one that could never end is refused."""
        needed = self._store.pages_for(sequence.max_len)
        if needed > self._store.num_usable_pages:
            raise RequestError(
                f"expected a request of at most {self._store.num_usable_pages} cache pages, got one that may need "
                f"{needed}; lower max_tokens or raise cache_tokens"
            )
        sequence.arrival = next(self._arrivals)
        self._waiting.append(sequence)

    def schedule(self) -> Schedule:
        """The next step's rows, which have pages for their new tokens."""
        self._give_pages()
        step = _Room(self._max_step_tokens, self._max_scored_tokens)
        rows = [
            self._row(sequence, step.take(sequence))
            for sequence in sorted(self._running, key=lambda running: running.num_pending > 1)
            if step.allows(sequence)
        ]
        for sequence in tuple(self._waiting):
            if self._awaits_leader(sequence):
                continue
            if not step.allows(sequence) or not self._admit(sequence):
                break
            rows.append(self._row(sequence, step.take(sequence)))
        return Schedule(tuple(rows))

    def commit(self, row: ScheduledRow, token: int | None) -> None:
        """The step went through: the row's new entries are in the cache, and `token` follows where it completes.

        The token comes first: an interruption between the two lines computes the entries again, and changes nothing.
        """
        if row.completes != (token is not None):
            raise ValueError(f"expected a token exactly where a row completes, got {token}")
        if token is not None:
            row.sequence.tokens.append(token)
        row.sequence.num_computed += row.num_tokens
        if token is not None:
            self._publish(row.sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Takes a sequence out, in whatever phase it is, and its pages back; one that is out already stays out."""
        for queue in (self._running, self._waiting):
            if sequence in queue:
                queue.remove(sequence)
        sequence.is_out = True
        self._release(sequence)

    def _row(self, sequence: SequenceState, count: int) -> ScheduledRow:
        """So many of a running sequence's pending tokens."""
        assert sequence.table_row is not None, "a running sequence has a row"
        assert sequence.num_pending > 0, "a running sequence has a token to compute"
        return ScheduledRow(sequence, sequence.table_row, count)

    def _give_pages(self) -> None:
        """Gives every running sequence pages for the tokens that it has; the last to arrive go without, and wait.

        The first to arrive can have all pages there are, and no request needs more: somebody always goes on.
        """
        for sequence in sorted(self._running, key=lambda running: running.arrival):
            while sequence.table_row is not None:
                missing = self._store.pages_for(len(sequence.tokens)) - self._store.row_pages(sequence.table_row)
                if missing <= 0:
                    break
                if self._make_room(missing):
                    self._store.grow_row(sequence.table_row, len(sequence.tokens))
                    break
                self._retract(max(self._running, key=lambda running: running.arrival))

    def _retract(self, sequence: SequenceState) -> None:
        """Back to its place in the queue, without pages."""
        self._running.remove(sequence)
        insort(self._waiting, sequence, key=lambda waiting: waiting.arrival)
        self._release(sequence)
        sequence.num_computed = 0
        self.num_retractions += 1

    def _release(self, sequence: SequenceState) -> None:
        if sequence.table_row is not None:
            if self._store.is_open(sequence.table_row):
                self._store.close_row(sequence.table_row)
            sequence.table_row = None
        self._unlock(sequence)

    def _awaits_leader(self, sequence: SequenceState) -> bool:
        """True where another continuation of the request is about to leave the prompt's pages in the cache."""
        leader = sequence.leader
        return self._prefixes is not None and leader is not None and not leader.is_out and leader.num_generated == 0

    def _admit(self, sequence: SequenceState) -> bool:
        """Gives a waiting sequence a row and pages for what it holds, if they are there or can be made free."""
        if self._store.num_free_rows == 0:
            return False
        shared: tuple[Bundle, ...] = ()
        if self._prefixes is not None:
            match = self._prefixes.match(sequence.request.namespace, self._reusable(sequence))
            sequence.prefix, shared = match.node, match.bundles
        needed = self._store.pages_for(len(sequence.tokens)) - len(shared)
        # A page more for each that runs: whoever is let in only to be retracted at the next step has computed in vain.
        if not self._has_room(needed + len(self._running)):
            self._unlock(sequence)
            return False
        self._make_room(needed)
        sequence.table_row = self._store.open_row()
        self._running.append(sequence)
        self._waiting.remove(sequence)
        self._store.adopt(sequence.table_row, shared)
        self._store.grow_row(sequence.table_row, self._reserved_len(sequence, len(shared)))
        sequence.num_prefix_pages = len(shared)
        sequence.num_computed = len(shared) * self._store.limits.page_size
        if not sequence.was_admitted:
            sequence.was_admitted, sequence.num_cached = True, sequence.num_computed
        return True

    def _reserved_len(self, sequence: SequenceState, num_shared: int) -> int:
        """Its whole length where that many pages are free: taken at once, they lie side by side."""
        whole = self._store.pages_for(sequence.max_len) - num_shared
        return sequence.max_len if whole <= self._store.num_free_pages else len(sequence.tokens)

    def _reusable(self, sequence: SequenceState) -> list[int]:
        """The tokens that need not be computed where they are cached: none whose logits are wanted."""
        return [] if sequence.scores_prompt else sequence.tokens[:-1]

    def _has_room(self, num_pages: int) -> bool:
        """True where so many pages are free or can be made free without retracting anybody."""
        evictable = 0 if self._prefixes is None else self._prefixes.num_evictable
        available = self._store.num_free_pages + evictable
        return num_pages <= available or num_pages <= available + sum(map(self._num_unused, self._running))

    def _num_unused(self, sequence: SequenceState) -> int:
        """Pages that a running sequence has and does not need yet."""
        assert sequence.table_row is not None, "a running sequence has a row"
        return max(0, self._store.row_pages(sequence.table_row) - self._store.pages_for(len(sequence.tokens)))

    def _make_room(self, num_pages: int) -> bool:
        """Makes pages free: first those that are reserved and unused, the last to arrive first, then cached ones."""
        for sequence in sorted(self._running, key=lambda running: -running.arrival):
            if self._store.num_free_pages >= num_pages:
                return True
            if self._num_unused(sequence) and sequence.table_row is not None:
                self._store.trim_row(sequence.table_row, len(sequence.tokens))
        if self._prefixes is not None and self._store.num_free_pages < num_pages:
            self._prefixes.evict(num_pages - self._store.num_free_pages)
        return self._store.num_free_pages >= num_pages

    def _publish(self, sequence: SequenceState) -> None:
        """Puts the pages that are whole and computed into the prefix cache: logits came of them, and were numbers."""
        if self._prefixes is None or sequence.prefix is None or sequence.table_row is None:
            return
        size = self._store.limits.page_size
        while (sequence.num_prefix_pages + 1) * size <= sequence.num_computed:
            index = sequence.num_prefix_pages
            tokens = sequence.tokens[index * size : (index + 1) * size]
            bundle = self._store.bundle(sequence.table_row, index)
            sequence.prefix = self._prefixes.extend(sequence.prefix, tokens, bundle)
            sequence.num_prefix_pages += 1

    def _unlock(self, sequence: SequenceState) -> None:
        if self._prefixes is not None and sequence.prefix is not None:
            node, sequence.prefix = sequence.prefix, None
            self._prefixes.unlock(node)
