"""Load on a server: sends requests when they are due, reads their streams, and keeps one record per request.

    due ── waits under max_concurrency ── sent ── text ── text ── ... ── ended
                                          |- TTFT -|- ITL -|
                                          |------------ latency -------------|

Cheap by design: one task per request, one read per wake-up, one parse per chunk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from sightline.bench.serving.answers import ReportedUsage, StreamedAnswer, refusal, seconds_to_wait
from sightline.bench.serving.http_stream import Client
from sightline.bench.serving.work import Arrivals, Ask, Endpoint, Sampling, payload
from sightline.core.errors import SightlineError

REFUSING = (429, 503)
"""Statuses of a server that is overloaded: try again later."""


class Outcome(Enum):
    """How a request ended."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """The server was overloaded: 429 or 503."""
    FAILED = "failed"
    CUT = "cut"
    """Still running when the load was stopped."""


@dataclass(frozen=True)
class Record:
    """The result of one request. Times are seconds since the load began."""

    index: int
    """Position among the requests to send."""
    outcome: Outcome
    status: int | None
    """HTTP status of the last response; None if there was none."""
    due: float
    sent: float
    """When it was first sent, before connecting."""
    ended: float
    text: str
    text_times: tuple[float, ...]
    """Arrival time of each chunk with text."""
    usage: ReportedUsage | None
    finish_reason: str | None
    response_id: str | None
    refusals: tuple[int, ...]
    """Status of each refusal; several if the request was sent again."""
    error: str | None

    @property
    def latency(self) -> float:
        """Seconds from sending to the end of the stream."""
        return self.ended - self.sent

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first text; None without text."""
        return self.text_times[0] - self.sent if self.text_times else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there are none."""
        if self.ttft is None or self.usage is None or self.usage.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.usage.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive chunks with text."""
        return [now - last for last, now in pairwise(self.text_times)]


@dataclass(frozen=True)
class LoadResult:
    """The result of a load."""

    num_asked: int
    records: tuple[Record, ...]
    """One per request that was sent, in order."""
    seconds: float
    peak_concurrency: int
    """Most requests that the server had at once."""
    client_seconds: float
    """Processor time that this client used."""
    stopped: bool
    """Whether it was stopped before every request had ended."""

    def with_outcome(self, outcome: Outcome) -> list[Record]:
        return [record for record in self.records if record.outcome is outcome]


