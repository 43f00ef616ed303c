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
from sightline.bench.serving.http_stream import Client, Response
from sightline.bench.serving.work import Arrivals, Ask, Endpoint, Sampling, payload
from sightline.core.errors import SightlineError

REFUSING = (429, 503)
"""Statuses of a server that is overloaded: try again later."""


class RequestOutcome(Enum):
    """How a request ended."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """The server was overloaded: 429 or 503."""
    FAILED = "failed"
    CUT = "cut"
    """Still running when the load was stopped."""


@dataclass
class RequestRecord:
    """One request and its result. Times are seconds since the load began."""

    index: int
    """Position among the requests to send."""
    due: float
    sent: float
    """When it was first sent, before connecting."""
    outcome: RequestOutcome = RequestOutcome.CUT
    status: int | None = None
    """HTTP status of the last response; None if there was none."""
    ended: float = 0.0
    """When the response was complete, before the connection was closed."""
    text: str = ""
    text_times: tuple[float, ...] = ()
    """Arrival time of each chunk with text."""
    usage: ReportedUsage | None = None
    finish_reason: str | None = None
    response_id: str | None = None
    refusals: tuple[int, ...] = ()
    """Status of each refusal; several if the request was sent again."""
    error: str | None = None

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
    records: tuple[RequestRecord, ...]
    """One per request that was sent, in order."""
    seconds: float
    peak_concurrency: int
    """Most requests that the server had at once."""
    client_seconds: float
    """Processor time that this client used."""
    stopped: bool
    """Whether it was stopped before every request had ended."""

    def with_outcome(self, outcome: RequestOutcome) -> list[RequestRecord]:
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
    on_record: Callable[[RequestRecord], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadResult:
    """Sends every request when it is due, and returns when all have ended.

    Each request has `timeout` seconds. With `retry`, a refused request is sent again after the server's Retry-After, if
    that is within its timeout. When `stop` is set, nothing more is sent and running requests are cut.
    """
    sampling, arrivals = sampling or Sampling(), arrivals or Arrivals()
    bodies = [payload(ask, index, model, endpoint, sampling, stream=True) for index, ask in enumerate(asks)]
    gate = asyncio.Semaphore(arrivals.max_concurrency or max(1, len(bodies)))
    sender = _Sender(client, endpoint, timeout, retry, gate, on_record, clock)
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


@dataclass
class _Sender:
    """A running load."""

    client: Client
    endpoint: Endpoint
    timeout: float
    retry: bool
    gate: asyncio.Semaphore
    on_record: Callable[[RequestRecord], None] | None
    clock: Callable[[], float]
    start: float = 0.0
    running: int = 0
    peak: int = 0
    records: dict[int, RequestRecord] = field(default_factory=dict)

    async def send_all(self, bodies: Sequence[bytes], offsets: Sequence[float]) -> None:
        self.start = self.clock()
        async with asyncio.TaskGroup() as group:
            for index, (body, due) in enumerate(zip(bodies, offsets, strict=True)):
                if (early := due - self._now()) > 0:
                    await asyncio.sleep(early)
                group.create_task(self._send(index, body, due))

    def _now(self) -> float:
        return self.clock() - self.start

    async def _send(self, index: int, body: bytes, due: float) -> None:
        async with self.gate:
            record = RequestRecord(index, due, self._now())
            try:
                await self._run(record, body)
            except asyncio.CancelledError:
                record.outcome, record.error = RequestOutcome.CUT, "the load was stopped"
                raise
            finally:
                record.ended = record.ended or self._now()
                assert index not in self.records, f"request {index} ended twice"
                self.records[index] = record
                if self.on_record is not None:
                    self.on_record(record)

    async def _run(self, record: RequestRecord, body: bytes) -> None:
        """Sends a request until it is answered, fails or runs out of time."""
        deadline = asyncio.timeout(self.timeout)
        try:
            async with deadline:
                while True:
                    record.outcome, record.error, wait = await self._attempt(record, body)
                    is_over = self._now() + wait > record.sent + self.timeout
                    if record.outcome is not RequestOutcome.REFUSED or not self.retry or is_over:
                        return
                    await asyncio.sleep(wait)
        except (OSError, SightlineError) as raised:
            record.outcome, record.error = RequestOutcome.FAILED, str(raised) or type(raised).__name__
            if deadline.expired():
                record.error = f"expected an end within {self.timeout:g} s, got none; allow more time with --timeout"

    async def _attempt(self, record: RequestRecord, body: bytes) -> tuple[RequestOutcome, str | None, float]:
        """Sends a request once. Returns its outcome, its error, and the seconds to wait before sending it again."""
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            async with self.client.exchange("POST", self.endpoint.value, body) as response:
                record.status = response.status
                if response.status != 200:
                    error = refusal(response.status, await response.read())
                    if response.status not in REFUSING:
                        return RequestOutcome.FAILED, error, 0.0
                    record.refusals += (response.status,)
                    return RequestOutcome.REFUSED, error, seconds_to_wait(response.headers.get("retry-after"))
                kind = response.headers.get("content-type", "nothing")
                if not kind.startswith("text/event-stream"):
                    return RequestOutcome.FAILED, f"expected a stream of events, got {kind}", 0.0
                await self._read_stream(record, response)
                record.ended = self._now()
                return RequestOutcome.COMPLETED, None, 0.0
        finally:
            self.running -= 1

    async def _read_stream(self, record: RequestRecord, response: Response) -> None:
        """Reads an answer into the record, even if it breaks off."""
        answer = StreamedAnswer()
        try:
            while content := await response.read_some():
                answer.take(content, self._now())
            answer.end()
        finally:
            record.text, record.text_times = "".join(answer.pieces), tuple(answer.times)
            record.usage, record.finish_reason = answer.usage, answer.finish_reason
            record.response_id = answer.response_id
