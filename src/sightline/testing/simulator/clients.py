"""The clients of a simulated engine: they submit, stream, stop reading, cancel, disconnect and retry.

Checks that each request ends once, in time, in its turn, and with the right answer. Does not look at pages.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sightline.core.errors import EngineClosedError, QueueFullError
from sightline.core.request import SamplingParams, Terms
from sightline.testing.simulator.answers import Attempt, check_answer, check_reuse
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.faults import DEVICE_GONE
from sightline.testing.simulator.scenario import ClientSubmits
from sightline.testing.simulator.stage import Stage

_PATIENCE = 3
"""Steps that a client waits before it retries."""


@dataclass(frozen=True)
class _Retry:
    at: int
    asked: ClientSubmits
    num_tries: int


@dataclass(frozen=True)
class _Moment:
    time: float
    num_refused: int
    """Refused allocations so far."""
    num_committed: int
    """Committed steps so far."""
    num_late: int
    """Transfers so far that had not ended when they were asked for."""


class Clients:
    """All clients of one engine."""

    def __init__(self, stage: Stage, counts: EventCounts) -> None:
        self._stage = stage
        self._engine = stage.engine
        self._counts = counts
        self._live: dict[str, Attempt] = {}
        """Requests that are accepted and have not ended, by the engine's id."""
        self._attempts: list[Attempt] = []
        """All accepted requests, in order."""
        self._by_name: dict[int, Attempt] = {}
        self._retries: list[_Retry] = []
        self._began = _Moment(0.0, 0, 0, 0)
        """The moment at which the step began."""

    @property
    def next_retry(self) -> int | None:
        """The step before which the next client retries, or None."""
        return min((retry.at for retry in self._retries), default=None)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def before_step(self, step: int) -> Iterator[str]:
        """Submits the retries that are due. Yields what is wrong."""
        due = [retry for retry in self._retries if retry.at <= step]
        self._retries = [retry for retry in self._retries if retry.at > step]
        for retry in due:
            self._counts.retries += 1
            yield from self.submit(step, retry.asked, retry.num_tries)
        self._began = self._moment()

    def submit(self, step: int, asked: ClientSubmits, num_tries: int = 0) -> Iterator[str]:
        """Submits a request. Yields an error unless it is accepted exactly if the queue has room for it."""
        now, room = self._stage.faults.clock.now, self._stage.scene.max_queued - self._stage.scheduler.num_waiting
        try:
            request_id = self._engine.submit(asked.prompt, _params(asked), terms=_terms(asked))
        except QueueFullError:
            self._counts.refusals += 1
            self._retry(step, asked, num_tries)
            if asked.n <= room:
                yield f"a request of {asked.n} was refused, and the queue has room for {room}"
            return
        if asked.n > room:
            yield f"a request of {asked.n} was accepted, and the queue has room for {room}"
        self._counts.requests += 1
        attempt = Attempt(
            asked=asked,
            request_id=request_id,
            params=self._engine.params(request_id),
            arrival=len(self._attempts),
            deadline=math.inf if asked.timeout is None else now + asked.timeout,
            num_tries=num_tries,
        )
        self._attempts.append(attempt)
        self._live[request_id] = self._by_name[asked.name] = attempt

    def cancel(self, name: int) -> None:
        attempt = self._by_name.get(name)
        if attempt is not None and not attempt.is_gone:
            attempt.is_cancelled = True
            self._engine.cancel(attempt.request_id)

    def leave(self, name: int) -> None:
        """Disconnects the client of a request."""
        attempt = self._by_name.get(name)
        if attempt is not None and attempt.request_id in self._live:
            attempt.is_gone = True
            self._counts.gone_clients += 1
            self._engine.abandon(attempt.request_id)

    def stall(self, name: int) -> None:
        """Pauses a request, because its client does not read."""
        attempt = self._by_name.get(name)
        if attempt is not None:
            attempt.is_paused = True
            self._counts.pauses += attempt.request_id in self._live
            self._engine.pause(attempt.request_id)

    def read_on(self, name: int) -> None:
        """Resumes a request, paused or not."""
        attempt = self._by_name.get(name)
        if attempt is not None:
            attempt.is_paused = False
            self._engine.resume(attempt.request_id)

    def read_all(self) -> None:
        """Resumes every request."""
        for name in self._by_name:
            self.read_on(name)

    def see_running(self, step: int, replica: int, rows: Collection[int]) -> Iterator[str]:
        """Records which sequences of a replica run, just before a forward pass over its rows. Yields those that should
        not."""
        for sequence in self._stage.replicas[replica].scheduler.running:
            attempt = self._live.get(sequence.request.request_id)
            if attempt is not None:
                attempt.sequences.setdefault(sequence.index, sequence)
                if attempt.admitted_at is None:
                    attempt.admitted_at = step
                if attempt.is_paused and sequence.table_row in rows:
                    yield f"request {attempt.asked.name} is paused and runs"

    def after_step(self, step: int) -> Iterator[str]:
        """Yields everything that is wrong about which requests have ended, and how."""
        yield from self._check_turns(step)
        # The engine checks deadlines before it launches a step, and again when it commits one.
        now = self._moment()
        looked = now.time if now.num_committed > self._began.num_committed else self._began.time
        for attempt in tuple(self._live.values()):
            if attempt.is_gone:
                yield from self._forget(attempt)
                continue
            if attempt.asked.streams:
                yield from self._read(attempt)
            if self._engine.is_finished(attempt.request_id):
                yield from self._end(step, attempt)
            else:
                yield from self._check_unfinished(attempt, looked)

    def after_close(self) -> Iterator[str]:
        """Yields an error unless a closed engine has ended every request and accepts no other."""
        for attempt in tuple(self._live.values()):
            try:
                ended = self._engine.is_finished(attempt.request_id)
            except EngineClosedError:
                ended = True
            if not ended:
                yield "a request outlives the engine"
        self._live.clear()
        try:
            self._engine.submit([1], SamplingParams(max_tokens=1))
        except EngineClosedError:
            return
        yield "a closed engine accepted a request"

    def _moment(self) -> _Moment:
        faults = self._stage.faults
        num_launched = faults.num_forwards - faults.num_failed_forwards
        num_committed = num_launched - len(self._engine.in_flight)
        return _Moment(faults.clock.now, faults.num_refused, num_committed, self._counts.late_transfers)

    def _retry(self, step: int, asked: ClientSubmits, num_tries: int) -> None:
        if num_tries < asked.retries:
            self._retries.append(_Retry(step + _PATIENCE, asked, num_tries + 1))

    def _check_turns(self, step: int) -> Iterator[str]:
        """Yields an error if a request started before a more urgent one, or before an earlier one of its caller.

        Callers of equal urgency may start in any order, and so may requests of different replicas. A refused allocation
        is a reason to wait, and so is a transfer that has not ended.
        """
        new = [attempt for attempt in self._attempts if attempt.admitted_at == step]
        now = self._moment()
        if not new or now.num_refused > self._began.num_refused or now.num_late > self._began.num_late:
            return
        for waiting in self._live.values():
            if waiting.admitted_at is not None or waiting.is_gone or waiting.is_paused:
                continue
            if self._engine.is_finished(waiting.request_id):
                continue
            for other in new:
                if waiting.goes_before(other) and self._replica_of(waiting) == self._replica_of(other):
                    yield f"request {other.asked.name} was let in, and it was the turn of request {waiting.asked.name}"

    def _replica_of(self, attempt: Attempt) -> int:
        """The replica that computes a request, which has not ended."""
        return self._engine._live[attempt.request_id].sequences[0].sequence.replica

    def _check_unfinished(self, attempt: Attempt, looked: float) -> Iterator[str]:
        """`looked` is the time at which the engine last checked deadlines."""
        if attempt.is_cancelled:
            yield f"request {attempt.asked.name} was cancelled and goes on"
        if attempt.deadline < looked:
            yield f"request {attempt.asked.name} goes on after its deadline"

    def _read(self, attempt: Attempt) -> Iterator[str]:
        while (delta := self._engine.take_delta(attempt.request_id)) is not None:
            if delta.index in attempt.ended_streams:
                yield f"a stream of request {attempt.asked.name} goes on after its end"
            attempt.streamed.setdefault(delta.index, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                attempt.ended_streams.append(delta.index)

    def _forget(self, attempt: Attempt) -> Iterator[str]:
        """Yields an error unless the engine has forgotten a request whose client disconnected."""
        del self._live[attempt.request_id]
        try:
            self._engine.is_finished(attempt.request_id)
        except (ValueError, EngineClosedError):
            pass
        else:
            yield f"request {attempt.asked.name} was abandoned, and the engine keeps it"
        if any(sequence.request.request_id == attempt.request_id for sequence in self._stage.scheduler.running):
            yield f"request {attempt.asked.name} was abandoned and goes on"

    def _end(self, step: int, attempt: Attempt) -> Iterator[str]:
        """Takes the answer and checks it."""
        del self._live[attempt.request_id]
        output = self._engine.pop_output(attempt.request_id)
        is_late = attempt.deadline <= self._stage.faults.clock.now
        yield from check_answer(
            attempt,
            output,
            may_abort=attempt.is_cancelled or is_late,
            failures=attempt.failures | ({DEVICE_GONE} if self._stage.faults.device_was_lost else set()),
        )
        yield from check_reuse(attempt, output.num_cached_tokens, self._stage.scene.page_size, self._attempts)
        reasons = {answer.finish_reason for answer in output.outputs}
        if attempt.deadline < self._began.time and not reasons & {"abort", "error"}:
            yield f"request {attempt.asked.name} went on to its end, which came after its deadline"
        self._counts.cached_tokens += output.num_cached_tokens
        self._counts.forks += max(0, len(attempt.sequences) - 1)
        self._counts.spoilt_rows += output.error is not None and "NaN" in output.error
        if "error" in reasons:
            self._counts.failed_requests += 1
        elif "abort" not in reasons:
            self._counts.finished += 1
        elif attempt.is_cancelled:
            self._counts.cancels += 1
        else:
            self._counts.deadlines += 1
            self._retry(step, attempt.asked, attempt.num_tries)
            if not output.error:
                yield f"request {attempt.asked.name} ended at its deadline and does not say so"


def _params(asked: ClientSubmits) -> SamplingParams:
    return SamplingParams(
        temperature=asked.temperature,
        seed=asked.seed,
        max_tokens=asked.max_tokens,
        n=asked.n,
        stop_token_ids=asked.stop_token_ids,
        frequency_penalty=asked.frequency_penalty,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
    )


def _terms(asked: ClientSubmits) -> Terms:
    return Terms(caller=asked.caller, priority=asked.priority, timeout=asked.timeout)
