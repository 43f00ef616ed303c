"""A front end whose desks and engine are objects of the same process: tests look into it, and plant faults in it.

Everything from the ASGI application to the frames of the engine process is real. Nothing is computed: every step of
an answer repeats the prompt's text.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
import msgspec

from sightline.core.config import EngineConfig
from sightline.core.conversation import AnswerEvent, EventKind
from sightline.core.metrics import PhaseSeconds
from sightline.core.request import SamplingParams
from sightline.server.desks.pool import DeskLostError, DeskPool, JobTimeoutError, NoRoomError, Ticket
from sightline.server.desks.protocol import Job, Result, Setup
from sightline.server.desks.worker import BodyDesk
from sightline.server.http.limits import Limits
from sightline.server.process.child import Child
from sightline.server.process.frames import LENGTH_BYTES, unpack_tokens
from sightline.server.process.protocol import (
    Accepted,
    Cancel,
    Command,
    Configure,
    Delta,
    Ended,
    Opened,
    Read,
    Report,
    Submit,
    Vector,
    command_codec,
    report_codec,
)
from sightline.server.serve import Server, ServerConfig
from support.fake_engine import MAX_MODEL_LEN, MAX_ROWS, VOCAB_SIZE, tokenizer_data

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds that a test waits for what must come."""
MAX_QUEUED = 4
VECTOR_SIZE = 4


async def within(work: Awaitable[T], what: str) -> T:
    """The result of `work`. Fails, naming what did not come, if it takes too long."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await work
    except TimeoutError as error:
        raise AssertionError(f"expected {what}, got nothing") from error


def opened(*, embeds: bool = False) -> Opened:
    return Opened(
        "m",
        msgspec.msgpack.encode(tokenizer_data()),
        VOCAB_SIZE,
        VECTOR_SIZE if embeds else None,
        MAX_MODEL_LEN,
        MAX_ROWS,
        MAX_QUEUED,
        {},
        (),
        (),
        (),
    )


@dataclass(frozen=True)
class Script:
    """What an answer says, a delta for each step, and how it ends."""

    steps: Sequence[Sequence[AnswerEvent]]
    finish_reason: str = "stop"
    stop_reason: str | None = None
    error: str | None = None
    num_cached: int = 0

    def reports(self, number: int) -> Iterator[Report]:
        for place, step in enumerate(self.steps, 1):
            reason = self.finish_reason if place == len(self.steps) else None
            stop = None if reason is None else self.stop_reason
            thought = sum(event.kind is EventKind.REASONING for event in step)
            yield Delta(number, 0, "", 1, reason, stop, events=tuple(step), num_reasoning=thought)
        yield Ended(number, self.error, self.num_cached, PhaseSeconds(0.0), None)


class LocalEngine:
    """The other end of a port: answers every command at once, and keeps to the windows of streams."""

    def __init__(self, told: Opened) -> None:
        self._told = told
        self.reader = asyncio.StreamReader()
        self.submitted: list[Submit] = []
        self.script: Script | None = None
        """What every answer says, instead of the prompt's text."""
        self.holds = False
        """Whether requests are accepted and then stand still."""
        self.waiting: dict[int, deque[Report]] = {}
        """The reports of the requests under way, by number."""
        self._room: dict[int, float] = {}

    @property
    def transport(self) -> LocalEngine:
        return self

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, frame: bytes) -> None:
        for command in command_codec().decode(frame[LENGTH_BYTES:]):
            self._obey(command)

    def die(self) -> None:
        self.reader.feed_eof()

    def _obey(self, command: Command) -> None:
        match command:
            case Configure():
                self._tell(self._told)
            case Submit(prompts, packed, max_unread=max_unread):
                self.submitted.append(command)
                for number, prompt in prompts.items():
                    self._tell(Accepted(number, b"{}"))
                    script = self.script
                    said = _reports(number, prompt, packed) if script is None else script.reports(number)
                    self.waiting[number] = deque(said)
                    self._room[number] = float("inf") if max_unread is None else max_unread.max_reports
                    self._go_on(number)
            case Read(number, count, _) if number in self.waiting:
                self._room[number] += count
                self._go_on(number)
            case Cancel(number):
                self.waiting.pop(number, None)
            case _:
                pass

    def _go_on(self, number: int) -> None:
        waiting = self.waiting[number]
        while waiting and self._room[number] > 0 and not self.holds:
            self._tell(waiting.popleft())
            self._room[number] -= 1
        if not waiting:
            del self.waiting[number]

    def _tell(self, report: Report) -> None:
        self.reader.feed_data(report_codec().encode([report]))


def _reports(number: int, prompt: bytes, packed: bytes | None) -> list[Report]:
    """Everything that is reported of a request."""
    if packed is None:
        return [Vector(number, bytes(4 * VECTOR_SIZE)), Ended(number, None, 0, PhaseSeconds(0.0), None)]
    params = msgspec.msgpack.decode(packed, type=SamplingParams)
    text, count = bytes(unpack_tokens(prompt)).decode(), params.max_tokens or 1
    deltas: list[Report] = [
        Delta(number, index, text, 1, "length" if step + 1 == count else None)
        for step in range(count)
        for index in range(params.n)
    ]
    return [*deltas, Ended(number, None, 0, PhaseSeconds(0.0), None)]


