"""The front end's way to the engine process, whichever runs at the time.

Owns the requests that are under way there, and what each is told when the engine process is lost. Does not know HTTP,
nor who starts the process: that is `supervisor`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol, TypeAlias

from sightline.core.metrics import EngineMetrics
from sightline.core.request import EffectiveParams, SamplingParams, Terms
from sightline.server.process.protocol import (
    LENGTH_BYTES,
    Accepted,
    Cancel,
    Command,
    Delta,
    Ended,
    Failed,
    Opened,
    Probe,
    Progress,
    Refused,
    Report,
    Stop,
    Submit,
    Vector,
    command_codec,
    report_codec,
)

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


class Answers:
    """The requests that one client's request became, under way together. Their reports are read once, in order."""

    def __init__(self, prompt_lens: Mapping[int, int], received_at: float) -> None:
        """`prompt_lens` are the prompts' numbers of tokens, by the requests' numbers."""
        self.prompt_lens = prompt_lens
        self.places = {number: place for place, number in enumerate(prompt_lens)}
        """By number, which of the prompts it is."""
        self.received_at = received_at
        """When the client's request came in."""
        self.last_at: dict[tuple[int, int], float] = {}
        """By number and continuation, when its last token came."""
        self._reports: asyncio.Queue[RequestReport | EngineDownError] = asyncio.Queue()

    def put(self, report: RequestReport | EngineDownError) -> None:
        self._reports.put_nowait(report)

    async def accepted(self) -> list[EffectiveParams]:
        """The parameters that each runs with. Raises `RefusedError` if one will not run, or `EngineDownError`."""
        accepted: dict[int, EffectiveParams] = {}
        while len(accepted) < len(self.places):
            match await self._next():
                case Accepted(number, EffectiveParams() as params):
                    accepted[number] = params
                case Refused(is_full=is_full, message=message):
                    raise RefusedError(message, is_full=is_full)
                case report:
                    raise EngineDownError(f"expected every prompt to be accepted first, got {type(report).__name__}")
        return [accepted[number] for number in self.places]

    async def reports(self) -> AsyncIterator[tuple[int, Delta | Ended]]:
        """With the prompt's place: to the end of the last. Raises `EngineDownError`."""
        left = len(self.places)
        while left > 0:
            match await self._next():
                case Delta() as delta:
                    yield self.places[delta.number], delta
                case Ended() as ended:
                    left -= 1
                    yield self.places[ended.number], ended
                case report:
                    raise EngineDownError(f"expected what a request gained, got {type(report).__name__}")

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
        if isinstance(report, EngineDownError):
            raise report
        return report


class TrafficMeter(Protocol):
    """Who counts what goes by."""

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
        self._open = asyncio.Event()
        self._heard = asyncio.Event()
        self._num_steps = 0
        """That the engine process has made, as far as is known."""
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

    async def until_open(self) -> None:
        await self._open.wait()

    def submit(
        self, prompts: Sequence[tuple[int, ...]], params: SamplingParams | None, terms: Terms, received_at: float
    ) -> Answers:
        """Sends prompts to continue, or, without `params`, texts to embed. Raises `EngineDownError` if there is no
        engine process."""
        numbered = {next(self._numbers): prompt for prompt in prompts}
        self._send([Submit(numbered, params, terms)])
        answers = Answers({number: len(prompt) for number, prompt in numbered.items()}, received_at)
        self._answers |= dict.fromkeys(numbered, answers)
        return answers

    def cancel(self, answers: Answers) -> None:
        """Ends what nobody waits for; what is over already is left alone."""
        running = [number for number in answers.places if self._answers.pop(number, None) is not None]
        if running and self._writer is not None:
            # However much waits to be sent: a cancellation is small, and frees what is large.
            self._writer.write(self._commands.encode([Cancel(number) for number in running]))

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
            case Ended() | Refused():
                self._pass_on(report, self._answers.pop(report.number, None), now)
            case Progress(metrics):
                self._meter.took_in(metrics)
                if metrics.steps > self._num_steps:
                    self._num_steps, self.heard_at = metrics.steps, now
                    self._heard.set()
            case Opened():
                self.opened = report
                self._meter.engine_started()
                self._num_steps = 0
                self._open.set()
            case Failed(message):
                raise EngineStartError(message)

    def _pass_on(self, report: RequestReport, answers: Answers | None, now: float) -> None:
        """A report on what was cancelled has nobody to go to."""
        if answers is not None:
            self._meter.observe(report, answers, now)
            answers.put(report)

    def give_up(self, why: str) -> None:
        """Tells everybody who waits that nothing more will come."""
        waiting, self._answers = set(self._answers.values()), {}
        for answers in waiting:
            answers.put(EngineDownError(why))

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
