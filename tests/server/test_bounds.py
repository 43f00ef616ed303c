"""Limits of connections that the attacks on a whole server do not time: slow readers, HTTP/1.0 and encodings."""

from __future__ import annotations

import asyncio
import json
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from uvicorn.server import ServerState

from sightline.server.http.bounds import NOTSENT_LOWAT, UNSENT_BYTES, BoundedProtocol, bounded
from sightline.server.serve import _listen
from support.serving import ServedProcess, fake_serving


@pytest.fixture(scope="module")
def served() -> Iterator[ServedProcess]:
    with fake_serving() as server:
        yield server


def exchanged(server: ServedProcess, body: dict[str, object], *lines: str, version: str = "1.1") -> tuple[bytes, bytes]:
    """The head and the rest of what the server sends until it closes the connection."""
    sent = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "count"}], **body}).encode()
    head = [
        f"POST /v1/chat/completions HTTP/{version}",
        *("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(sent)}", "Connection: close"),
        *lines,
    ]
    return raw(server, "\r\n".join(head).encode() + b"\r\n\r\n" + sent)


def raw(server: ServedProcess, request: bytes) -> tuple[bytes, bytes]:
    parts = urlsplit(server.url)
    with socket.create_connection((str(parts.hostname), parts.port), timeout=20) as connection:
        connection.sendall(request)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, rest = received.partition(b"\r\n\r\n")
    return head.lower(), rest


def test_a_stream_to_an_http_1_0_client_has_no_chunks_and_ends_with_the_connection(served: ServedProcess) -> None:
    head, rest = exchanged(served, {"stream": True, "max_tokens": 5}, version="1.0")
    assert b"200 ok" in head
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    events = rest.decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    texts = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in texts if chunk["choices"])
    assert said == "0 1 2 3 4 "


@pytest.mark.parametrize("version", ["0.9", "1.0", "2.0"])
def test_a_stream_without_chunks_ends_the_connection_even_if_the_client_would_keep_it(
    served: ServedProcess, version: str
) -> None:
    body = b'{"prompt": "a", "stream": true, "max_tokens": 2}'
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: keep-alive\r\n\r\n"
    told, rest = raw(served, head.encode() + body)
    assert b"transfer-encoding" not in told
    assert b"connection: close" in told
    assert rest.endswith(b"data: [DONE]\n\n")


def test_a_whole_answer_to_an_http_1_0_client_has_a_length(served: ServedProcess) -> None:
    head, rest = exchanged(served, {"max_tokens": 3}, version="1.0")
    assert f"content-length: {len(rest)}".encode() in head
    assert json.loads(rest)["choices"][0]["message"]["content"] == "0 1 2 "


def test_a_stream_to_an_http_1_1_client_stays_chunked(served: ServedProcess) -> None:
    head, rest = exchanged(served, {"stream": True, "max_tokens": 2})
    assert b"transfer-encoding: chunked" in head
    assert rest.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("coding", ["gzip, chunked", "identity, chunked", "deflate,chunked"])
def test_a_body_in_another_transfer_coding_is_refused(served: ServedProcess, coding: str) -> None:
    request = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Transfer-Encoding: {coding}\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n"
    )
    head, _ = raw(served, request.encode())
    assert head.split()[1] in (b"501", b"400")
    assert b"connection: close" in head


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["Content-Encoding: gzip"], b"415"),
        (["Content-Encoding: identity", "Content-Encoding: gzip"], b"400"),
        (["Content-Encoding: identity, gzip"], b"415"),
        (["Content-Encoding: identity"], b"200"),
        (["Content-Type: text/plain"], b"400"),
    ],
)
def test_every_content_encoding_counts(served: ServedProcess, lines: list[str], status: bytes) -> None:
    assert exchanged(served, {"max_tokens": 1}, *lines)[0].split()[1] == status


@pytest.mark.skipif(NOTSENT_LOWAT is None, reason="the system has no such limit")
def test_the_system_keeps_a_bounded_amount_for_each_client() -> None:
    with _listen("127.0.0.1", 0) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            accepted.setblocking(False)
            num_taken = 0
            while select.select([], [accepted], [], 0.5)[1]:
                num_taken += accepted.send(b"x" * 1024)
            assert num_taken < 4 * UNSENT_BYTES


