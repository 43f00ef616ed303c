"""Load on a server: requests sent when they are due, their streams read as they come, one record for each.

    due ── waits under max_concurrency ── sent ── text ── text ── ... ── ended
                                          |- TTFT -|- ITL -|
                                          |------------ latency -------------|

Owns the sending and the records. Cheap on purpose: one task a request, one read a wake-up, one parse a chunk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from sightline.bench.serving.answers import ReportedUsage, StreamedAnswer, refusal, seconds_to_wait
from sightline.bench.serving.http_stream import Client
from sightline.bench.serving.work import Arrivals, Ask, Endpoint, Sampling, payload
from sightline.core.errors import SightlineError

REFUSING = (429, 503)
"""Statuses that say: later."""


class Outcome(Enum):
    """How a request ended."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """By an overloaded server, with 429 or 503."""
    FAILED = "failed"
    CUT = "cut"
    """Still under way when the load was stopped."""


@dataclass(frozen=True)
class Record:
    """What became of one request. Times are seconds since the load began."""

    index: int
    """Of the request among those that were to be sent."""
    outcome: Outcome
    status: int | None
    """Of the last answer; None where none came."""
    due: float
    sent: float
    """For the first time, before a connection was made."""
    ended: float
    text: str
    text_times: tuple[float, ...]
    """When each chunk that carries text came."""
    usage: ReportedUsage | None
    finish_reason: str | None
    response_id: str | None
    refusals: tuple[int, ...]
    """Statuses of the answers that said: later; more than one where it was sent again."""
    error: str | None

    @property
    def latency(self) -> float:
        """From the sending to the end of the stream."""
        return self.ended - self.sent

    @property
    def ttft(self) -> float | None:
        """From the sending to the first text; None where no text came."""
        return self.text_times[0] - self.sent if self.text_times else None

    @property
    def tpot(self) -> float | None:
        """Seconds a token behind the first; None where there are none."""
        if self.ttft is None or self.usage is None or self.usage.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.usage.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between chunks that carry text."""
        return [now - last for last, now in pairwise(self.text_times)]


@dataclass(frozen=True)
class LoadResult:
    """What became of a load."""

    num_asked: int
    records: tuple[Record, ...]
    """One for each request that was sent, in the order of the requests."""
    seconds: float
    peak_concurrency: int
    """Requests that were with the server at once."""
    client_seconds: float
    """That the processor worked here."""
    stopped: bool
    """Before everything had ended."""

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
) -> LoadResult:
    """Sends every request when it is due, and returns when all have ended.

    A request has `timeout` seconds. With `retry`, one that the server refuses is sent again when it says so, within
    that time. When `stop` is set, nothing more is sent and what is under way is cut.
    """
    sampling, arrivals = sampling or Sampling(), arrivals or Arrivals()
    bodies = [payload(ask, index, model, endpoint, sampling, stream=True) for index, ask in enumerate(asks)]
    sender = _Sender(client, endpoint, timeout, retry, arrivals.max_concurrency or len(bodies), on_record)
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
    return sender.result(len(bodies), time.thread_time() - begun, stopped)


class _Sender:
    """A load under way."""

    def __init__(
        self,
        client: Client,
        endpoint: Endpoint,
        timeout: float,
        retry: bool,
        max_concurrency: int,
        on_record: Callable[[Record], None] | None,
    ) -> None:
        self._records: dict[int, Record] = {}
        self._peak = self._under_way = 0
        self._client = client
        self._endpoint = endpoint
        self._timeout = timeout
        self._retry = retry
        self._gate = asyncio.Semaphore(max(1, max_concurrency))
        self._on_record = on_record
        self._start = time.perf_counter()

    async def send_all(self, bodies: Sequence[bytes], offsets: Sequence[float]) -> None:
        self._start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for index, (body, due) in enumerate(zip(bodies, offsets, strict=True)):
                if (early := due - self._now()) > 0:
                    await asyncio.sleep(early)
                group.create_task(self._send(index, body, due))

    def result(self, num_asked: int, client_seconds: float, stopped: bool) -> LoadResult:
        return LoadResult(
            num_asked=num_asked,
            records=tuple(record for _, record in sorted(self._records.items())),
            seconds=max((record.ended for record in self._records.values()), default=0.0),
            peak_concurrency=self._peak,
            client_seconds=client_seconds,
            stopped=stopped,
        )

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _send(self, index: int, body: bytes, due: float) -> None:
        async with self._gate:
            exchange = _Exchange(index, due, self._now())
            try:
                await self._run(exchange, body)
            except asyncio.CancelledError:
                self._keep(exchange.record(Outcome.CUT, self._now(), "the load was stopped"))
                raise

    async def _run(self, exchange: _Exchange, body: bytes) -> None:
        """To the end, with every answer on the way."""
        outcome, error = Outcome.FAILED, None
        deadline = asyncio.timeout(self._timeout)
        try:
            async with deadline:
                while True:
                    outcome, error, wait = await self._attempt(exchange, body)
                    if outcome is not Outcome.REFUSED or not self._retry or self._now() + wait > self._end_of(exchange):
                        break
                    await asyncio.sleep(wait)
        except (OSError, SightlineError) as raised:
            error = str(raised) or type(raised).__name__
            if deadline.expired():
                error = f"expected an end within {self._timeout:g} s, got none; allow more time with --timeout"
            outcome = Outcome.FAILED
        self._keep(exchange.record(outcome, self._now(), error))

    def _end_of(self, exchange: _Exchange) -> float:
        return exchange.sent + self._timeout

    async def _attempt(self, exchange: _Exchange, body: bytes) -> tuple[Outcome, str | None, float]:
        """One answer: what it is, what it says is wrong, and the seconds to wait before the next."""
        self._under_way += 1
        self._peak = max(self._peak, self._under_way)
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
                answer = exchange.answer
                while content := await response.read_some():
                    answer.take(content, time.perf_counter() - self._start)
                answer.end()
                exchange.ended = self._now()
                return Outcome.COMPLETED, None, 0.0
        finally:
            self._under_way -= 1

    def _keep(self, record: Record) -> None:
        assert record.index not in self._records, f"request {record.index} ended twice"
        self._records[record.index] = record
        if self._on_record is not None:
            self._on_record(record)


class _Exchange:
    """One request, as far as it is."""

    def __init__(self, index: int, due: float, sent: float) -> None:
        self.index = index
        self.due = due
        self.sent = sent
        self.status: int | None = None
        self.refusals: list[int] = []
        self.answer = StreamedAnswer()
        self.ended: float | None = None
        """Of a whole answer, without the closing of the connection."""

    def record(self, outcome: Outcome, now: float, error: str | None) -> Record:
        return Record(
            index=self.index,
            outcome=outcome,
            status=self.status,
            due=self.due,
            sent=self.sent,
            ended=now if self.ended is None else self.ended,
            text=self.answer.text,
            text_times=tuple(self.answer.times),
            usage=self.answer.usage,
            finish_reason=self.answer.finish_reason,
            response_id=self.answer.response_id,
            refusals=tuple(self.refusals),
            error=error,
        )
