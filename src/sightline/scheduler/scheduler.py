"""Which rows the next step computes.

Continuous batching under a token budget: running rows first, so that none stalls, then prompts in chunks, then new
requests in order of arrival. A request is admitted when the pages of its whole possible length are there, so that
what runs never runs out; pages of a prefix that is cached already are shared, and cached ones that nobody uses give
way. Knows requests and pages; knows no tensor and no model.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sightline.cache.pools import Bundle, CacheStore
from sightline.cache.prefix import PrefixCache, PrefixNode
from sightline.core.errors import RequestError
from sightline.core.request import Request


@dataclass(eq=False)
class SequenceState:
    """One running continuation of a request."""

    request: Request
    index: int = 0
    """Which of the request's continuations it is."""
    leader: SequenceState | None = None
    """The request's first continuation, for the others: its pages are theirs once its prompt is computed."""
    tokens: list[int] = field(init=False)
    """Prompt and generated."""
    num_computed: int = 0
    """Tokens whose entries are committed to the cache."""
    table_row: int | None = None
    """Its page-table row while it runs."""
    prefix: PrefixNode | None = None
    """The end of its pages that are in the prefix cache, locked, while it runs."""
    num_prefix_pages: int = 0
    """Pages up to there."""
    num_cached: int = 0
    """Tokens that it found in the cache when it was admitted."""
    is_out: bool = False
    """It was removed, for whatever reason."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def scores_prompt(self) -> bool:
        """True while the logits of prompt tokens still to compute are wanted; one continuation does it for all."""
        wanted = self.request.params.prompt_logprobs is not None and self.index == 0
        return wanted and self.num_computed < len(self.request.prompt_token_ids) - 1

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

    @property
    def num_logits(self) -> int:
        """How many of its last tokens want logits."""
        return self.num_tokens if self.sequence.scores_prompt else int(self.completes)


@dataclass(frozen=True)
class Schedule:
    """The rows of one step, in order."""

    rows: tuple[ScheduledRow, ...]


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
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, sequence: SequenceState) -> None:
        """Adds a sequence at the end of the queue; one that could never start is refused."""
        needed = self._store.pages_for(sequence.max_len)
        if needed > self._store.num_usable_pages:
            raise RequestError(
                f"expected a request of at most {self._store.num_usable_pages} cache pages, got one that may need "
                f"{needed}; lower max_tokens or raise cache_tokens"
            )
        self._waiting.append(sequence)

    def schedule(self) -> Schedule:
        """The next step's rows, which have pages for their new tokens."""
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
        if sequence.table_row is not None:
            if self._store.is_open(sequence.table_row):
                self._store.close_row(sequence.table_row)
            sequence.table_row = None
        self._unlock(sequence)

    def _row(self, sequence: SequenceState, count: int) -> ScheduledRow:
        """So many of a running sequence's pending tokens."""
        assert sequence.table_row is not None, "a running sequence has a row"
        assert sequence.num_pending > 0, "a running sequence has a token to compute"
        return ScheduledRow(sequence, sequence.table_row, count)

    def _awaits_leader(self, sequence: SequenceState) -> bool:
        """True where another continuation of the request is about to leave the prompt's pages in the cache."""
        leader = sequence.leader
        return self._prefixes is not None and leader is not None and not leader.is_out and leader.num_generated == 0

    def _admit(self, sequence: SequenceState) -> bool:
        """Gives a waiting sequence a row and pages for its whole length, if they are there or can be made free."""
        shared: tuple[Bundle, ...] = ()
        if self._prefixes is not None:
            match = self._prefixes.match(sequence.request.namespace, self._reusable(sequence))
            sequence.prefix, shared = match.node, match.bundles
        needed = self._store.pages_for(sequence.max_len) - len(shared)
        if self._store.num_free_rows == 0 or not self._make_room(needed):
            self._unlock(sequence)
            return False
        sequence.table_row = self._store.open_row()
        self._running.append(sequence)
        self._waiting.remove(sequence)
        self._store.adopt(sequence.table_row, shared)
        # Its whole length is reserved: taken at once, its pages lie side by side wherever the free ones do.
        self._store.grow_row(sequence.table_row, sequence.max_len)
        sequence.num_prefix_pages = len(shared)
        sequence.num_computed = sequence.num_cached = len(shared) * self._store.limits.page_size
        return True

    def _reusable(self, sequence: SequenceState) -> list[int]:
        """The tokens that need not be computed where they are cached: none whose logits are wanted."""
        return [] if sequence.scores_prompt else sequence.tokens[:-1]

    def _make_room(self, num_pages: int) -> bool:
        """True where so many pages are free, after cached ones that nobody uses have given way."""
        missing = num_pages - self._store.num_free_pages
        if missing <= 0:
            return True
        if self._prefixes is None or missing > self._prefixes.num_evictable:
            return False
        self._prefixes.evict(missing)
        return num_pages <= self._store.num_free_pages

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
