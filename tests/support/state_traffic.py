"""Random traffic through a real scheduler, prefix cache and state table, with a model that is a hash of its tokens.

A state and an entry hold the hash of the tokens up to them, and the next token follows from the hash of all. So a wrong
state, a wrong entry and a wrong token all show at once, and a case takes milliseconds.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections import Counter, deque
from collections.abc import Sequence
from random import Random
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import torch

from sightline.cache.blocks import BlockPlace
from sightline.cache.pools import CacheLimits
from sightline.cache.prefix import PrefixCache
from sightline.cache.spec import GroupCacheSpec, PlaneSpec, PoolSpec, StateSpec
from sightline.cache.states import STATES, StateStage
from sightline.cache.store import CacheStore
from sightline.cache.tier import LowerTier
from sightline.core.batch import CAUSAL, Batch
from sightline.core.request import EffectiveParams, Request, Terms
from sightline.engine.launch import rows_work
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import Draft, DraftRoom, RowResult, ScheduledRow, SequenceState
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.late_blocks import LateBlocks
from sightline.testing.simulator.scenario import HostScene

if TYPE_CHECKING:
    from _typeshed import TraceFunction

CPU = torch.device("cpu")
NUM_TOKENS = 5
ENTRIES = PoolSpec("kv", (PlaneSpec("k", (1,), torch.int64),), num_layers=1)
HASHES = StateSpec((PlaneSpec("state", (1,), torch.int64),), num_layers=1)
SPECS = (GroupCacheSpec("attention", (ENTRIES,)), GroupCacheSpec("recurrent", (), HASHES))
MOST_STEPS = 3000


class StepFailedError(Exception):
    """A step that raises, as a device or a kernel may."""


class FlyingStep(NamedTuple):
    """A step that was launched, and the tokens that each of its rows chose."""

    rows: Sequence[ScheduledRow]
    chosen: Sequence[tuple[int, ...]]


def digest(tokens: Sequence[int]) -> int:
    """A number that stands for all tokens; 0 for none, as in the empty state."""
    value = 0
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
    return value


class Guesses:
    """Guesses that are right with a given probability each."""

    max_step_tokens = 1_000

    def __init__(self, random: Random, most: int) -> None:
        self._random, self._most, self._honesty = random, most, random.choice([0.0, 0.3, 0.7, 1.0])

    def propose(self, rooms: Sequence[DraftRoom], most: int) -> Sequence[Draft]:
        drafts = []
        for room in rooms:
            known = list(room.sequence.tokens)
            for _ in range(self._random.randint(0, max(0, min(room.most, self._most, most)))):
                is_true = self._random.random() < self._honesty
                known.append(next_token(known, room.sequence) if is_true else self._random.randrange(NUM_TOKENS))
            drafts.append(Draft(tuple(known[len(room.sequence.tokens) :])))
            most -= len(drafts[-1].tokens)
        return drafts

    def observe(self, sequence: SequenceState, num_drafted: int, num_accepted: int) -> None:
        """Learns nothing."""

    def forget(self, sequence: SequenceState) -> None:
        """Keeps nothing."""


def next_token(tokens: Sequence[int], sequence: SequenceState) -> int:
    """What the model says behind these tokens; continuations of one prompt differ."""
    return digest([*tokens, sequence.index]) % 7919 % NUM_TOKENS


def interrupt(line: int) -> None:
    """Raises Ctrl-C at a line, counted from 1, of what the cache and batches do from here on."""
    left = itertools.count(line, -1)

    def within(frame: FrameType, event: str, argument: object) -> TraceFunction:
        del frame, argument
        if event == "line" and next(left) == 1:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return within

    def entered(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        del event, argument
        path = frame.f_code.co_filename
        return within if "sightline/cache/" in path or path.endswith(("core/batch.py", "core/pool_rows.py")) else None

    sys.settrace(entered)


class LateHashes(LateBlocks):
    """Host memory for hashes, behind a link that is slow and fails at times."""

    def _spoil(self, places: Sequence[BlockPlace]) -> None:
        """Fills what will be written with a number that is no hash."""
        size = self._store.limits.page_size
        for place in places:
            for page in place.pages:
                self._store.pools[0].plane("k")[:, page * size : (page + 1) * size] = -1
            if place.state is not None:
                self._store.cache("recurrent").states.fill([place.state], -1)


class StateTraffic:
    """An engine without a model, driven as `StepLoop` drives one, and every step of it checked."""

    def __init__(self, seed: int, *, interrupts: bool = False) -> None:
        self.random = random = Random(seed)
        page_size, longest = random.choice([1, 2, 3, 4, 8]), random.choice([8, 16, 30])
        max_drafted = random.choice([0, 0, 1, 3, 7])
        self.depth = 0 if max_drafted else random.choice([0, 1])
        num_pages = 1 + -(-longest // page_size) + random.choice([0, 0, 1, 2, 5, 20])
        max_rows = random.randint(1, 5)
        self.limits = CacheLimits(
            num_pages, page_size, max_rows, longest, 2 + self.depth + max_drafted, random.choice([0, 1, 2, 3, 5, 16])
        )
        self.store = CacheStore(SPECS, self.limits, CPU)
        self.moves = EventCounts()
        self.tier = self.draw_tier(seed)
        self.prefixes = PrefixCache(self.store, self.tier) if random.random() < 0.9 else None
        self.scheduler = Scheduler(
            self.store,
            self.prefixes,
            max_step_tokens=max(max_rows, random.choice([1, 2, 3, 5, 8, 16, 40])),
            max_scored_tokens=random.choice([1, 4, 50]),
            drafts=Guesses(random, max_drafted) if max_drafted else None,
        )
        assert self.store.main.states is not None
        self.states = self.store.main.states
        self.interrupts = interrupts
        self.failure_rate = random.choice([0.0, 0.0, 0.05, 0.1])
        self.texts = [[random.randrange(NUM_TOKENS) for _ in range(longest)] for _ in range(2)]
        self.flying: deque[FlyingStep] = deque()
        self.live: list[SequenceState] = []
        self.real: dict[SequenceState, list[int]] = {}
        """The tokens of each sequence with those that steps in flight choose."""
        self.counts = Counter[str]()

    def draw_tier(self, seed: int) -> LowerTier | None:
        """Host memory below the cache, for some seeds."""
        draw = Random(f"tier {seed}")
        if draw.random() < 0.5:
            return None
        lateness, failures = draw.choice([0.0, 0.0, 0.4, 0.8]), draw.choice([0.0, 0.0, 0.2])
        scene = HostScene(num_blocks=draw.choice([1, 4, 12, 100]), lateness=lateness, failures=failures, seed=seed)
        return LowerTier(self.store, LateHashes(self.store, scene, self.moves), "hashes")

    def run(self, num_steps: int) -> Counter[str]:
        """Random requests for some steps, then until all of them have ended; returns what happened how often."""
        for _ in range(num_steps):
            if len(self.live) < 6 and self.random.random() < 0.35:
                self.submit()
            self.disturb()
            self.step()
        for _ in range(MOST_STEPS):
            for sequence in self.live:
                self.scheduler.resume(sequence)
            if not (self.live or self.scheduler.has_work or self.flying):
                break
            self.step()
        assert not self.live, "a livelock"
        num_held = 0 if self.tier is None else len(set(self.tier.held_states()) - set(self.cached_states()))
        assert self.states.num_free == self.states.num_usable - self.num_cached - num_held
        if self.prefixes is not None:
            self.prefixes.close()
        assert (self.states.num_free, self.states.num_checkpoints) == (self.states.num_usable, 0)
        assert self.store.num_free_pages == self.store.num_usable_pages
        self.counts["returned"] += self.moves.returned_blocks
        self.counts["hits"] += self.scheduler.num_hit_tokens
        self.counts["retractions"] += self.scheduler.num_retractions
        self.counts["accepted"] += self.scheduler.draft_counts.num_accepted_tokens
        return self.counts

    @property
    def num_cached(self) -> int:
        return 0 if self.prefixes is None else self.prefixes.num_checkpoints

    def cached_states(self) -> list[int]:
        """The slots of the states in the prefix tree."""
        nodes = () if self.prefixes is None else self.prefixes.nodes()
        return [node.checkpoint.slot for node in nodes if node.checkpoint is not None]

    def submit(self) -> None:
        random, longest = self.random, self.limits.max_seq_len
        prompt = random.choice(self.texts)[: random.randint(1, longest)]
        prompt = [*prompt, *(random.randrange(NUM_TOKENS) for _ in range(random.randint(0, 3)))][: longest - 1]
        params = EffectiveParams(
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=0,
            max_tokens=random.randint(1, longest - len(prompt)),
            stop_token_ids=frozenset(),
            skip_special_tokens=True,
            prompt_logprobs=1 if random.random() < 0.15 else None,
        )
        terms = Terms(caller=random.choice(["", "", "b"]), priority=random.choice([0, 0, 0, 1]))
        request = Request(f"{len(self.real)}", None, tuple(prompt), params.needs, terms)
        leader: SequenceState | None = None
        for index in range(random.choice([1, 1, 1, 2, 3])):
            sequence = SequenceState(request, index, leader)
            leader = leader or sequence
            self.real[sequence] = list(prompt)
            self.live.append(sequence)
            self.scheduler.submit(sequence)

    def disturb(self) -> None:
        """Cancels, pauses or resumes somebody, at times."""
        dice = self.random.random()
        if self.live and dice < 0.03:
            self.end(self.random.choice(self.live))
        elif self.live and dice < 0.08:
            self.scheduler.pause(self.random.choice(self.live))
        elif dice < 0.2:
            for sequence in self.live:
                self.scheduler.resume(sequence)

    def step(self) -> None:
        rows = self.scheduler.schedule().rows
        steps: list[FlyingStep] = []
        failures: list[SequenceState] = []
        try:
            if rows and self.interrupts and self.random.random() < 0.3:
                interrupt(self.random.randint(1, 400))
            if rows:
                steps, failures = self.launch(rows)
        except KeyboardInterrupt:
            self.counts["interruptions"] += 1
            self.scheduler.recount([row for step in self.flying for row in step.rows])
        finally:
            sys.settrace(None)
        for step in steps:
            self.flying.append(step)
            self.scheduler.launched(step.rows)
        for sequence in failures:
            self.end(sequence)
        while len(self.flying) > (self.depth if len(steps) == 1 else 0):
            self.land()
        self.counts["steps"] += 1
        self.check()

    def launch(self, rows: Sequence[ScheduledRow]) -> tuple[list[FlyingStep], list[SequenceState]]:
        """The steps that came of the rows, cut in two where one failed, and sequences that failed alone."""
        try:
            return [self.compute(rows)], []
        except StepFailedError:
            self.counts["failures"] += 1
        if len(rows) == 1:
            return [], [rows[0].sequence]
        middle = len(rows) // 2
        first, second = self.launch(rows[:middle]), self.launch(rows[middle:])
        return [*first[0], *second[0]], [*first[1], *second[1]]

    def fail(self) -> None:
        if self.random.random() < self.failure_rate:
            raise StepFailedError

    def compute(self, rows: Sequence[ScheduledRow]) -> FlyingStep:
        places: dict[SequenceState, int] = {}
        unread: list[int] = []
        for step in self.flying:
            for row, tokens in zip(step.rows, step.chosen, strict=True):
                if tokens:
                    places[row.sequence] = len(unread)
                    unread.append(tokens[-1])
        chosen = torch.tensor(unread) if unread else None
        batch = Batch(rows_work(rows, CAUSAL, places), self.store.main.sources, CPU, chosen)
        self.check_bound(rows)
        self.store.lengths.check(batch, 0)
        self.fail()
        try:
            self.store.lengths.launch(batch, 0)
            self.fail()
            self.update(batch, rows)
            self.fail()
        except BaseException:
            self.store.lengths.take_back(batch)
            self.check_taken_back(rows)
            raise
        step = FlyingStep(rows, [self.choose(row) for row in rows])
        for row, tokens in zip(rows, step.chosen, strict=True):
            self.real[row.sequence] += tokens
        return step

    def check_bound(self, rows: Sequence[ScheduledRow]) -> None:
        """A row never needs more slots than its share, beside those that it keeps for others."""
        for row in rows:
            own = [each for each in self.states.positions(row.table_row) if each not in row.sequence.pinned]
            assert len(own) <= self.limits.states_per_row, own

    def check_taken_back(self, rows: Sequence[ScheduledRow]) -> None:
        """No state of a step that failed counts as written."""
        for row in rows:
            launched = self.store.lengths.launched(row.table_row)
            for position, slot in self.states.held(row.table_row).items():
                assert position <= launched or self.states.tag(slot).stage is StateStage.CLAIMED

    def update(self, batch: Batch, rows: Sequence[ScheduledRow]) -> None:
        """The forward pass: what each row reads is what its tokens say, and what it writes follows from it."""
        states, pool, size = self.store.cache("recurrent").states.plane("state")[0, :, 0], self.store.pools[0], 0
        entries = pool.plane("k").flatten()
        slots, written, own = batch.pools[STATES], batch.pools[pool.key].write_slots.tolist(), batch.tokens.tolist()
        assert slots.read_slots is not None
        reads, page_size = slots.read_slots.tolist(), self.limits.page_size
        assert list(slots.kept) == slots.write_slots.tolist()
        kept = [slot for slot in slots.kept if slot]
        assert len({*kept, *reads} - {0}) == len(kept) + len(set(reads) - {0}), "slots that are not distinct"
        for row, read in zip(rows, reads, strict=True):
            known = [*self.real[row.sequence], *row.drafts]
            context, stop = known[: row.context_len], size + row.num_tokens
            assert own[size:stop] == known[row.context_len : row.seq_len], "other tokens"
            assert int(states[read]) == digest(context), "another state"
            for place in range(row.context_len):
                page = pool.table.page(row.table_row, place // page_size)
                assert int(entries[page * page_size + place % page_size]) == digest(known[: place + 1]), "other entries"
            for index in range(row.num_tokens):
                value = digest(known[: row.context_len + index + 1])
                entries[written[size + index]] = value
                if slots.kept[size + index]:
                    states[slots.kept[size + index]] = value
            assert slots.kept[stop - 1], "the state that the row goes on from is not kept"
            size = stop

    def choose(self, row: ScheduledRow) -> tuple[int, ...]:
        """The right guesses of a row, and the token behind them."""
        sequence, known = row.sequence, list(self.real[row.sequence])
        if not row.completes or len(known) >= sequence.max_expected:
            return ()
        for guess in (*row.drafts, None):
            known.append(next_token(known, sequence))
            if known[-1] != guess:
                break
        return tuple(known[len(self.real[sequence]) :])

    def land(self) -> None:
        rows, chosen = self.flying[0]
        for row, tokens in zip(rows, chosen, strict=True):
            sequence = row.sequence
            if sequence.is_out:
                continue
            if self.random.random() < 0.01:
                self.end(sequence)
                continue
            seq_len = row.seq_len - len(row.drafts) + len(tokens) - 1 if tokens else row.seq_len
            self.scheduler.commit(row, RowResult(seq_len, tokens))
            if row.completes and len(sequence.tokens) >= sequence.max_expected:
                self.end(sequence)
        self.flying.popleft()
        self.scheduler.landed(rows)

    def end(self, sequence: SequenceState) -> None:
        self.scheduler.remove(sequence)
        self.live.remove(sequence)

    def check(self) -> None:
        """Every slot has the owners that can be found, and pins are those of running sequences."""
        states, sequences = self.states, (*self.scheduler.running, *self.scheduler._leaving)
        nodes = () if self.prefixes is None else tuple(self.prefixes.nodes())
        checkpoints = self.cached_states()
        moving = [] if self.tier is None else list(self.tier.held_states())
        owners = Counter([*checkpoints, *moving])
        rows = range(1, states.num_table_rows + 1)
        owners.update(slot for row in rows for slot in states.held(row).values())
        for slot in range(1, states.num_usable + 1):
            assert states.allocator.owners(slot) == owners[slot]
        by_row = {sequence.table_row: sequence for sequence in sequences}
        for row in rows:
            pinned = by_row[row].pinned if row in by_row else set()
            assert states.pinned(row) == pinned
            assert row in by_row or not states.positions(row)
            held = [position for position, slot in states.held(row).items() if slot not in moving]
            assert max(held, default=0) <= self.store.lengths.launched(row)
            computed = self.store.lengths.committed(row)
            assert {each for each in pinned if each <= computed} <= set(states.positions(row))
        num_pins = sum([len(sequence.pinned) for sequence in by_row.values()])
        num_kept = len(checkpoints) + len(moving) + num_pins
        assert num_kept == states.num_checkpoints <= states.max_checkpoints
        answered = [each.answered for each in sequences if each.answered is not None]
        assert all(node in nodes for node in answered)
        self.counts["checkpoints"] += len(checkpoints)
        self.counts["pins"] += num_pins
