"""The step loop: settle, schedule, launch, commit.

    step()  settle what was cancelled or is late ─ schedule ─ launch ─┐
                                                                      ▼
            commit the step before, or this one ◀──────────── steps in flight

A step is read and committed after it is launched; with `async_scheduling`, only after the next one is launched too, so
that the host schedules and plans while the device computes. Both go the same way. Whatever ends a request in between
ends it at once, and its pages come back when the last step launched with it is over.

What a step is for is not known here: an `Outcome` turns a model's outputs into results (sampled tokens, log
probabilities of a prompt, a pooled vector), and a `Life` takes a sequence's results in. `Engine` generates, `Embedder`
embeds. Owns the life of requests from submission to their last result.

Threads: a loop is its runtime's main lane. One thread at a time may submit, step, take results, forget or close; a
second one gets `LaneBusyError`. Between two calls any thread may take over. Any thread may call `cancel`, `abandon`,
`metrics` and what only reads at any time; while another thread steps, numbers may be of different moments.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

import torch

from sightline.attention.lanes import Depth
from sightline.attention.workspace import MAIN_LANE
from sightline.cache.prefix import PrefixCache
from sightline.core.batch import RowMask
from sightline.core.device import device_faults
from sightline.core.errors import DeviceFaultError, EngineClosedError, QueueFullError
from sightline.core.interruption import uninterrupted
from sightline.core.ledger import Ledger
from sightline.core.metrics import EngineMetrics, PhaseTimes, StepPhase, StepSizes
from sightline.core.request import FinishReason, Terms
from sightline.engine.deadlines import Deadlines
from sightline.engine.launch import Consume, Launch, LaunchedStep, LifeT, StepLauncher
from sightline.engine.observing import share_in_use, show
from sightline.engine.requests import LiveRequest
from sightline.runner.coordinators import hot_metrics
from sightline.runner.runtime import Runtime
from sightline.scheduler.costs import StepCosts
from sightline.scheduler.pace import Pace
from sightline.scheduler.replicas import schedule_replicas
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import RowResult, ScheduledRow, SequenceState
from sightline.speculative.drafts import AdaptiveDrafts

logger = logging.getLogger("sightline")
ParamsT = TypeVar("ParamsT")
OutputT = TypeVar("OutputT")
ResultT = TypeVar("ResultT")


class StepLoop(ABC, Generic[LifeT, ParamsT, OutputT]):
    """Runs requests to their end, many at a time."""

    def __init__(
        self,
        runtime: Runtime,
        consume: Consume[LifeT],
        ledger: Ledger,
        clock: Callable[[], float],
        *,
        mask: RowMask,
        costs: StepCosts,
        max_scored_tokens: int,
        max_whole_tokens: int = 0,
        drafts: AdaptiveDrafts | None = None,
    ) -> None:
        """`clock` tells seconds: deadlines and the limit of a step's time go by it. `mask` is every row's, `costs` are
        the model's; for the limits and `drafts`, see `Scheduler`."""
        self.runtime = runtime
        self.ledger = ledger
        config, stores = runtime.config, (runtime.store, *runtime.others)
        self._clock = clock
        self.pace = Pace(costs, config.max_step_ms)
        # One for each replica; none if prefixes are not cached.
        self.prefixes = tuple([PrefixCache(store, *runtime.tiers) for store in stores if config.prefix_caching])
        limited = partial(Scheduler, max_scored_tokens=max_scored_tokens, max_whole_tokens=max_whole_tokens)
        make = partial(limited, max_step_tokens=config.max_step_tokens, pace=self.pace, drafts=drafts)
        self._scheduler = schedule_replicas(stores, self.prefixes, make)
        self._drafts = drafts
        self._launcher = StepLauncher(runtime, consume, mask, clock, ledger)
        self._lanes = runtime.planner.lanes
        self._in_flight: deque[LaunchedStep[LifeT]] = deque()
        self._max_in_flight = 1 if config.async_scheduling else 0
        """Launched steps that may be left when `step` returns."""
        self._num_taken = 0
        """Rows of the oldest step in flight that are committed."""
        self._live: dict[str, LiveRequest[LifeT]] = {}
        self._cancelled: deque[str] = deque()
        self._abandoned: deque[str] = deque()
        self._deadlines = Deadlines()
        self._is_stepping = False
        """True at the start of a step if the one before was interrupted."""
        self._closed = False
        self._fault: DeviceFaultError | None = None
        self._counts: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()
        self._step_sizes = StepSizes()

    @abstractmethod
    def _start(
        self, prompt_token_ids: Sequence[int], params: ParamsT, prompt: str | None, terms: Terms, now: float
    ) -> LiveRequest[LifeT]:
        """A request with its continuations, before their first step. Raises `RequestError` for one that cannot run."""

    @abstractmethod
    def _output(self, live: LiveRequest[LifeT], now: float) -> OutputT:
        """The result of a finished request."""

    @property
    def has_work(self) -> bool:
        """False if all that is left is paused, unless the next step ends some of it."""
        return self._scheduler.has_work or bool(self._in_flight) or self.idle_seconds == 0.0

    @property
    def idle_seconds(self) -> float | None:
        """Seconds until a step is needed to end what is paused; None if nothing paused has an end in sight."""
        if not self._scheduler.num_paused:
            return None
        if self._cancelled or self._abandoned:
            return 0.0
        return self._deadlines.seconds_left(self._clock())

    @property
    def in_flight(self) -> tuple[LaunchedStep[LifeT], ...]:
        """Steps that are launched and not committed, the oldest first."""
        return tuple(self._in_flight)

    @property
    def phases(self) -> PhaseTimes:
        """Where the host's time in steps goes, since the loop was built."""
        return self._launcher.phases

    @property
    def fault(self) -> DeviceFaultError | None:
        """The device error that ended the loop, or None."""
        return self._fault

    @property
    def num_retractions(self) -> int:
        """How often a running sequence had to give its pages back, and was computed again."""
        return self._scheduler.num_retractions

    def can_queue(self, count: int) -> bool:
        """True if this many more sequences may wait."""
        return self._num_queued + count <= self._max_queued

    @property
    def _num_queued(self) -> int:
        """Sequences that count against `_max_queued`."""
        return self._scheduler.num_waiting

    @property
    def _max_queued(self) -> int:
        return self.runtime.config.max_queued

    @property
    def _is_wanted(self) -> bool:
        """True while somebody waits for a step. Who is paused does not."""
        return self._scheduler.num_waiting + self._scheduler.num_running > 0

    def metrics(self) -> EngineMetrics:
        """Counts so far. Thread-safe."""
        scheduler, store, planner = self._scheduler, self.runtime.store, self.runtime.planner
        drafted = scheduler.draft_counts
        return EngineMetrics(
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting,
            num_requests_paused=scheduler.num_paused,
            kv_cache_usage_perc=share_in_use((store, *self.runtime.others), self.prefixes),
            state_checkpoints=sum(each.num_checkpoints for each in self.prefixes),
            prompt_tokens=self._counts["prompt_tokens"],
            generation_tokens=self._counts["generation_tokens"],
            num_preemptions=scheduler.num_retractions,
            request_success=dict(self._ends),
            requests_refused=self._counts["refused"],
            steps=self._counts["steps"],
            steps_cut=self._launcher.num_cut,
            steps_uncaptured=self._launcher.num_uncaptured,
            plans=planner.num_plans,
            plan_seconds=planner.plan_seconds,
            plans_rebuilt=planner.num_rebuilt,
            degradations=len(self.ledger.degradations),
            step_seconds=self.pace.total_seconds,
            steps_over_limit=self.pace.num_over,
            iteration_tokens=tuple(self._step_sizes.counts),
            iteration_tokens_sum=self._step_sizes.total,
            spec_decode_num_drafts=drafted.num_drafts,
            spec_decode_num_draft_tokens=drafted.num_drafted_tokens,
            spec_decode_num_accepted_tokens=drafted.num_accepted_tokens,
            spec_decode_num_accepted_tokens_per_pos=drafted.accepted_at(self.runtime.config.max_drafted),
            **{**scheduler.prefix_metrics(), **hot_metrics(self.runtime.coordinators, store)},
        )

    def reset_counts(self) -> None:
        """Begins all counts of `metrics` again."""
        self._counts.clear()
        self._ends.clear()
        self._step_sizes = StepSizes()
        self._scheduler.reset_counts()
        planner = self.runtime.planner
        planner.num_plans, planner.plan_seconds, planner.num_rebuilt = 0, 0.0, 0
        self.pace.total_seconds, self.pace.num_over = 0.0, 0
        self._launcher.num_cut = self._launcher.num_uncaptured = 0

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: ParamsT,
        prompt: str | None = None,
        terms: Terms = Terms(),  # noqa: B008 - frozen
    ) -> str:
        """Queues a request and returns its id.

        Raises `RequestError` for one that cannot run, `QueueFullError` if too many wait.
        """
        return self._lanes.run(MAIN_LANE, Depth.ENGINE, self._submit, prompt_token_ids, params, prompt, terms)

    def _submit(self, prompt_token_ids: Sequence[int], params: ParamsT, prompt: str | None, terms: Terms) -> str:
        self._check_open()
        live = self._start(prompt_token_ids, params, prompt, terms, self._clock())
        request = live.request
        if not self.can_queue(len(live.sequences)):
            self._counts["refused"] += 1
            raise QueueFullError(self._why_full(len(live.sequences)))
        with uninterrupted():
            self._live[request.request_id] = live
            try:
                for sequence in live.sequences:
                    self._scheduler.submit(sequence.sequence)
            except BaseException:
                self._forget(request.request_id)
                raise
            if request.deadline is not None:
                self._deadlines.add(request.deadline, request.request_id, self._live)
        self._counts["prompt_tokens"] += len(request.prompt_token_ids)
        return request.request_id

    def cancel(self, request_id: str) -> None:
        """Ends a request before the next step; an unknown or finished id is no error. Any thread may call it."""
        self._cancelled.append(request_id)

    def abandon(self, request_id: str) -> None:
        """Like `cancel`, for a request whose results nobody will ask for. Any thread, and a finaliser, may call it."""
        self._abandoned.append(request_id)

    def pause(self, request_id: str) -> None:
        """Takes a request's rows and pages until `resume`; its deadline holds. An unknown id is no error."""
        self._lanes.run(MAIN_LANE, Depth.ENGINE, self._each, request_id, self._scheduler.pause)

    def resume(self, request_id: str) -> None:
        """Lets a paused request run on; an unknown or finished id, or one that is not paused, is no error."""
        self._lanes.run(MAIN_LANE, Depth.ENGINE, self._each, request_id, self._scheduler.resume)

    def step(self) -> None:
        """Launches a step over whatever can run, and commits the one that is due."""
        self._lanes.run(MAIN_LANE, Depth.ENGINE, self._step)

    def _step(self) -> None:
        with self._ending_on_a_fault():
            self.phases.begin()
            rows = self._schedule()
            self.phases.end(StepPhase.SCHEDULE)
            launch: Launch[LifeT] = Launch((), ())
            if rows:
                launch = self._launcher.launch(rows, self._lives(rows), self._in_flight)
            with uninterrupted():
                self._take_off(launch)
                self.phases.end(StepPhase.COMMIT)
                # Without a step behind it, or with one that had to be cut, nothing is left in flight.
                most = self._max_in_flight if len(launch.steps) == 1 else 0
                while len(self._in_flight) > most or (self._in_flight and not self._is_wanted):
                    self._commit(self._in_flight[0])
                self._is_stepping = False

    def is_finished(self, request_id: str) -> bool:
        return self._find(request_id).is_finished

    def pop_output(self, request_id: str) -> OutputT:
        """The result of a finished request, which the loop then forgets."""
        return self._lanes.run(MAIN_LANE, Depth.ENGINE, self._pop, request_id, self._output)

    def _pop(self, request_id: str, build: Callable[[LiveRequest[LifeT], float], ResultT]) -> ResultT:
        live = self._find(request_id)
        if not live.is_finished:
            raise ValueError(f"expected a finished request, got {request_id}, which is running")
        self._forget(request_id)
        return build(live, self._clock())

    def forget(self, request_id: str) -> None:
        """Ends a request if it runs, and drops what it produced."""
        self._lanes.run(MAIN_LANE, Depth.ENGINE, self._forget, request_id)

    def _forget(self, request_id: str) -> None:
        if (live := self._live.get(request_id)) is None:
            return
        with uninterrupted(), self._ending_on_a_fault():
            for sequence in live.sequences:
                if sequence.finish_reason is None and not sequence.sequence.is_out:
                    self._ends[str(FinishReason.ABORT)] += 1
                self._scheduler.remove(sequence.sequence)
        self._live.pop(request_id, None)

    def _each(self, request_id: str, change: Callable[[SequenceState], None]) -> None:
        """Applies a change to every sequence of a request, if there is one."""
        with uninterrupted(), self._ending_on_a_fault():
            for live in self._live[request_id].sequences if request_id in self._live else ():
                change(live.sequence)

    def close(self) -> None:
        """Ends everything and gives the pages back."""
        self._lanes.run(MAIN_LANE, Depth.ENGINE, self._close)

    def _close(self) -> None:
        for request_id in tuple(self._live):
            self._forget(request_id)
        with uninterrupted(), self._ending_on_a_fault():
            while self._in_flight:
                self._scheduler.landed(self._in_flight.popleft().rows)
            for each in self.prefixes if self._fault is None else ():
                each.close()
        self._closed = True
        self.runtime.role.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("expected an open engine, got one that was closed; build a new one")
        if self._fault is not None:
            raise EngineClosedError(f"expected an engine that works, got one that ended: {self._fault}")

    def _why_full(self, count: int) -> str:
        most = self._max_queued
        remedy = "lower n" if count > most else "try again later"
        return (
            f"expected at most {most} sequences to wait, got {count} more to the {self._num_queued} that "
            f"do; {remedy}, or raise max_queued_requests"
        )

    def _find(self, request_id: str) -> LiveRequest[LifeT]:
        live = self._live.get(request_id)
        if live is not None:
            return live
        if self._closed:
            raise EngineClosedError(f"expected an open engine, got a closed one: {request_id} ended with it")
        raise ValueError(f"expected a request that the engine knows, got {request_id}")

    @contextmanager
    def _ending_on_a_fault(self) -> Iterator[None]:
        """Wherever the device fails, everybody is answered."""
        try:
            with device_faults():
                yield
        except DeviceFaultError as fault:
            self._end_all(fault)

    def _schedule(self) -> Sequence[ScheduledRow]:
        """Ends an interrupted step, and what was cancelled or is late, and returns the rows of the next step."""
        with uninterrupted():
            if self._is_stepping:
                self._scheduler.recount([row for step in self._in_flight for row in step.rows])
                while len(self._in_flight) > self._max_in_flight:
                    self._commit(self._in_flight[0])
            self._is_stepping = True
            self._end_cancelled()
            self._end_late()
            return self._scheduler.schedule().rows

    def _lives(self, rows: Sequence[ScheduledRow]) -> list[LifeT]:
        """The rows' lives. Their requests have started."""
        lives: list[LifeT] = []
        for row in rows:
            sequence = row.sequence
            live = self._live[sequence.request.request_id]
            if live.started_at is None:
                live.started_at = self._clock()
            lives.append(live.sequences[sequence.index])
        return lives

    def _take_off(self, launch: Launch[LifeT]) -> None:
        """Records what was launched as in flight, and ends the rows that could not be."""
        for step in launch.steps:
            self._in_flight.append(step)
            self._scheduler.launched(step.rows)
        for live, error in launch.failures:
            self._fail(live, error)
        if launch.steps:
            self._counts["steps"] += 1
            self._step_sizes.observe(sum([row.num_tokens for step in launch.steps for row in step.rows]))

    def _commit(self, step: LaunchedStep[LifeT]) -> None:
        """Takes the oldest step's results in, row by row; after an interruption, from the row that it came in."""
        results = step.results()
        self.phases.end(StepPhase.READ)
        if self._drafts is not None and not self._num_taken:
            show(self._drafts, step, results)
        for index in range(self._num_taken, len(step.rows)):
            row, live = step.rows[index], step.lives[index]
            if not row.sequence.is_out:
                try:
                    self._take(row, live, results.take(index))
                except (DeviceFaultError, torch.AcceleratorError):
                    raise
                except Exception as error:
                    self._fail(live, error)
            self._num_taken = index + 1
        # In this order: to take a row once more changes nothing, to pass one over would.
        self._num_taken = 0
        self._in_flight.popleft()
        self._scheduler.landed(step.rows)
        self.pace.observe(step.rows, step.started_at, self._clock())
        self._end_late()
        self.phases.end(StepPhase.COMMIT)

    def _take(self, row: ScheduledRow, live: LifeT, result: RowResult) -> None:
        """Commits one row's result."""
        if live.error is not None:
            self._finish(live, FinishReason.ERROR)
            return
        tokens, asked, before = live.sequence.tokens, live.sequence.request, len(live.sequence.tokens)
        self._scheduler.commit(row, result)
        if len(tokens) > before == len(asked.prompt_token_ids):
            request = self._live[asked.request_id]
            if request.first_token_at is None:
                request.first_token_at = self._clock()
        if row.completes:
            self._take_in(live)
        # Guesses behind the end are dropped when they are taken in.
        self._counts["generation_tokens"] += len(tokens) - before

    def _take_in(self, live: LifeT) -> None:
        reason = live.take_in()
        if reason is not None:
            self._finish(live, reason)

    def _fail(self, live: LifeT, error: Exception) -> None:
        """Ends one continuation with what it raised."""
        logger.error("request %s failed: %s", live.sequence.request.request_id, error, exc_info=error)
        live.error = f"{type(error).__name__}: {error}"
        self._finish(live, FinishReason.ERROR)

    def _finish(self, live: LifeT, reason: FinishReason) -> None:
        if live.finish_reason is None:
            try:
                live.finish(reason)
            except Exception as error:
                # Its last output is lost. It ends all the same, and nobody else with it.
                request_id = live.sequence.request.request_id
                logger.error("request %s could not be finished: %s", request_id, error, exc_info=error)
                live.break_off(f"{type(error).__name__}: {error}")
            self._ends[str(live.finish_reason)] += 1
        self._scheduler.remove(live.sequence)

    def _end_cancelled(self) -> None:
        """Ends what was cancelled. An id leaves its list once it is dealt with, so an interruption loses none."""
        while self._cancelled:
            self._abort(self._cancelled[0], None)
            self._cancelled.popleft()
        while self._abandoned:
            self._forget(self._abandoned[0])
            self._abandoned.popleft()

    def _end_late(self) -> None:
        while (late := self._deadlines.due(self._clock())) is not None:
            if (live := self._live.get(late)) is not None:
                timeout = live.request.terms.timeout
                self._abort(late, f"expected an end within {timeout:g} s, got none; allow more time")
            self._deadlines.drop_first()

    def _abort(self, request_id: str, why: str | None) -> None:
        request = self._live.get(request_id)
        for live in () if request is None else request.sequences:
            if live.finish_reason is None:
                live.error = why
                self._finish(live, FinishReason.ABORT)
            else:
                self._scheduler.remove(live.sequence)

    def _end_all(self, fault: DeviceFaultError) -> None:
        """Answers everybody. The cache is lost, and nothing is asked of it."""
        self._fault = fault
        self._in_flight.clear()
        self._scheduler.drop_all()
        for request in self._live.values():
            for live in request.sequences:
                if live.finish_reason is None:
                    live.error = str(fault)
                    self._finish(live, FinishReason.ERROR)
