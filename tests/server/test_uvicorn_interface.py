"""The parts of uvicorn that the server's limits rest on, which uvicorn does not document as an interface."""

from __future__ import annotations

import asyncio
import inspect
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from sightline.server.http.bounds import BoundedProtocol
from sightline.server.serve import _http_config, _QuietServer
from support.pinned import check_range, check_signatures, overridden

ADVICE = (
    "The limits of sightline/server/http/bounds.py on heads, connections and slow clients rest on this. Adapt "
    "BoundedProtocol, run tests/server/test_security_raw.py, then change the bounds of uvicorn in pyproject.toml."
)
PROTOCOL = {
    "connection_made": "transport",
    "connection_lost": "exc",
    "data_received": "data",
    "eof_received": "",
    "on_message_begin": "",
    "on_url": "url",
    "on_header": "name, value",
    "on_headers_complete": "",
    "on_message_complete": "",
    "send_400_response": "msg",
    "pause_writing": "",
    "resume_writing": "",
    "timeout_keep_alive_handler": "",
}
CONFIG = (
    "loop http ws lifespan log_config access_log server_header proxy_headers timeout_keep_alive "
    "timeout_graceful_shutdown"
)


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = self.is_aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed or self.is_aborted

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Recorder(HttpToolsProtocol):
    """Lists the callbacks of `PROTOCOL` in the order in which they are called."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        self.calls: list[str] = []
        super().__init__(config, state, {})


def recorded(name: str) -> Callable[..., None]:
    def method(self: Recorder, *arguments: Any) -> None:
        self.calls.append(name)
        getattr(super(Recorder, self), name)(*arguments)

    return method


for each in PROTOCOL:
    setattr(Recorder, each, recorded(each))


async def answer(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def in_a_loop(check: Callable[[Recorder, Wire, ServerState], Any], app: Any = answer) -> None:
    async def run() -> None:
        config, state, wire = uvicorn.Config(app, log_config=None, timeout_keep_alive=0), ServerState(), Wire()
        protocol = Recorder(config, state)
        protocol.connection_made(wire)
        await check(protocol, wire, state)

    asyncio.run(run())


def test_the_version_is_bounded() -> None:
    check_range("uvicorn", ADVICE)


def test_the_methods_that_are_replaced_are_there() -> None:
    assert overridden(BoundedProtocol, HttpToolsProtocol) == set(PROTOCOL), ADVICE
    check_signatures(HttpToolsProtocol, PROTOCOL, ADVICE)
    assert overridden(_QuietServer, uvicorn.Server) == {"capture_signals"}, ADVICE
    check_signatures(uvicorn.Server, {"capture_signals": "", "serve": "sockets=None"}, ADVICE)
    assert set(CONFIG.split()) <= set(inspect.signature(uvicorn.Config).parameters), ADVICE
    assert _http_config(None, BoundedProtocol).http is BoundedProtocol  # type: ignore[arg-type]


def test_a_request_goes_through_the_callbacks_in_order_and_trailers_come_after_the_headers() -> None:
    async def check(protocol: Recorder, wire: Wire, state: ServerState) -> None:
        assert protocol in state.connections, ADVICE
        assert protocol.connections is state.connections, ADVICE
        assert vars(protocol)["cycle"] is None, ADVICE
        protocol.calls.clear()
        protocol.data_received(
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nTrailer: x\r\n\r\n"
        )
        assert protocol.calls == [
            "data_received",
            "on_message_begin",
            "on_url",
            *["on_header"] * 2,
            "on_headers_complete",
            "on_header",
            "on_message_complete",
        ], ADVICE
        assert isinstance(protocol.cycle, RequestResponseCycle), ADVICE
        assert protocol.cycle.response_complete is False, ADVICE
        assert protocol.cycle.keep_alive is True, ADVICE
        cycle: RequestResponseCycle = protocol.cycle
        await asyncio.gather(*state.tasks)
        assert cycle.response_complete is True, ADVICE
        await asyncio.sleep(0.02)
        assert protocol.calls[-1] == "timeout_keep_alive_handler", ADVICE
        protocol.connection_lost(None)
        assert protocol not in state.connections, ADVICE

    in_a_loop(check)


@pytest.mark.parametrize("callback", ["on_message_begin", "on_url", "on_header"])
def test_an_error_in_a_callback_ends_parsing_and_sends_a_400(callback: str) -> None:
    async def check(protocol: Recorder, wire: Wire, state: ServerState) -> None:
        def raising(*arguments: object) -> None:
            raise ValueError

        # The parser binds the callbacks when the connection is made: replace them on a class, as BoundedProtocol does.
        replaced = type("Replaced", (HttpToolsProtocol,), {callback: raising})
        failing = replaced(protocol.config, state, {})
        failing.connection_made(wire)
        failing.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert failing.cycle is None, ADVICE
        assert b"400 Bad Request" in wire.written, ADVICE
        assert wire.is_closed, ADVICE

    in_a_loop(check)


def test_a_connection_that_may_not_be_kept_is_closed_after_its_answer() -> None:
    async def check(protocol: Recorder, wire: Wire, state: ServerState) -> None:
        protocol.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        protocol.cycle.keep_alive = False
        await asyncio.gather(*state.tasks)
        assert wire.is_closed, ADVICE

    in_a_loop(check)


def test_an_answer_of_parts_that_are_each_expected_is_sent_without_chunks_and_ends_with_the_connection() -> None:
    async def check(protocol: Recorder, wire: Wire, state: ServerState) -> None:
        protocol.data_received(b"GET / HTTP/1.0\r\nHost: a\r\n\r\n")
        assert protocol.scope["http_version"] == "1.0", ADVICE
        cycle: RequestResponseCycle = protocol.cycle
        cycle.chunked_encoding = False
        for event in (
            {"type": "http.response.start", "status": 200, "headers": []},
            {"type": "http.response.body", "body": b"one", "more_body": True},
            {"type": "http.response.body", "body": b"two!", "more_body": True},
            {"type": "http.response.body", "body": b""},
        ):
            cycle.expected_content_length = len(event.get("body", b""))  # type: ignore[arg-type]
            await cycle.send(event)  # type: ignore[arg-type]
        head, _, body = wire.written.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head, ADVICE
        assert b"connection: close" in head, ADVICE
        assert (body, wire.is_closed, cycle.response_complete) == (b"onetwo!", True, True), ADVICE

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0)

    in_a_loop(check, silent)


def test_a_full_buffer_holds_up_the_answer() -> None:
    async def check(protocol: Recorder, wire: Wire, state: ServerState) -> None:
        protocol.pause_writing()
        protocol.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        for _ in range(5):
            await asyncio.sleep(0)
        assert wire.written == b"", ADVICE
        protocol.resume_writing()
        await asyncio.gather(*state.tasks)
        assert wire.written.endswith(b"ok"), ADVICE

    in_a_loop(check)


def test_signals_stay_ours_while_uvicorn_serves() -> None:
    async def run() -> None:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        server = _QuietServer(uvicorn.Config(answer, log_config=None, lifespan="off", loop="none"))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.ensure_future(server.serve([listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            assert {number: signal.getsignal(number) for number in before} == before, ADVICE
            server.should_exit = True
            await asyncio.wait_for(serving, 5)

    asyncio.run(run())
