"""A scheduler driven as the engine drives it, for tests of it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import torch

from sightline.cache.pools import CacheLimits
from sightline.cache.prefix import PrefixCache
from sightline.cache.spec import GroupCacheSpec, PlaneSpec, PoolSpec
from sightline.cache.store import CacheStore
from sightline.core.request import EffectiveParams, Request, Terms
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import Drafts, RowResult, Schedule, ScheduledRow, SequenceState

CPU = torch.device("cpu")
POOL = PoolSpec("kv", (PlaneSpec("k", (1,), torch.float32),), num_layers=1)
SPECS = (GroupCacheSpec("group0", (POOL,)), GroupCacheSpec("group1", (POOL,)))
PAGE_SIZE = 4


def make_store(usable_pages: int = 64, max_rows: int = 8, max_seq_len: int = 128) -> CacheStore:
    return CacheStore(SPECS, CacheLimits(usable_pages + 1, PAGE_SIZE, max_rows, max_seq_len), CPU)


def make_sequence(
    name: str,
    prompt_len: int,
    max_tokens: int,
    *,
    scored: bool = False,
    index: int = 0,
    terms: Terms = Terms(),  # noqa: B008 - frozen
    penalty: float = 0.0,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SequenceState:
    params = EffectiveParams(
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=0,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        skip_special_tokens=True,
        presence_penalty=penalty,
        bad_words=bad_words,
        prompt_logprobs=1 if scored else None,
    )
    return SequenceState(Request(name, None, tuple(range(prompt_len)), params.needs, terms), index)


@dataclass
class Loop:
    """A scheduler driven as the engine drives it, with every step checked."""

    store: CacheStore = field(default_factory=make_store)
    budget: int = 16
    scored: int = 8
    caches: bool = False
    depth: int = 0
    """Steps in flight between two steps."""
    drafts: Drafts | None = None
    scheduler: Scheduler = field(init=False)
    prefixes: PrefixCache | None = field(init=False)
    running: list[SequenceState] = field(default_factory=list)
    flying: deque[tuple[ScheduledRow, ...]] = field(default_factory=deque)
    finished: list[str] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefixes = PrefixCache(self.store) if self.caches else None
        self.scheduler = Scheduler(
            self.store,
            self.prefixes,
            max_step_tokens=self.budget,
            max_scored_tokens=self.scored,
            drafts=self.drafts,
        )

    def submit(
        self,
        name: str,
        prompt_len: int,
        max_tokens: int,
        *,
        scored: bool = False,
        terms: Terms = Terms(),  # noqa: B008 - frozen
        penalty: float = 0.0,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> SequenceState:
        sequence = make_sequence(
            name, prompt_len, max_tokens, scored=scored, terms=terms, penalty=penalty, bad_words=bad_words
        )
        self.scheduler.submit(sequence)
        return sequence

    def schedule(self) -> dict[str, int]:
        """The tokens of each row of the next step, which is checked and not run."""
        schedule = self.scheduler.schedule()
        self.check(schedule)
        return {row.sequence.request.request_id: row.num_tokens for row in schedule.rows}

    def step(self) -> dict[str, int]:
        """Runs one step: every row that completes generates a token, and ends at its last."""
        rows = self.scheduler.schedule().rows
        self.check(Schedule(rows))
        for row in rows:
            if row.sequence not in self.running:
                self.running.append(row.sequence)
                self.admitted.append(row.sequence.request.request_id)
        if rows:
            for row in rows:
                self.store.lengths.advance(row.table_row, row.seq_len)
            self.scheduler.launched(rows)
            self.flying.append(rows)
        while len(self.flying) > (self.depth if rows else 0):
            self.land()
        return {row.sequence.request.request_id: row.num_tokens for row in rows}

    def land(self) -> None:
        rows = self.flying.popleft()
        for row in rows:
            if row.sequence.is_out:
                continue
            self.scheduler.commit(row, RowResult(row.seq_len, (0,) if row.completes else ()))
            if row.completes and row.sequence.num_generated == row.sequence.request.needs.max_new_tokens:
                self.remove(row.sequence)
                self.finished.append(row.sequence.request.request_id)
        self.scheduler.landed(rows)

    def remove(self, sequence: SequenceState) -> None:
        self.scheduler.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)

    def check(self, schedule: Schedule) -> None:
        rows = schedule.rows
        assert sum(row.num_tokens for row in rows) <= self.budget
        assert sum(row.num_tokens for row in rows if row.scores_prompt) <= self.scored
        assert all(0 < row.num_tokens <= row.sequence.num_pending for row in rows)
        assert all(row.completes == (row.num_tokens == row.sequence.num_pending) for row in rows)
        assert all(row.context_len == row.sequence.num_scheduled for row in rows)
        assert len({row.table_row for row in rows}) == len(rows)
        scheduled = {row.sequence.request.request_id for row in rows}
        decoding = {
            sequence.request.request_id
            for sequence in self.running
            if sequence.num_pending == 1 and sequence.table_row is not None and sequence.is_ready
        }
        assert self.depth or decoding <= scheduled, "a decoding row stalls"
        for row in rows:
            assert row.sequence.table_row == row.table_row
            needed = self.store.pages_for(row.seq_len)
            assert all(pool.table.num_owned(row.table_row) >= needed for pool in self.store.pools)
        for row in (row for rows in self.flying for row in rows):
            assert row.sequence.table_row == row.table_row, "a row in flight keeps its pages"
            assert self.store.row_pages(row.table_row) >= self.store.pages_for(row.seq_len)
        self.check_pages()

    def check_pages(self) -> None:
        """Every page is free, or of the rows and the prefix cache that own it, and of nobody else."""
        for index, pool in enumerate(self.store.pools):
            owners = Counter(page for row in range(1, self.store.limits.max_rows + 1) for page in pool.table.owned(row))
            if self.prefixes is not None:
                owners += Counter(node.bundle.pages[index] for node in self.prefixes.nodes())
            assert all(pool.allocator.owners(page) == owners[page] for page in range(1, pool.allocator.num_usable + 1))

    def run_to_the_end(self, most_steps: int) -> int:
        steps = 0
        while self.scheduler.num_waiting + self.scheduler.num_running + len(self.flying):
            under_way = len(self.flying)
            assert self.step() or under_way, "there is work and the step has no row"
            steps += 1
            assert steps <= most_steps, "it goes on for ever"
        return steps

    def assert_baseline(self) -> None:
        if self.prefixes is not None:
            self.prefixes.clear()
        assert self.store.num_free_rows == self.store.limits.max_rows
        for pool in self.store.pools:
            assert pool.allocator.num_free == pool.allocator.num_usable
            assert pool.table.pages.count_nonzero() == 0
