"""The front end's way to the engine process, whichever runs at the time.

Owns the requests that are under way there, and what each is told when the engine process is lost. Does not know HTTP,
nor who starts the process: that is `supervisor`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from sightline.core.metrics import EngineMetrics
from sightline.core.request import Terms
from sightline.server.process.frames import LENGTH_BYTES, TOKEN_BYTES
from sightline.server.process.protocol import (
    REPORT_BYTES,
    Accepted,
    Cancel,
    Command,
    Delta,
    Ended,
    Failed,
    Loading,
    Opened,
    Probe,
    Progress,
    Read,
    Refused,
    Report,
    Stop,
    Submit,
    Vector,
    command_codec,
    report_codec,
)
from sightline.server.process.timing import RequestTimes, TokenTimes
from sightline.server.process.window import ReadCount, UnreadLimit

MAX_BUFFERED_COMMANDS = 1 << 26
"""Bytes that may wait to be sent; an engine process that reads nothing is given no more."""
RequestReport: TypeAlias = Accepted | Refused | Delta | Ended | Vector


class EngineDownError(Exception):
    """There is no engine process that could do it, or it was lost meanwhile."""


class EngineStartError(Exception):
    """The engine process said why it cannot start."""


class RefusedError(Exception):
    """The engine will not run a request."""

    def __init__(self, message: str, *, is_full: bool) -> None:
        super().__init__(message)
        self.is_full = is_full


class RequestFailedError(Exception):
    """The engine could not finish a request."""


class AnswerTooLargeError(Exception):
    """So much of the answers waits to be read or sent that there is no room for more."""


class UnreadBytes(Protocol):
    """Counts the bytes of reports that wait to be read or sent."""

    def take(self, count: int) -> bool:
        """Counts more; returns False if there is no room for them."""

    def give_back(self, count: int) -> None: ...


class Answers:
    """The requests that one client's request became, under way together.

    Their reports are read once, in order. Reading raises `AnswerTooLargeError` if there was no room for a report.
    """

    def __init__(
        self,
        prompt_lens: Mapping[int, int],
        received_at: float,
        unread: UnreadBytes,
        acknowledge: Callable[[Read], None],
        limit: UnreadLimit | None = None,
    ) -> None:
        """`prompt_lens` are the prompts' numbers of tokens, by the requests' numbers.

        `acknowledge` is called when enough deltas of a prompt have been read that its request may have to run on.
        `limit` is how much of each may be unread; None if the answer is sent as a whole, and what was read counts until
        then.
        """
        self.prompt_lens = prompt_lens
        self.places = {number: place for place, number in enumerate(prompt_lens)}
        """The index of the prompt for each number."""
        self.received_at = received_at
        """When the client's request came in."""
        self.times = RequestTimes(time.monotonic())
        self.token_times: dict[int, dict[int, TokenTimes]] = {number: {} for number in prompt_lens}
        """By number and continuation. A prompt that has ended has none."""
        self._unread = unread
        self._reports: asyncio.Queue[RequestReport | EngineDownError | AnswerTooLargeError] = asyncio.Queue()
        self._early: deque[Delta | Ended] = deque()
        """What prompts gained before the last of them was accepted."""
        self._acknowledge = acknowledge
        self._reads = {} if limit is None else {number: ReadCount(limit) for number in prompt_lens}
        """What was read of each prompt and not acknowledged, by number; empty if the answer is sent as a whole."""

    def put(self, report: RequestReport) -> bool:
        """Takes in a report; returns False if there is no room for it: the requests are then of no more use."""
        if not self._unread.take(report.num_bytes):
            self.fail(AnswerTooLargeError("too much of the answers waits to be read; read faster, or ask for less"))
            return False
        self._reports.put_nowait(report)
        return True

    def fail(self, error: EngineDownError | AnswerTooLargeError) -> None:
        self._reports.put_nowait(error)

    async def accepted(self) -> list[bytes]:
        """The parameters that each runs with, as JSON. Raises `RefusedError` if one will not run, or
        `EngineDownError`."""
        accepted: dict[int, bytes] = {}
        while len(accepted) < len(self.places):
            match await self._next():
                case Accepted(number, sampling):
                    accepted[number] = sampling
                case Refused(is_full=is_full, message=message):
                    raise RefusedError(message, is_full=is_full)
                case Delta() | Ended() as report:
                    self._early.append(report)
                case report:
                    raise EngineDownError(f"expected every prompt to be accepted, got {type(report).__name__}")
        return [accepted[number] for number in self.places]

    async def reports(self) -> AsyncIterator[tuple[int, Delta | Ended]]:
        """Yields each report with its prompt's place, until the last prompt has ended. Raises `EngineDownError`."""
        left = len(self.places)
        while left > 0:
            match self._early.popleft() if self._early else await self._next():
                case Delta() as delta:
                    yield self.places[delta.number], delta
                    # Whoever comes back for the next report has read this one.
                    self._count_read(delta)
                case Ended() as ended:
                    left -= 1
                    yield self.places[ended.number], ended
                case report:
                    raise EngineDownError(f"expected what a request gained, got {type(report).__name__}")

    def _count_read(self, delta: Delta) -> None:
        if not self._reads:
            # Only its contents are kept: a long answer is few objects.
            self._unread.give_back(REPORT_BYTES)
            return
        self._unread.give_back(delta.num_bytes)
        if (batch := self._reads[delta.number].read(delta.num_content_bytes)) is not None:
            self._acknowledge(Read(delta.number, batch.num_reports, batch.num_bytes))

    async def vectors(self) -> list[Vector]:
        """Every text's vector, in order.

        Raises `RefusedError` if one will not be embedded, `RequestFailedError` if one could not be, or
        `EngineDownError`.
        """
        found: dict[int, Vector] = {}
        left = len(self.places)
        while left > 0:
            match await self._next():
                case Accepted():
                    pass
                case Vector() as vector:
                    found[self.places[vector.number]] = vector
                case Ended(error=None):
                    left -= 1
                case Ended(error=error):
                    raise RequestFailedError(error)
                case Refused(is_full=is_full, message=message):
                    raise RefusedError(message, is_full=is_full)
                case report:
                    raise EngineDownError(f"expected a vector, got {type(report).__name__}")
        return [found[place] for place in range(len(found))]

    async def _next(self) -> RequestReport:
        report = await self._reports.get()
        if isinstance(report, EngineDownError | AnswerTooLargeError):
            raise report
        return report