class SlowWire(asyncio.Transport):
    """A transport whose buffer a test fills and empties."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.is_aborted = 0, False

    def get_write_buffer_size(self) -> int:
        return self.size

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert (high, low) == (BoundedProtocol.write_buffer_bytes, 0)

    def write(self, data: object) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True


TAKES = {
    "nothing": ([0, 0], 1),
    "short reads that fill the buffer again": ([40 << 10], 1),
    "enough": ([70 << 10], 0),
    "enough in several reads": ([30 << 10, 30 << 10, 30 << 10], 0),
}


@pytest.mark.parametrize(("taken", "num_cut"), TAKES.values(), ids=TAKES)
def test_a_client_is_cut_unless_it_takes_enough_bytes(taken: list[int], num_cut: int) -> None:
    cuts: list[None] = []

    async def run() -> bool:
        kind = bounded(lambda: cuts.append(None))
        brief = type("Brief", (kind,), {"write_seconds": 0.2, "min_write_bytes": 64 << 10})
        protocol: BoundedProtocol = brief(uvicorn.Config(lambda *_: None, log_config=None), ServerState(), {})
        wire = SlowWire()
        protocol.connection_made(wire)
        wire.size = 100 << 10
        protocol.pause_writing()
        for size in taken:
            wire.size -= size
            protocol.resume_writing()
            wire.size = 100 << 10
            protocol.pause_writing()
        await asyncio.sleep(0.3)
        aborted = wire.is_aborted
        protocol.connection_lost(None)
        return aborted

    assert asyncio.run(run()) is bool(num_cut)
    assert len(cuts) == num_cut


class StoppedClock:
    """The time of an event loop, which a test sets, and the timers that were started."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Callable[[], None]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        self.timers.append(callback)
        return asyncio.TimerHandle(self.now + seconds, callback, (), asyncio.get_running_loop())


def test_a_client_that_stalls_for_a_moment_twice_is_not_cut_and_one_that_stays_is() -> None:
    async def run() -> None:
        protocol = BoundedProtocol(uvicorn.Config(lambda *_: None, log_config=None), ServerState(), {})
        wire, clock = SlowWire(), StoppedClock()
        protocol.connection_made(wire)
        protocol.loop = clock  # type: ignore[assignment]
        for start, end in ((0.0, 0.5), (59.5, None)):
            clock.now, wire.size = start, 2 << 10
            protocol.pause_writing()
            if end is not None:
                clock.now, wire.size = end, 0
                protocol.resume_writing()
        for now, is_aborted in ((60.0, False), (120.0, True)):
            clock.now = now
            clock.timers.pop()()
            assert wire.is_aborted is is_aborted
        protocol.connection_lost(None)

    asyncio.run(run())


def test_a_client_that_has_caught_up_is_not_measured() -> None:
    async def run() -> None:
        brief = type("Brief", (BoundedProtocol,), {"write_seconds": 0.05})
        protocol: BoundedProtocol = brief(uvicorn.Config(lambda *_: None, log_config=None), ServerState(), {})
        wire = SlowWire()
        protocol.connection_made(wire)
        wire.size = 1
        protocol.pause_writing()
        wire.size = 0
        protocol.resume_writing()
        await asyncio.sleep(0.15)
        assert not wire.is_aborted
        assert protocol._write_timer is None
        protocol.connection_lost(None)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_sent", "is_answered"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", True),
        (b"GET / HTTP/1.0\r\nHost: a\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: a\r\n", False),
        (b"", False),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\na", False),
    ],
)
def test_a_client_that_closes_its_side_gets_the_answer_to_a_get_and_its_post_is_dropped(
    request_sent: bytes, is_answered: bool
) -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.05)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def run() -> bytes:
        config, state = uvicorn.Config(slow, log_config=None), ServerState()
        loop = asyncio.get_running_loop()
        async with await loop.create_server(lambda: BoundedProtocol(config, state, {}), "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(request_sent)
            writer.write_eof()
            received = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            await asyncio.gather(*state.tasks)
            return received

    assert asyncio.run(run()).endswith(b"\r\n\r\nok") is is_answered


@pytest.mark.parametrize("size", [1, 7, 5000, 70_000])
def test_a_body_in_chunks_of_any_size_is_read_as_it_is(served: ServedProcess, size: int) -> None:
    """Large ones are parsed over several turns of the event loop, in order and to the end."""
    text = "".join(f"{number} " for number in range(12_000))
    body = json.dumps({"model": "fake", "prompt": "a", "max_tokens": 2, "user": text}).encode()
    chunks = b"".join(
        b"%x\r\n%b\r\n" % (len(piece), piece)
        for piece in (body[start : start + size] for start in range(0, len(body), size))
    )
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    status, answer = raw(served, head + chunks + b"0\r\n\r\n")
    assert b"200 ok" in status
    assert json.loads(answer)["usage"]["completion_tokens"] == 2
    # What follows the first malformed chunk is not read, wherever it stands.
    status, answer = raw(served, head + chunks + b"zz\r\n")
    assert b"400 bad request" in status