async def run_load(
    client: Client,
    asks: Sequence[Ask],
    *,
    model: str,
    endpoint: Endpoint = Endpoint.COMPLETIONS,
    sampling: Sampling | None = None,
    arrivals: Arrivals | None = None,
    timeout: float = 600.0,
    retry: bool = False,
    stop: asyncio.Event | None = None,
    on_record: Callable[[Record], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadResult:
    """Sends every request when it is due, and returns when all have ended.

    Each request has `timeout` seconds. With `retry`, a refused request is sent again after the server's Retry-After, if
    that is within its timeout. When `stop` is set, nothing more is sent and running requests are cut.
    """
    sampling, arrivals = sampling or Sampling(), arrivals or Arrivals()
    bodies = [payload(ask, index, model, endpoint, sampling, stream=True) for index, ask in enumerate(asks)]
    sender = _Sender(client, endpoint, timeout, retry, arrivals.max_concurrency or len(bodies), on_record, clock)
    begun = time.thread_time()
    sending = asyncio.create_task(sender.send_all(bodies, arrivals.offsets(len(bodies))))
    stopping = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopped = not sending.done()
        if not stopped:
            sending.result()
    finally:
        sending.cancel()
        stopping.cancel()
        await asyncio.gather(sending, stopping, return_exceptions=True)
    records = tuple(record for _, record in sorted(sender.records.items()))
    return LoadResult(
        num_asked=len(bodies),
        records=records,
        seconds=max((record.ended for record in records), default=0.0),
        peak_concurrency=sender.peak,
        client_seconds=time.thread_time() - begun,
        stopped=stopped,
    )


class _Sender:
    """A running load."""

    def __init__(
        self,
        client: Client,
        endpoint: Endpoint,
        timeout: float,
        retry: bool,
        max_concurrency: int,
        on_record: Callable[[Record], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self.records: dict[int, Record] = {}
        self.peak = self._running = 0
        self._client = client
        self._endpoint = endpoint
        self._timeout = timeout
        self._retry = retry
        self._gate = asyncio.Semaphore(max(1, max_concurrency))
        self._on_record = on_record
        self._clock = clock
        self._start = clock()

    async def send_all(self, bodies: Sequence[bytes], offsets: Sequence[float]) -> None:
        self._start = self._clock()
        async with asyncio.TaskGroup() as group:
            for index, (body, due) in enumerate(zip(bodies, offsets, strict=True)):
                if (early := due - self._now()) > 0:
                    await asyncio.sleep(early)
                group.create_task(self._send(index, body, due))

    def _now(self) -> float:
        return self._clock() - self._start

    async def _send(self, index: int, body: bytes, due: float) -> None:
        async with self._gate:
            exchange = _Exchange(index, due, self._now())
            try:
                await self._run(exchange, body)
            except asyncio.CancelledError:
                self._keep(exchange.record(Outcome.CUT, self._now(), "the load was stopped"))
                raise

    async def _run(self, exchange: _Exchange, body: bytes) -> None:
        """Sends a request until it is answered, fails or runs out of time."""
        outcome, error = Outcome.FAILED, None
        deadline = asyncio.timeout(self._timeout)
        try:
            async with deadline:
                while True:
                    outcome, error, wait = await self._attempt(exchange, body)
                    is_over = self._now() + wait > exchange.sent + self._timeout
                    if outcome is not Outcome.REFUSED or not self._retry or is_over:
                        break
                    await asyncio.sleep(wait)
        except (OSError, SightlineError) as raised:
            error = str(raised) or type(raised).__name__
            if deadline.expired():
                error = f"expected an end within {self._timeout:g} s, got none; allow more time with --timeout"
            outcome = Outcome.FAILED
        self._keep(exchange.record(outcome, self._now(), error))

    async def _attempt(self, exchange: _Exchange, body: bytes) -> tuple[Outcome, str | None, float]:
        """Sends a request once. Returns its outcome, its error, and the seconds to wait before sending it again."""
        self._running += 1
        self.peak = max(self.peak, self._running)
        try:
            async with self._client.exchange("POST", self._endpoint.value, body) as response:
                exchange.status = response.status
                if response.status != 200:
                    error = refusal(response.status, await response.read())
                    if response.status not in REFUSING:
                        return Outcome.FAILED, error, 0.0
                    exchange.refusals.append(response.status)
                    return Outcome.REFUSED, error, seconds_to_wait(response.headers.get("retry-after"))
                kind = response.headers.get("content-type", "nothing")
                if not kind.startswith("text/event-stream"):
                    return Outcome.FAILED, f"expected a stream of events, got {kind}", 0.0
                while content := await response.read_some():
                    exchange.answer.take(content, self._now())
                exchange.answer.end()
                exchange.ended = self._now()
                return Outcome.COMPLETED, None, 0.0
        finally:
            self._running -= 1

    def _keep(self, record: Record) -> None:
        assert record.index not in self.records, f"request {record.index} ended twice"
        self.records[record.index] = record
        if self._on_record is not None:
            self._on_record(record)


@dataclass
class _Exchange:
    """One request while it runs."""

    index: int
    due: float
    sent: float
    status: int | None = None
    refusals: list[int] = field(default_factory=list)
    answer: StreamedAnswer = field(default_factory=StreamedAnswer)
    ended: float | None = None
    """When the response was complete, before the connection was closed."""

    def record(self, outcome: Outcome, now: float, error: str | None) -> Record:
        return Record(
            index=self.index,
            outcome=outcome,
            status=self.status,
            due=self.due,
            sent=self.sent,
            ended=now if self.ended is None else self.ended,
            text="".join(self.answer.pieces),
            text_times=tuple(self.answer.times),
            usage=self.answer.usage,
            finish_reason=self.answer.finish_reason,
            response_id=self.answer.response_id,
            refusals=tuple(self.refusals),
            error=error,
        )