class LocalDesks(DeskPool):
    """Desks of this process, with the queue and the rules of the real ones."""

    def __init__(self, count: int, *, shared: bool) -> None:
        super().__init__(count, shared=shared, seconds=60.0)
        self.works = asyncio.Event()
        """Set while jobs are done; otherwise a desk that has one waits."""
        self.works.set()
        self.taken: list[Job] = []

    async def _keep(self, setup: asyncio.Future[Setup]) -> None:
        self._desk = BodyDesk(await asyncio.shield(setup))
        self.num_ready += 1
        self._ready.set()
        while True:
            with suppress(JobTimeoutError, DeskLostError):
                await self._do(None, await self._queue.take())  # type: ignore[arg-type]

    async def _exchange(self, child: Child, job: Job, ticket: Ticket | None = None) -> Result:
        del child
        self.taken.append(job)
        await self.works.wait()
        result = self._desk.do(job)
        size = len(self._results.encode([result])) - LENGTH_BYTES
        if ticket is not None and (ticket.result.done() or not ticket.take_room(size)):
            raise NoRoomError(size)
        return result


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def value(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """Of an error."""
        return str(self.value["error"]["message"])

    @property
    def events(self) -> list[Any]:
        """The events of a stream, without `[DONE]`."""
        return [json.loads(each) for each in self._lines if each != "[DONE]"]

    @property
    def is_done(self) -> bool:
        return self._lines[-1:] == ["[DONE]"]

    @property
    def _lines(self) -> list[str]:
        return [each.removeprefix("data: ") for each in self.body.decode().split("\n\n") if each]


class Client:
    """One request on a connection of its own."""

    def __init__(self, front_end: LocalFrontEnd, method: str, path: str, body: bytes, key: str | None) -> None:
        self.reads = asyncio.Event()
        """Set while the client takes what is sent."""
        self.reads.set()
        self._left = asyncio.Event()
        self._body: list[bytes] = [body]
        self._status = 0
        self._headers: dict[str, str] = {}
        self._received = bytearray()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        headers += [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
        scope = {"type": "http", "method": method, "raw_path": path.encode(), "headers": headers}
        self._serving: asyncio.Future[None] = asyncio.ensure_future(
            front_end.application(scope, self._receive, self._send)
        )

    @property
    def is_answered(self) -> bool:
        return self._serving.done()

    async def answer(self) -> Answer:
        await within(asyncio.shield(self._serving), "an answer to every request")
        return Answer(self._status, self._headers, bytes(self._received))

    async def leave(self) -> None:
        """Closes the connection."""
        self._left.set()
        await within(asyncio.shield(self._serving), "an end of a request whose client has left")

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "http.response.start":
            self._status = event["status"]
            self._headers = {name.decode(): value.decode() for name, value in event["headers"]}
            return
        self._received += event["body"]
        await self.reads.wait()


class LocalFrontEnd:
    """A server without its sockets."""

    def __init__(self, told: Opened, config: ServerConfig) -> None:
        task = "generate" if told.vector_size is None else "embed"
        self.server = Server(config, EngineConfig(task=task), lambda *_: None)
        self.service = self.server._service
        # Tests have small budgets: every byte counts.
        self.service.answers._always = 0
        self.engine = LocalEngine(told)
        self.desks = LocalDesks(config.text_processes, shared=len(config.api_keys) > 1)
        self.server._desks = self.service.desks = self.desks
        self.application: Any = self.server._http.config.app

    def ask(self, path: str, fields: Mapping[str, object], key: str | None = None) -> Client:
        return Client(self, "POST", path, json.dumps(fields).encode(), key)

    async def get(self, path: str, key: str | None = None, method: str = "GET") -> Answer:
        return await Client(self, method, path, b"", key).answer()

    def transport(self) -> httpx2.AsyncClient:
        """What other projects' clients send their requests with."""
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(self.application))

    @property
    def held(self) -> dict[str, int]:
        """What requests hold: nothing, where none is open."""
        return {
            "places": self.service.num_under_way,
            "bytes of bodies": self.application._bodies.num_held,
            "bytes of answers": self.service.answers.num_held,
            "requests": len(self.engine.waiting),
        }

    @property
    def is_at_rest(self) -> bool:
        return not any(self.held.values())


@asynccontextmanager
async def local_front_end(
    told: Opened | None = None, limits: Limits | None = None, **config: Any
) -> AsyncIterator[LocalFrontEnd]:
    """`config` are settings of `ServerConfig`."""
    made = LocalFrontEnd(told or opened(), ServerConfig(limits=limits or Limits(), **config))
    server = made.server
    server._setup = asyncio.get_running_loop().create_future()
    writer: Any = made.engine
    running = [
        asyncio.ensure_future(made.desks.run(server._setup)),
        asyncio.ensure_future(server._port.attend(made.engine.reader, writer, Configure(EngineConfig(), "info"))),
    ]
    try:
        await within(server._announce("http://localhost"), "a server that opens")
        yield made
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
