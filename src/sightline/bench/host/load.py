"""A scheduler under load, without a model: a cache full of prefixes, rows that decode, and as many that wait.

    |---- prefixes, oldest first ----|-- one long prompt --|-- rows --|
    |--------------------------- every page ---------------------------|

A cached prefix is a prompt of `PREFIX_PAGES` pages that no other prefix shares. No page is free, as in an engine that
has run for a while: a row grows by evicting a page, and publishes each page that it has filled. The cache starts with
more prefixes than asked for, because rows evict some; the requested number stays until the end.

Checks what the scheduler did. Does not know clocks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch

from sightline.cache.pools import Bundle, CacheLimits
from sightline.cache.prefix import PrefixCache, PrefixMatch
from sightline.cache.spec import GroupCacheSpec, PlaneSpec, PoolSpec
from sightline.cache.store import CacheStore
from sightline.core.config import PADDING_PAGES
from sightline.core.errors import SightlineError
from sightline.core.request import EffectiveParams, Request, Terms
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import RowResult, ScheduledRow, SequenceState

PAGE_SIZE = 16
PREFIX_PAGES = 4
NUM_CALLERS = 8
"""Callers that share the requests and prefixes; each has its own prefix tree."""
LONG_PROMPT = 8192
"""Length of the prompt to look up."""
_PROMPT_LENGTHS = (128, 512)
_STEP_TOKENS = 8192
_VOCAB = 1 << 16
_POOL = PoolSpec("kv", (PlaneSpec("k", (1,), torch.uint8),), num_layers=1)


@dataclass(frozen=True)
class Load:
    """The size of a load."""

    rows: int
    """Running rows; as many more wait."""
    prefixes: int
    """Prefixes that stay cached until the end, besides those of the rows."""
    num_steps: int
    """Number of decode steps."""

    @property
    def max_tokens(self) -> int:
        """Tokens that a row may generate: it decodes while others are read, and must not end before the last step."""
        reading_steps = -(-self.rows * _PROMPT_LENGTHS[1] // _STEP_TOKENS)
        return 2 * reading_steps + self.num_steps + 2

    @property
    def max_len(self) -> int:
        return _PROMPT_LENGTHS[1] + self.max_tokens

    @property
    def num_prefixes(self) -> int:
        """Prefixes that are cached at first; the rows evict the oldest."""
        return self.prefixes + -(-self.rows * -(-self.max_len // PAGE_SIZE) // PREFIX_PAGES)


class LoadedScheduler:
    """A scheduler whose rows all decode, driven as by the engine."""

    def __init__(self, load: Load, max_in_flight: int = 0, seed: int = 0) -> None:
        """`max_in_flight` steps stay launched but not committed."""
        self.load = load
        self._max_in_flight = max_in_flight
        self._in_flight: deque[Sequence[ScheduledRow]] = deque()
        self._draw = Random(seed)
        num_pages = load.num_prefixes * PREFIX_PAGES + LONG_PROMPT // PAGE_SIZE
        limits = CacheLimits(num_pages + PADDING_PAGES, PAGE_SIZE, load.rows, max(load.max_len, LONG_PROMPT))
        self.store = CacheStore(
            [GroupCacheSpec("group0", (_POOL,)), GroupCacheSpec("group1", (_POOL,))], limits, torch.device("cpu")
        )
        self.prefixes = PrefixCache(self.store)
        cache_prefixes(self.prefixes, self.store, load.num_prefixes, _VOCAB, self._draw)
        self.long_prompt = self._tokens(LONG_PROMPT)
        self._long_bundles = _cache(self.prefixes, self.store, caller_of(0), self.long_prompt)
        self.scheduler = Scheduler(
            self.store, self.prefixes, max_step_tokens=_STEP_TOKENS, max_scored_tokens=_STEP_TOKENS
        )
        for index, length in enumerate(random_lengths(2 * load.rows, self._draw)):
            self.scheduler.submit(self._sequence(index, length))
        self._read_prompts()

    def tokens(self) -> list[int]:
        """Random tokens for a step of all rows."""
        return self._tokens(self.load.rows)

    def find_long(self) -> PrefixMatch:
        return self.prefixes.find(caller_of(0), self.long_prompt)

    def lock_long(self, match: PrefixMatch) -> None:
        """Locks a match and unlocks it."""
        self.prefixes.unlock(self.prefixes.lock(caller_of(0), match))

    def launch(self, rows: Sequence[ScheduledRow]) -> None:
        """Tells the scheduler that a step was launched."""
        self._in_flight.append(rows)
        self._launched(rows)

    def commit(self, tokens: Sequence[int]) -> None:
        """Commits the oldest step in flight if it is due."""
        if len(self._in_flight) > self._max_in_flight:
            rows = self._in_flight.popleft()
            for row, token in zip(rows, tokens, strict=True):
                self.scheduler.commit(row, RowResult(row.seq_len, (token,)))
            self.scheduler.landed(rows)

    def land(self) -> None:
        """Commits all steps in flight."""
        self._max_in_flight = 0
        while self._in_flight:
            self.commit(self.tokens())

    def check(self) -> None:
        """Raises if the steps left an inconsistent state."""
        sequences, load = self.scheduler.running, self.load
        _expect("rows that run", load.rows, len(sequences))
        _expect("rows that wait", load.rows, self.scheduler.num_waiting)
        _expect("retractions", 0, self.scheduler.num_retractions)
        for sequence in sequences:
            _expect("tokens computed of a row", len(sequence.tokens) - 1, sequence.num_computed)
            _expect("whole pages of a row published", sequence.num_computed // PAGE_SIZE, sequence.num_prefix_pages)
            _expect("pages of a row", self.store.pages_for(sequence.num_scheduled), sequence.num_pages)
        _expect("the pages of the long prompt", self._long_bundles, self.find_long().bundles)
        if self.prefixes.num_evictable < load.prefixes * PREFIX_PAGES:
            raise SightlineError(
                f"expected {load.prefixes} prefixes of {PREFIX_PAGES} pages in the cache, got "
                f"{self.prefixes.num_evictable} pages; nothing is reported"
            )
        self._check_owners()

    def _check_owners(self) -> None:
        """Raises unless every page is free or owned by exactly its rows and the prefix tree."""
        nodes = list(self.prefixes.nodes())
        for index, pool in enumerate(self.store.pools):
            owners = Counter(node.bundle.pages[index] for node in nodes)
            for row in range(1, self.load.rows + 1):
                owners.update(pool.table.owned(row))
            _expect(f"free pages of {pool.key}", pool.allocator.num_usable - len(owners), pool.allocator.num_free)
            wrong = [page for page, count in owners.items() if pool.allocator.owners(page) != count]
            _expect(f"pages of {pool.key} with other owners than theirs", [], wrong)

    def _launched(self, rows: Sequence[ScheduledRow]) -> None:
        """Updates store and scheduler as runner and engine do."""
        for row in rows:
            self.store.lengths.advance(row.table_row, row.seq_len)
        self.scheduler.launched(rows)

    def _read_prompts(self) -> None:
        """Runs steps until every row decodes."""
        while self.scheduler.num_running < self.load.rows or any(
            sequence.num_generated == 0 for sequence in self.scheduler.running
        ):
            rows = self.scheduler.schedule().rows
            self._launched(rows)
            for row in rows:
                chosen = (self._draw.randrange(_VOCAB),) if row.completes else ()
                self.scheduler.commit(row, RowResult(row.seq_len, chosen))
            self.scheduler.landed(rows)

    def _sequence(self, index: int, prompt_len: int) -> SequenceState:
        params = EffectiveParams(
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=0,
            max_tokens=self.load.max_tokens,
            stop_token_ids=frozenset(),
            skip_special_tokens=True,
        )
        prompt = tuple(self._tokens(prompt_len))
        return SequenceState(Request(f"request-{index}", None, prompt, params.needs, Terms(caller=caller_of(index))))

    def _tokens(self, count: int) -> list[int]:
        return self._draw.choices(range(_VOCAB), k=count)


def cache_prefixes(prefixes: PrefixCache, store: CacheStore, count: int, vocab_size: int, draw: Random) -> None:
    """Caches `count` prompts of random tokens."""
    for index in range(count):
        _cache(prefixes, store, caller_of(index), draw.choices(range(vocab_size), k=PREFIX_PAGES * PAGE_SIZE))


def caller_of(index: int) -> str:
    """The caller of request or prefix `index`."""
    return f"caller-{index % NUM_CALLERS}"


def random_lengths(count: int, draw: Random) -> list[int]:
    """Random prompt lengths, so that rows fill their pages at different steps."""
    return [draw.randint(*_PROMPT_LENGTHS) for _ in range(count)]


def _cache(prefixes: PrefixCache, store: CacheStore, caller: str, tokens: Sequence[int]) -> tuple[Bundle, ...]:
    """Caches the pages of a prompt, as a row that has computed them and ended."""
    row = store.open_row()
    store.grow_row(row, len(tokens))
    store.fill_row(row, len(tokens))
    node = prefixes.lock(caller, prefixes.find(caller, []))
    bundles = tuple(store.committed_bundle(row, index) for index in range(store.row_pages(row)))
    for bundle, page in zip(bundles, _pages(tokens), strict=True):
        node = prefixes.extend(node, page, bundle)
    store.close_row(row)
    prefixes.unlock(node)
    return bundles


def _pages(tokens: Sequence[int]) -> Iterator[Sequence[int]]:
    return (tokens[start : start + PAGE_SIZE] for start in range(0, len(tokens), PAGE_SIZE))


def _expect(name: str, expected: object, found: object) -> None:
    if expected != found:
        raise SightlineError(f"expected {name}: {expected}, got {found}; nothing is reported")
