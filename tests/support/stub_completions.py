"""A stand-in for a server of completions, in a thread: every answer is scripted, down to how its bytes are cut."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_REASONS = {200: "OK", 401: "Unauthorized", 404: "Not Found", 429: "Too Many Requests", 503: "Service Unavailable"}
_COUNTED = object()


@dataclass(frozen=True)
class Scripted:
    """One answer."""

    pieces: tuple[str, ...] = ("Paris", ", of", " course")
    whole: str | None = None
    """What a body that is not streamed says instead of the pieces."""
    first_delay: float = 0.0
    gap: float = 0.0
    """Seconds before the first piece, and before each other one and the end."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    usage: object = _COUNTED
    """Instead of as many tokens as there are pieces; None is no usage."""
    finish_reason: str | None = "length"
    done: bool = True
    dies_after: int | None = None
    """Pieces behind which the connection is closed."""
    error_after: int | None = None
    """Pieces behind which an event tells an error."""
    line_end: str = "\n"
    cut: int | None = None
    """Bytes of each chunk of the body, which goes out alone."""
    raw: bytes | None = None
    """The whole answer, head and all, instead of everything else."""

    def usage_of(self, prompt_tokens: int) -> object:
        if self.usage is not _COUNTED:
            return self.usage
        return {"prompt_tokens": prompt_tokens, "completion_tokens": len(self.pieces)}


Script = Callable[[Mapping[str, Any], int], Scripted]
"""(body of a request, how many were asked before) to the answer."""


class StubServer:
    """What it was asked, and how much of it at once."""

    def __init__(
        self,
        script: Scripted | Script,
        *,
        models: tuple[str, ...] = ("stub",),
        vocab_size: int | None = 100,
        pages: Mapping[str, bytes] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.asked: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.peak = 0
        self.port = 0
        self._open = 0
        self._script: Script = script if callable(script) else lambda _body, _number: script
        info = {} if vocab_size is None else {"vocab_size": vocab_size}
        listed = {"object": "list", "data": [{"id": name, "object": "model"} for name in models]}
        self._pages = {
            "/v1/models": json.dumps(listed).encode(),
            "/server_info": json.dumps(info).encode(),
            **(pages or {}),
        }
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def loads(self) -> list[dict[str, Any]]:
        """Bodies of requests that were streamed."""
        return [body for body in self.asked if body.get("stream")]

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024, ssl=self._tls)
        async with server:
            self.port = server.sockets[0].getsockname()[1]
            self._started.set()
            await self._stopping.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        self.peak = max(self.peak, self._open)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        method, path, _ = head.split(" ", 2)
        if method == "GET":
            page = self._pages.get(path)
            writer.write(_whole(404, b'{"detail": "Not Found"}', {}) if page is None else _whole(200, page, {}))
            return
        size = next(line for line in head.lower().splitlines() if line.startswith("content-length:"))
        body = json.loads(await reader.readexactly(int(size.partition(":")[2])))
        number = len(self.asked)
        self.asked.append(body)
        scripted = self._script(body, number)
        if scripted.raw is not None:
            writer.write(scripted.raw)
        elif scripted.status != 200:
            error = {"error": {"message": f"scripted {scripted.status}", "type": "stub", "param": None, "code": None}}
            writer.write(_whole(scripted.status, json.dumps(error).encode(), scripted.headers))
        elif body.get("stream"):
            await _stream(writer, scripted, f"stub-{number}", body)
        else:
            writer.write(_whole(200, json.dumps(_completed(scripted, body)).encode(), {}))
        await writer.drain()


@contextmanager
def stub_server(script: Scripted | Script | None = None, **settings: Any) -> Iterator[StubServer]:
    server = StubServer(script or Scripted(), **settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _whole(status: int, body: bytes, headers: Mapping[str, str]) -> bytes:
    named = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close", **headers}
    lines = [
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}",
        *(f"{name}: {value}" for name, value in named.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _completed(scripted: Scripted, body: Mapping[str, Any]) -> dict[str, object]:
    text = "".join(scripted.pieces) if scripted.whole is None else scripted.whole
    said = {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
    choice = {"index": 0, "finish_reason": scripted.finish_reason, **said}
    return {"id": "stub-whole", "choices": [choice], "usage": scripted.usage_of(_prompt_tokens(body))}


def _prompt_tokens(body: Mapping[str, Any]) -> int:
    prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


async def _stream(writer: asyncio.StreamWriter, scripted: Scripted, name: str, body: Mapping[str, Any]) -> None:
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    for sent, (wait, event) in enumerate(_events(scripted, name, body)):
        if wait:
            await asyncio.sleep(wait)
        if sent == scripted.dies_after:
            writer.transport.abort()
            return
        await _send(writer, f"data: {event}{scripted.line_end * 2}".encode(), scripted.cut)
    writer.write(b"0\r\n\r\n")


async def _send(writer: asyncio.StreamWriter, event: bytes, cut: int | None) -> None:
    size = cut or len(event)
    for at in range(0, len(event), size):
        part = event[at : at + size]
        writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        if cut is not None:
            await asyncio.sleep(0)
    await writer.drain()


def _events(scripted: Scripted, name: str, body: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    """Seconds before each event, and its data."""
    for number, piece in enumerate(scripted.pieces):
        if number == scripted.error_after:
            yield 0.0, json.dumps({"error": {"message": "scripted error in the stream", "code": 500}})
        yield (
            scripted.gap if number else scripted.first_delay,
            _chunk(name, [_choice(piece, None, body)], None),
        )
    yield scripted.gap, _chunk(name, [_choice("", scripted.finish_reason, body)], None)
    usage = scripted.usage_of(_prompt_tokens(body))
    if usage is not None:
        yield 0.0, _chunk(name, [], usage)
    if scripted.done:
        yield 0.0, "[DONE]"


def _choice(text: str, reason: str | None, body: Mapping[str, Any]) -> dict[str, object]:
    said = {"delta": {"content": text}} if "messages" in body else {"text": text}
    return {"index": 0, "finish_reason": reason, **said}


def _chunk(name: str, choices: list[dict[str, object]], usage: object) -> str:
    return json.dumps({"id": name, "object": "chunk", "choices": choices, "usage": usage}, ensure_ascii=False)
