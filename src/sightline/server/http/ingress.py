"""The ASGI application: the one pipeline that every request goes through.

    Host ─▶ origin ─▶ route ─▶ key ─▶ room ─▶ bytes, as they arrive ─▶ handler ─▶ answer ─▶ log, metrics, trace

If a client disconnects, its work is cancelled. A failure before the answer has begun is answered with an error body.
Does not know what routes do.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import ExitStack, aclosing
from traceback import extract_tb
from typing import Any, TypeAlias

import msgspec

from sightline.server.http.access import Access, HostList, Keyring, first_header
from sightline.server.http.bounds import UNFRAMED
from sightline.server.http.cors import CorsPolicy
from sightline.server.http.errors import ApiError, ErrorShape, unavailable
from sightline.server.http.limits import ByteBudget, HeldBytes, Limits
from sightline.server.http.routing import (
    EVENTS,
    JSON,
    NO_BODY,
    NO_STORE,
    Call,
    CallTrace,
    Header,
    Reply,
    Route,
    RouteTable,
    Stream,
)
from sightline.server.http.turns import ExchangeStage, LoopTurns
from sightline.server.logs import log
from sightline.server.metrics import ServiceMetrics
from sightline.server.traces import TracedRequest, Traces

logger = logging.getLogger("sightline.server")
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
CLOSED_BY_CLIENT = 499
PIECE_BYTES = 1 << 14
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
"""What a client may call its request: visible ASCII."""
_FIXED_HEADERS: tuple[Header, ...] = (
    (b"server", b"sightline"),
    (b"x-content-type-options", b"nosniff"),
)


class DisconnectedError(Exception):
    """The client has disconnected."""


class Ingress:
    """Checks every request in the same way before a handler sees it."""

    def __init__(
        self,
        table: RouteTable,
        keys: Keyring,
        hosts: HostList,
        limits: Limits,
        check_room: Callable[[str], None],
        metrics: ServiceMetrics,
        cors: CorsPolicy,
        traces: Traces,
    ) -> None:
        """`check_room` raises `ApiError` if a caller has no place in the queue."""
        self._table = table
        self._keys = keys
        self._hosts = hosts
        self._limits = limits
        self._check_room = check_room
        self._metrics = metrics
        self._cors = cors
        self._traces = traces
        self._bodies = ByteBudget(limits.max_held_bytes, shared=len(keys) > 1, always=limits.small_bytes)
        self._turns = LoopTurns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"expected an HTTP request, got {scope['type']}")
        exchange = Exchange(scope, receive, send, self._limits, self._turns)
        exchange.more_headers += self._cors.headers(exchange.first(b"origin"))
        try:
            await self._serve(exchange)
        except DisconnectedError:
            self._metrics.disconnected()
            exchange.status = CLOSED_BY_CLIENT
        self._metrics.answered(exchange.route_path, exchange.status)
        if exchange.route is not None and exchange.route.operation:
            self._traces.record(exchange.traced(exchange.route))
        log(
            logger,
            logging.DEBUG if exchange.is_routine else logging.INFO,
            "request",
            {
                "id": exchange.request_id,
                "method": exchange.method,
                "route": exchange.route_path,
                "status": exchange.status,
                "seconds": round(time.monotonic() - exchange.received_at, 4),
                **exchange.facts,
            },
        )

    async def _serve(self, exchange: Exchange) -> None:
        try:
            with ExitStack() as held:
                headers = self._check_head(exchange)
                granted = self._cors.preflight(exchange.method, headers)
                if granted is not None:
                    await exchange.reply(granted)
                    return
                call, route = await self._let_in(exchange, headers, held)
                await exchange.while_connected(self._answer(exchange, route, call))
        except ApiError as error:
            await exchange.refuse(error)
        except (DisconnectedError, asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # `BaseException`, because a library may raise more than `Exception`: a Rust panic, for example.
            # Log where it failed but not the message, which may contain a client's text.
            where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in extract_tb(error.__traceback__)]
            fields = {"id": exchange.request_id, "error": type(error).__name__, "where": where}
            log(logger, logging.ERROR, "handler failed", fields)
            await exchange.refuse(
                ApiError(500, f"internal error; see the log for request {exchange.request_id}", kind="server_error")
            )

    def _check_head(self, exchange: Exchange) -> Mapping[bytes, bytes]:
        """Makes the checks that every request has to pass. Returns its headers."""
        headers = first_header(exchange.headers)
        self._hosts.check(headers.get(b"host"))
        if headers.get(b"transfer-encoding", b"chunked").strip().lower() != b"chunked":
            message = "expected 'Transfer-Encoding: chunked' or none, got another coding; send the body as it is"
            raise ApiError(501, message, code="unsupported_encoding")
        return headers

    async def _let_in(self, exchange: Exchange, headers: Mapping[bytes, bytes], held: ExitStack) -> tuple[Call, Route]:
        """Makes every check that comes before the handler. `held` is closed once the request is answered."""
        try:
            route, tail = self._table.find(exchange.method, exchange.raw_path)
        except ApiError:
            # Only callers with a key learn which paths exist.
            self._caller(headers)
            raise
        exchange.take_route(route)
        if route.access is Access.KEY:
            exchange.caller = self._caller(headers)
            await self._turns.take(exchange.caller, ExchangeStage.BEGINS)
        caller = exchange.caller
        if route.holds_room:
            self._check_room(caller)
        body = b""
        if route.body is not NO_BODY:
            _check_content(headers)
            # Held until the request is answered: what was read from the body lives that long.
            body = await exchange.read_body(headers, held.enter_context(self._bodies.opened(caller)))
        call = Call(
            body,
            caller,
            exchange.request_id,
            exchange.answer_id,
            exchange.received_at,
            tail,
            exchange.facts,
            exchange.more_headers,
            held,
            exchange.trace,
        )
        return call, route

    def _caller(self, headers: Mapping[bytes, bytes]) -> str:
        return self._keys.caller(headers.get(b"authorization"), headers.get(b"x-api-key"))

    async def _answer(self, exchange: Exchange, route: Route, call: Call) -> None:
        outcome = await route.handler(call)
        match outcome:
            case Reply():
                await exchange.reply(outcome)
            case Stream():
                await exchange.stream(outcome)


class Exchange:
    """One request and its answer, on the wire."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits, turns: LoopTurns) -> None:
        self._receive = receive
        self._send_event = send
        self._send_unframed: Send = scope.get("extensions", {}).get(UNFRAMED, send)
        self._limits = limits
        self._turns = turns
        self._body_is_read = False
        self._has_begun = False
        self._has_left = False
        self._server: tuple[str, int] = scope.get("server") or ("", 0)
        self.method: str = scope["method"]
        self.raw_path: bytes = scope["raw_path"]
        self.headers: list[Header] = scope["headers"]
        self.received_at = time.monotonic()
        self.answer_id = secrets.token_hex(12)
        given = self.first(b"x-request-id") or b""
        self.request_id = given.decode() if _REQUEST_ID.fullmatch(given) else self.answer_id
        self.status = 0
        self.caller = ""
        """Whose key the request has; empty without one."""
        self.route: Route | None = None
        self.route_path = "none"
        """The path as written in the table of routes, never as a client sent it."""
        self.trace = CallTrace()
        self.is_routine = False
        self.more_headers: list[Header] = [(b"x-request-id", self.request_id.encode())]
        # If the client named its request, the log also has the id of the answer.
        self.facts: dict[str, object] = {} if self.request_id == self.answer_id else {"answer_id": self.answer_id}
        self._announces_body = any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.headers
        )

    def first(self, name: bytes) -> bytes | None:
        """The value of a header, of the first one if it is repeated."""
        return next((value for each, value in self.headers if each == name), None)

    def traced(self, route: Route) -> TracedRequest:
        """What a trace tells of the request, once it is answered."""
        sent = {name: self.first(name.encode()) for name in ("traceparent", "tracestate")}
        parent = {name: value.decode("latin-1") for name, value in sent.items() if value is not None}
        now = time.monotonic()
        return TracedRequest(
            route, self._server, self.request_id, self.status, self.received_at, now, parent, self.facts, self.trace
        )

    def take_route(self, route: Route) -> None:
        self.route = route
        self.route_path = route.path
        self.is_routine = route.access is Access.PUBLIC

    async def read_body(self, headers: Mapping[bytes, bytes], held: HeldBytes) -> bytes:
        """Reads the body. Raises `ApiError` as soon as it is too large or too late. `held` counts the bytes."""
        most = self._limits.max_body_bytes
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or len(declared) > 18 or int(declared) > most:
            raise _too_large(most)
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while not self._body_is_read:
                    event = await self._receive()
                    if event["type"] == "http.disconnect":
                        raise DisconnectedError
                    piece = event.get("body", b"")
                    if len(body) + len(piece) > most:
                        raise _too_large(most)
                    if not held.take(len(piece)):
                        raise unavailable("too many bodies are being read; try again", 1)
                    body += piece
                    self._body_is_read = not event.get("more_body", False)
        except TimeoutError as error:
            seconds = self._limits.body_seconds
            raise ApiError(
                408, f"expected the whole body within {seconds:g} s, got a part of it", code="body_timeout"
            ) from error
        return bytes(body)

    async def while_connected(self, work: Awaitable[None]) -> None:
        """Does the work, and cancels it if the client disconnects or keeps sending a body."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._disconnected())
        # Retrieve the exception even if nobody awaits this task, so that asyncio does not log it.
        leaving.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await self._turns.take(self.caller, ExchangeStage.GOES_ON)
                working.cancel()
                await asyncio.wait({working})
                leaving.result()
                raise DisconnectedError
            working.result()
        finally:
            leaving.cancel()
            working.cancel()

    async def reply(self, reply: Reply) -> None:
        caching = (b"cache-control", reply.caching)
        await self._begin(reply.status, reply.content_type, (caching, *reply.headers), len(reply.body))
        # In pieces, each after the client has read enough: only `reply.body` is held, and it is counted.
        last = max(0, len(reply.body) - PIECE_BYTES)
        for start in range(0, last, PIECE_BYTES):
            await self._send_part(reply.body[start : min(start + PIECE_BYTES, last)])
        await self._send({"type": "http.response.body", "body": reply.body[last:]})

    async def stream(self, stream: Stream) -> None:
        self._send_event = self._send_unframed
        await self._begin(200, EVENTS, ((b"cache-control", NO_STORE), *stream.headers), None)
        async with aclosing(stream.events) as events:
            async for event in events:
                # The last event of a response holds all of it.
                for start in range(0, len(event), PIECE_BYTES):
                    await self._send_part(event[start : start + PIECE_BYTES])
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, error: ApiError) -> None:
        """Sends the error's body. If an answer has begun, only closes the connection."""
        if self._has_begun:
            return
        shape = ErrorShape.OPENAI if self.route is None else self.route.error_shape
        await self.reply(Reply(error.body(shape, self.request_id), error.status, JSON, error.headers))

    async def _begin(self, status: int, content_type: str, headers: tuple[Header, ...], length: int | None) -> None:
        self.status, self._has_begun = status, True
        sized = [] if length is None else [(b"content-length", str(length).encode())]
        kind = (b"content-type", content_type.encode())
        if self._announces_body and not self._body_is_read:
            # Close the connection instead of reading the rest of the body.
            sized.append((b"connection", b"close"))
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*_FIXED_HEADERS, kind, *sized, *self.more_headers, *headers],
            }
        )

    async def _send(self, event: MutableMapping[str, Any]) -> None:
        await self._send_event(event)

    async def _send_part(self, part: bytes) -> None:
        """Sends a part of an answer that goes on.

        Raises `DisconnectedError` if the client has left: uvicorn discards what is sent to it, and does not tell.
        """
        await self._send({"type": "http.response.body", "body": part, "more_body": True})
        # Sending to a client that reads fast, or has left, never waits: let others' work come in between.
        await self._turns.take(self.caller, ExchangeStage.GOES_ON)
        if self._has_left:
            raise DisconnectedError

    async def _disconnected(self) -> None:
        """Returns when the client disconnects. Raises `ApiError` if it keeps sending a body that is too large."""
        size = 0
        while (event := await self._receive())["type"] != "http.disconnect":
            size += len(event.get("body", b""))
            if size > self._limits.max_body_bytes:
                raise _too_large(self._limits.max_body_bytes)
        self._has_left = True


def _check_content(headers: Mapping[bytes, bytes]) -> None:
    """Guards against CSRF: a browser sends JSON to another site only after a preflight request, see `CorsPolicy`."""
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != JSON.encode():
        raise ApiError(
            415,
            f"expected the header 'Content-Type: application/json', got {kind.decode('ascii', 'replace')[:80]!r}",
            code="unsupported_media_type",
        )
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "Content-Encoding is not supported; send the body as it is", code="unsupported_encoding")


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"expected a body of at most {most:,} bytes, got more", code="body_too_large")


def json_reply(value: object) -> Reply:
    return Reply(msgspec.json.encode(value))