class TrafficMeter(Protocol):
    """Counts the reports that pass, for metrics."""

    def observe(self, report: RequestReport, answers: Answers, now: float) -> None: ...

    def took_in(self, metrics: EngineMetrics) -> None: ...

    def engine_started(self) -> None: ...

    def engine_lost(self) -> None: ...


class EnginePort:
    """Takes requests for the engine process, and brings its reports to those who asked."""

    def __init__(self, meter: TrafficMeter) -> None:
        self._meter = meter
        self._numbers = itertools.count(1)
        self._answers: dict[int, Answers] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._commands = command_codec()
        self._loading = asyncio.Event()
        self._open = asyncio.Event()
        self._heard = asyncio.Event()
        self._num_steps = 0
        """Steps of the engine process that were reported."""
        self.doing = ""
        """What an engine process that is being built said last of what it does."""
        self.opened: Opened | None = None
        """What the engine process that runs, or ran last, said of itself."""
        self.heard_at = -float("inf")
        """When a step was last known to have gone through."""

    @property
    def is_open(self) -> bool:
        """True where requests can be submitted."""
        return self._open.is_set()

    @property
    def num_under_way(self) -> int:
        return len(self._answers)

    @property
    def is_loading(self) -> bool:
        """True once an engine process has found that it can load the model."""
        return self._loading.is_set()

    async def until_loading(self) -> None:
        await self._loading.wait()

    async def until_open(self) -> None:
        await self._open.wait()

    def submit(
        self,
        prompts: Sequence[bytes],
        params: bytes | None,
        terms: Terms,
        received_at: float,
        unread: UnreadBytes,
        max_unread: UnreadLimit | None = None,
    ) -> Answers:
        """Sends prompts to continue, or, without `params`, texts to embed; `unread` counts the bytes of their reports.

        A prompt pauses while `max_unread` of its deltas is unread, if that is given. Raises `EngineDownError` if there
        is no engine process.
        """
        numbered = {next(self._numbers): prompt for prompt in prompts}
        self._send([Submit(numbered, params, terms, max_unread)])
        lengths = {number: len(prompt) // TOKEN_BYTES for number, prompt in numbered.items()}
        answers = Answers(lengths, received_at, unread, self._tell_read, max_unread)
        self._answers |= dict.fromkeys(numbered, answers)
        return answers

    def cancel(self, answers: Answers) -> None:
        """Ends what nobody waits for; what is over already is left alone."""
        running = [number for number in answers.places if self._answers.pop(number, None) is not None]
        if running and self._writer is not None:
            # However much waits to be sent: a cancellation is small, and frees what is large.
            self._writer.write(self._commands.encode([Cancel(number) for number in running]))

    def _tell_read(self, read: Read) -> None:
        """Sends it however much waits to be sent, as with a cancellation. What is over already needs no room."""
        if read.number in self._answers and self._writer is not None:
            self._writer.write(self._commands.encode([read]))

    async def probe(self, seconds: float) -> bool:
        """True where a step goes through within so long."""
        self._heard.clear()
        try:
            self._send([Probe()])
            async with asyncio.timeout(seconds):
                await self._heard.wait()
        except (EngineDownError, TimeoutError):
            return False
        return True

    def stop(self) -> None:
        """Tells the engine process to end."""
        if self._writer is not None and self._open.is_set():
            self._writer.write(self._commands.encode([Stop()]))

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: Command) -> None:
        """Serves one connection to its end; then everybody who waits is told.

        Raises `ProtocolError`, and `EngineStartError` where the engine process says that it cannot start.
        """
        codec = report_codec()
        self._writer = writer
        writer.write(self._commands.encode([first]))
        try:
            while True:
                header = await reader.readexactly(LENGTH_BYTES)
                reports = codec.decode(await reader.readexactly(codec.length(header)))
                now = time.monotonic()
                for report in reports:
                    self._take(report, now)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._lose()

    def _take(self, report: Report, now: float) -> None:
        match report:
            case Accepted() | Delta() | Vector():
                self._pass_on(report, self._answers.get(report.number), now)
            case Ended():
                answers = self._answers.pop(report.number, None)
                if answers is not None:
                    answers.times.take(report.phases)
                self._pass_on(report, answers, now)
            case Refused():
                self._pass_on(report, self._answers.pop(report.number, None), now)
            case Progress(metrics):
                self._meter.took_in(metrics)
                if metrics.steps > self._num_steps:
                    self._num_steps, self.heard_at = metrics.steps, now
                    self._heard.set()
            case Loading(doing):
                self.doing = doing
                self._loading.set()
            case Opened():
                self.opened = report
                self._loading.set()
                self._meter.engine_started()
                self._num_steps = 0
                self._open.set()
            case Failed(message):
                raise EngineStartError(message)

    def _pass_on(self, report: RequestReport, answers: Answers | None, now: float) -> None:
        """Hands a report to whoever waits for it; a cancelled request has nobody."""
        if answers is not None:
            self._meter.observe(report, answers, now)
            if not answers.put(report):
                self.cancel(answers)

    def give_up(self, why: str) -> None:
        """Tells everybody who waits that nothing more will come."""
        waiting, self._answers = set(self._answers.values()), {}
        for answers in waiting:
            answers.fail(EngineDownError(why))

    def _lose(self) -> None:
        self._open.clear()
        self._writer = None
        self._meter.engine_lost()
        self.give_up("the engine process was lost while it worked on the request")

    def _send(self, commands: Sequence[Command]) -> None:
        if self._writer is None or not self._open.is_set():
            raise EngineDownError("there is no engine process at the moment")
        if self._writer.transport.get_write_buffer_size() > MAX_BUFFERED_COMMANDS:
            raise EngineDownError("the engine process reads nothing")
        self._writer.write(self._commands.encode(commands))
