"""The queue, the running rows, and the stages of a step: scheduled, launched, committed.

    submit ─▶ waiting ──admitted──▶ running ──launched──▶ in flight ──committed──▶ running ─▶ ...
                 ▲                     │                      │
                 └──────retracted──────┘                      └──removed: out, with its pages until the commit

A paused sequence is parked, wherever it is; in flight, once its last step is over. It holds no row, page or lock and is
no work until it is resumed, at its old place in the queue.

Sequences that are computed whole wait in a queue of their own and hold no pages; steps of both kinds alternate.

`policy.decide` says what happens next; the scheduler carries it out. Free pages that nothing else needs are reserved
for an admitted sequence, so that its pages are adjacent, and taken back on demand.

Knows requests and pages. Does not know tensors or models.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sightline.cache.prefix import PrefixCache
from sightline.cache.store import CacheStore
from sightline.core.errors import OutOfPages, RequestError
from sightline.scheduler.costs import StepLimit
from sightline.scheduler.decision import Decision, Inquiry, SchedulerState, WaitingLines
from sightline.scheduler.drafted_rows import DraftCounts, add_drafts
from sightline.scheduler.pace import Pace
from sightline.scheduler.policy import decide, generates
from sightline.scheduler.queue import WaitingQueue
from sightline.scheduler.running import RunningRows
from sightline.scheduler.sequence import Drafts, RowResult, Schedule, ScheduledRow, SequenceState
from sightline.scheduler.shares import Shares
from sightline.scheduler.supply import PrefixReuse, Supply
from sightline.scheduler.trees import check_path, depths
from sightline.scheduler.whole import WholeQueue


class Scheduler:
    """Holds every sequence from submission until its last step is over."""

    def __init__(
        self,
        store: CacheStore,
        prefixes: PrefixCache | None,
        *,
        max_step_tokens: int,
        max_scored_tokens: int,
        max_whole_tokens: int = 0,
        pace: Pace | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        """`max_scored_tokens` bounds the prompt tokens and guesses per step that all need logits: each takes a
        vocabulary of memory. `max_whole_tokens` bounds the tokens of a step of several whole sequences. `pace` limits
        the time of steps. `drafts` guesses what rows generate next; no step may be in flight then when one is
        scheduled.

        Without `prefixes`, nothing outlives its request.
        """
        self._store = store
        self._page_size = store.limits.page_size
        self._supply = Supply(store, prefixes)
        self._max_step_tokens = max_step_tokens
        self._max_scored_tokens = max_scored_tokens
        self._pace = pace
        self._drafts = drafts
        self._arrivals = itertools.count(1)
        self._shares = Shares()
        self._waiting = WaitingQueue()
        self._running = RunningRows()
        self._whole = WholeQueue(store.limits.max_rows, max_whole_tokens)
        self._whole_is_next = False
        self._leaving: set[SequenceState] = set()
        """Removed sequences that are still in a launched step."""
        self._parked: dict[SequenceState, None] = {}
        self.num_retractions = 0
        """How often a running sequence had to give its pages back."""
        self.num_queried_tokens = 0
        """Prompt tokens looked up in the prefix cache."""
        self.num_hit_tokens = 0
        """Prompt tokens found in the prefix cache, in the pools themselves."""
        self.draft_counts = DraftCounts()
        """Guesses in committed rows, and how many were right."""

    def prefix_metrics(self) -> Mapping[str, Any]:
        """What `EngineMetrics` has about the prefix cache and the tier below it, by field."""
        below = self._supply.num_returned_tokens
        counts = {"prefix_cache_queries": self.num_queried_tokens, "prefix_cache_hits": self.num_hit_tokens + below}
        return {**self._supply.tier_metrics(), **counts, "prefix_cache_host_hits": below}

    def reset_counts(self) -> None:
        """Begins all counts again."""
        self._supply.reset_counts()
        self.num_queried_tokens = self.num_hit_tokens = self.num_retractions = 0
        self.draft_counts = DraftCounts()

    @property
    def running(self) -> Sequence[SequenceState]:
        """By rank: the last gives way first."""
        return self._running.by_rank

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._whole)

    @property
    def num_running(self) -> int:
        return len(self._running.by_rank) + len(self._whole.running)

    @property
    def num_paused(self) -> int:
        """Parked sequences. Those that still run count as running."""
        return len(self._parked)

    @property
    def has_work(self) -> bool:
        """True while a sequence waits, runs, or was removed but still holds pages. Parked ones are no work."""
        return bool(self.num_waiting or self.num_running or self._leaving)

    def submit(self, sequence: SequenceState) -> None:
        """Adds a sequence to the queue. Raises `RequestError` if it could never finish."""
        needed = 0 if sequence.is_whole else self._store.pages_for(sequence.max_len)
        if needed > self._store.num_usable_pages:
            raise RequestError(
                f"expected a request of at most {self._store.num_usable_pages} cache pages, got one that may need "
                f"{needed}; lower max_tokens or raise cache_tokens"
            )
        sequence.arrival = next(self._arrivals)
        sequence.rank = (sequence.request.terms.priority, sequence.arrival)
        self._shares.join(sequence.caller)
        if sequence.is_whole:
            self._whole.add(sequence)
        else:
            self._waiting.add(sequence)

    def has_room_for(self, sequence: SequenceState) -> bool:
        """True if a waiting sequence could run without another one giving way: there are a row and pages for it."""
        if not self._store.num_free_rows:
            return False
        reuse = self._supply.find(sequence)
        # Pages that are shared while others use them cost nothing; those that nobody uses count as free until then.
        needed = self._store.pages_for(len(sequence.tokens)) - reuse.num_pages + len(self._supply.idle([reuse]))
        running = self._running.views(self._page_size)
        unused = sum(each.num_unused for each in running)
        # Like admission, which leaves a page for each row to grow into.
        return needed + len(running) <= self._supply.tally().num_pages + unused

    def first_untouched(self) -> SequenceState | None:
        """The most urgent waiting request that nothing was computed for."""
        return self._waiting.first_untouched()

    def give_up(self, first: SequenceState) -> tuple[SequenceState, ...]:
        """Takes a waiting request out of the queue, and returns its sequences, the first one first."""
        found = self._waiting.take(first)
        for each in found:
            self._shares.leave(each.caller)
        return found

    def num_cached(self, sequence: SequenceState) -> int:
        """Tokens of a sequence that is not submitted yet whose entries the cache has."""
        return 0 if sequence.is_whole else self._supply.find(sequence).num_tokens

    def schedule(self, *, generates_beside: bool = False) -> Schedule:
        """Returns the next step's rows, with pages for their new tokens. Whole rows have every other step.

        `generates_beside` says that rows of another replica, which steps at the same time, wait for their next token.
        """
        self._supply.poll()
        if len(self._whole) and (self._whole_is_next or not (len(self._waiting) or self._running.by_rank)):
            self._whole_is_next = False
            return self._whole.next_step(self._shares, self._limit())
        self._whole_is_next = True
        state, reuses = self._state(generates_beside), dict[int, PrefixReuse]()
        while isinstance(outcome := decide(state), Inquiry):
            state = self._answer(outcome, state, reuses)
        return self._carry_out(outcome, state, reuses)

    def launched(self, rows: Iterable[ScheduledRow]) -> None:
        """Records that a step with these rows is running, so that its tokens are not scheduled again."""
        charges: dict[str, int] = {}
        for row in rows:
            sequence, seq_len = row.sequence, row.context_len + row.num_tokens
            sequence.num_steps += 1
            sequence.num_scheduled = seq_len
            if row.completes:
                sequence.num_expected = seq_len + 1 if seq_len < sequence.max_expected else seq_len
            # Recomputation after a retraction is not charged to the caller.
            if seq_len > sequence.num_charged:
                charges[sequence.caller] = charges.get(sequence.caller, 0) + seq_len - sequence.num_charged
                sequence.num_charged = seq_len
        for caller, num_tokens in charges.items():
            self._shares.charge(caller, num_tokens)

    def commit(self, row: ScheduledRow, result: RowResult) -> None:
        """Records that the row's accepted entries are in the cache, and appends the tokens that the step settled.

        Entries of a tree are moved to where they belong first. Idempotent, so that it can be repeated after an
        interruption.
        """
        sequence, seq_len, tokens = row.sequence, result.seq_len, result.tokens
        row_len = row.context_len + row.num_tokens
        if (row.completes and row_len < sequence.max_expected) != bool(tokens):
            raise ValueError(f"expected tokens exactly where a row completes, got {tokens}")
        if seq_len != row_len and (not row.context_len < seq_len < row_len or sequence.num_steps > 1):
            raise ValueError(
                f"expected an accepted length of {row_len}, or a shorter one above {row.context_len} if no step "
                f"follows, got {seq_len}"
            )
        if tokens and seq_len != row_len - len(row.drafts) + len(tokens) - 1:
            raise ValueError(
                f"expected an accepted length that ends before the last of {len(tokens)} tokens behind "
                f"{row_len - len(row.drafts)}, got {seq_len}"
            )
        if tokens:
            sequence.tokens[seq_len + 1 - len(tokens) :] = tokens
        if row.parents is not None:
            self._keep_path(row, result)
        if not sequence.is_whole:
            self._store.lengths.commit(row.table_row, seq_len)
        if row.drafts and sequence.num_computed < seq_len:
            self._count_drafts(row, len(tokens) - 1)
        sequence.num_computed = seq_len
        if row.completes:
            self._supply.publish(sequence)

    def _keep_path(self, row: ScheduledRow, result: RowResult) -> None:
        """Moves the entries of a tree's accepted guesses behind its known token, so that they can be committed."""
        path = result.path
        if path is None or row.parents is None:
            raise ValueError(f"expected the accepted path of a row with a tree, got {path}")
        check_path(path, row.parents, row.drafts, result.tokens[:-1])
        self._store.main.keep(row.table_row, row.context_len, (0, *(1 + guess for guess in path)))

    def _count_drafts(self, row: ScheduledRow, num_accepted: int) -> None:
        """Counts a row with guesses, and tells who made them how many were right."""
        if self._drafts is not None:
            self._drafts.observe(row.sequence, max(depths(row.draft_parents)), num_accepted)
        self.draft_counts.add(len(row.drafts), num_accepted)

    def landed(self, rows: Iterable[ScheduledRow]) -> None:
        """Records that the step with these rows is over, committed or not, and releases sequences removed meanwhile."""
        settled: list[SequenceState] = []
        for row in rows:
            sequence = row.sequence
            sequence.num_steps -= 1
            if sequence.num_steps == 0:
                # A row that was not committed is scheduled again, from its last committed entry.
                sequence.num_scheduled = sequence.num_computed
                sequence.num_expected = len(sequence.tokens)
                if sequence.is_out:
                    self._supply.release(sequence)
                    self._leaving.discard(sequence)
                elif sequence.is_whole:
                    self._whole.put_back(sequence)
                elif sequence.is_paused:
                    self._park(sequence)
                else:
                    settled.append(sequence)
        self._settle(settled)

    def remove(self, sequence: SequenceState) -> None:
        """Removes a sequence in any phase. Idempotent.

        Its pages are freed now or, if launched steps use them, when the last of those is over.
        """
        if sequence in self._leaving:
            return
        if self._drafts is not None:
            self._drafts.forget(sequence)
        if not sequence.is_out:
            sequence.is_out = True
            if sequence in self._parked:
                del self._parked[sequence]
            elif sequence.arrival:
                self._shares.leave(sequence.caller)
        if sequence.is_whole:
            self._whole.remove(sequence)
        else:
            self._waiting.remove(sequence)
            self._running.remove(sequence)
        if sequence.num_steps:
            self._leaving.add(sequence)
        else:
            self._supply.release(sequence)

    def pause(self, sequence: SequenceState) -> None:
        """Parks a sequence now or, if launched steps contain it, when the last of those is over. Idempotent.

        A whole sequence is left alone: it has one step, and produces nothing before that is over.
        """
        if sequence.is_out or sequence.is_whole or sequence.is_paused:
            return
        sequence.is_paused = True
        if not sequence.num_steps:
            self._park(sequence)

    def resume(self, sequence: SequenceState) -> None:
        """Lets a paused sequence run on: in its row if it still has one, else from its old place in the queue.
        Idempotent."""
        sequence.is_paused = False
        if sequence in self._parked:
            self._shares.join(sequence.caller)
            self._waiting.add(sequence)
            del self._parked[sequence]

    def recount(self, in_flight: Sequence[ScheduledRow]) -> None:
        """Repairs the state after an interruption between two statements, from the rows in flight."""
        self._running.recount()
        for sequence in (*self.running, *self._whole.running, *self._leaving):
            rows = [row for row in in_flight if row.sequence is sequence]
            sequence.num_steps = len(rows)
            sequence.num_scheduled = max([sequence.num_computed, *(row.seq_len for row in rows)])
            sequence.num_expected = max([len(sequence.tokens), *(sequence.expected_after(row) for row in rows)])
        for sequence in [paused for paused in self.running if paused.is_paused and not paused.num_steps]:
            self._park(sequence)
        self._settle(self.running)
        for sequence in [leaving for leaving in self._leaving if not leaving.num_steps]:
            self._supply.release(sequence)
            self._leaving.discard(sequence)
        for sequence in [whole for whole in self._whole.running if not whole.num_steps]:
            self._whole.put_back(sequence)
        for sequence in (*self._waiting, *self._parked):
            self._supply.release(sequence)
            sequence.restart()

    def _settle(self, sequences: Sequence[SequenceState]) -> None:
        """Discards launched entries beyond what is scheduled: the next step of each row continues from there."""
        ends = {each.table_row: each.num_scheduled for each in sequences if each.table_row is not None}
        self._store.lengths.settle_all(tuple(ends), tuple(ends.values()))

    def drop_all(self) -> None:
        """Drops every sequence without touching the cache, which is lost."""
        for sequence in (*self.running, *self._leaving, *self._waiting, *self._whole, *self._parked):
            sequence.is_out, sequence.table_row, sequence.prefix, sequence.num_steps = True, None, None, 0
            sequence.returning = None
        self._running.clear()
        self._leaving.clear()
        self._waiting = WaitingQueue()
        self._whole.clear()
        self._parked.clear()

    def _state(self, generates_beside: bool = False) -> SchedulerState:
        """Returns the facts that cost little to find. Lists the queue only if rows are free."""
        store, running = self._store, self._running
        return SchedulerState(
            running=running.views(self._page_size),
            held=dict(running.held),
            shares={caller: self._shares.of(caller) for caller in running.held},
            urgencies=dict(self._waiting.urgencies),
            tally=self._supply.tally(),
            num_free_rows=store.num_free_rows,
            page_size=self._page_size,
            max_step_tokens=self._max_step_tokens,
            max_scored_tokens=self._max_scored_tokens,
            waiting=self._lines() if store.num_free_rows and len(self._waiting) else None,
            findings={},
            holdings={},
            limit=self._limit(),
            generates_beside=generates_beside,
            num_coming=self._supply.num_coming,
        )

    @property
    def generates(self) -> bool:
        """True if a row waits for its next token."""
        return generates(self._running.views(self._page_size))

    def _limit(self) -> StepLimit | None:
        return None if self._pace is None else self._pace.limit()

    def _lines(self) -> WaitingLines:
        """Returns as much of the queue as one decision can admit: no more sequences than rows."""
        busy = self._waiting.busy_leaders()
        depth = self._store.num_free_rows + len(self.running) + sum(busy.values())
        shares = {caller: self._shares.of(caller) for caller in self._waiting.urgencies}
        return WaitingLines(self._waiting.lines(depth), shares, frozenset(busy))

    def _answer(self, inquiry: Inquiry, state: SchedulerState, reuses: dict[int, PrefixReuse]) -> SchedulerState:
        """The state with the facts that were asked for; `reuses` keeps what was found."""
        if inquiry.waiting:
            state = replace(state, waiting=self._lines())
        if inquiry.findings:
            found = {arrival: self._supply.find(self._waiting[arrival]) for arrival in inquiry.findings}
            reuses |= found
            findings = {**state.findings, **{arrival: reuse.finding for arrival, reuse in found.items()}}
            state = replace(
                state, findings=findings, tally=replace(state.tally, idle=self._supply.idle(reuses.values()))
            )
        if inquiry.holdings:
            sequences = {arrival: self._running.by_arrival[arrival] for arrival in inquiry.holdings}
            holdings = {arrival: self._supply.holding(sequence) for arrival, sequence in sequences.items()}
            state = replace(state, holdings={**state.holdings, **holdings})
        return state

    def _carry_out(self, decision: Decision, state: SchedulerState, reuses: Mapping[int, PrefixReuse]) -> Schedule:
        """Carries a decision out. Locks shared prefixes first, so that nothing later evicts them."""
        running = self._running.by_arrival
        admitted = [(self._waiting[arrival], reuses[arrival]) for arrival in decision.admitted]
        for waiting, reuse in admitted:
            self._supply.keep(waiting, reuse)
        for arrival in decision.retracted:
            self._retract(running[arrival])
        if decision.num_pages:
            # Lowest rank first.
            reserving = (each.arrival for each in reversed(state.running) if each.num_lacking < 0)
            self._supply.make_room(decision.num_pages, (running[each] for each in reserving if each in running))
        num_left = decision.num_pages
        held: set[int] = set()
        for arrival, count in decision.growth.items():
            if not self._grow(running[arrival]):
                held.add(arrival)
            num_left -= count
        for waiting, reuse in admitted:
            num_left -= self._store.pages_for(len(waiting.tokens)) - reuse.num_pages
            self._admit(waiting, reuse, num_left)
        for waiting, reuse in admitted:
            if waiting.table_row is not None:
                self._supply.fetch(waiting, reuse)
                self._count_found(waiting, reuse)
                self._supply.poll()
        rows = []
        for arrival, count in decision.rows.items():
            sequence = running.get(arrival)
            # A sequence for which there were no pages after all does not run, nor one that waits for its blocks.
            if sequence is None or sequence.table_row is None or sequence.returning is not None or arrival in held:
                continue
            start = sequence.num_scheduled
            completes = start + count == sequence.num_expected
            # The last token of a prompt predicts nothing within it.
            scores = (count > 1 or not completes) and sequence.scores_prompt
            rows.append(ScheduledRow(sequence, sequence.table_row, start, count, completes, scores))
        if self._drafts is not None:
            add_drafts(rows, self._drafts, self._page_size, (self._max_step_tokens, self._max_scored_tokens))
        for row in rows:
            self._supply.keep_states(row, has_followers=self._waiting.has_followers(row.sequence))
        return Schedule(tuple(rows))

    def _grow(self, sequence: SequenceState) -> bool:
        """Gives a sequence the pages that it needs. If they are not available after all, it waits."""
        try:
            self._supply.grow(sequence, sequence.num_expected)
        except OutOfPages:
            # In flight, it keeps its pages. It also does if others come free soon.
            if not sequence.num_steps and not self._supply.num_coming:
                self._retract(sequence)
            return False
        return True

    def _admit(self, sequence: SequenceState, reuse: PrefixReuse, num_spoken_for: int) -> None:
        """Admits a waiting sequence and reserves unclaimed free pages for its whole length."""
        whole = self._store.pages_for(sequence.max_len) - reuse.num_pages
        reserves = whole + num_spoken_for <= self._store.num_free_pages
        try:
            self._supply.open(sequence, reuse, sequence.max_len if reserves else len(sequence.tokens))
        except OutOfPages:
            # It keeps its place in the queue.
            self._supply.release(sequence)
            sequence.restart()
            return
        self._waiting.remove(sequence)
        self._running.add(sequence)
        if sequence.leader is not None and not self._waiting.has_followers(sequence.leader):
            self._supply.end_fork(sequence.leader)

    def _count_found(self, sequence: SequenceState, reuse: PrefixReuse) -> None:
        """Counts what an admitted sequence shares, once."""
        sequence.num_charged = sequence.num_charged or reuse.num_here
        if not sequence.was_admitted:
            sequence.was_admitted, sequence.num_cached = True, reuse.num_here
            if sequence.leader is None and reuse.match is not None:
                self.num_queried_tokens += len(sequence.tokens)
                self.num_hit_tokens += reuse.num_here

    def _retract(self, sequence: SequenceState) -> None:
        """Returns a sequence to its place in the queue, without pages."""
        self._vacate(sequence)
        self._waiting.add(sequence)
        sequence.num_retractions += 1
        self.num_retractions += 1

    def _park(self, sequence: SequenceState) -> None:
        """Takes a paused sequence off its row or out of the queue. Its whole pages stay cached until others need them.

        Its caller pays for what is computed again, and gains no credit meanwhile: how fast it reads is its own affair.
        """
        self._waiting.remove(sequence)
        self._vacate(sequence)
        sequence.num_charged = 0
        self._parked[sequence] = None
        self._shares.leave(sequence.caller)

    def _vacate(self, sequence: SequenceState) -> None:
        """Takes a sequence off its row, if it has one; it keeps its tokens."""
        self._running.remove(sequence)
        self._supply.release(sequence)
        sequence.restart()
