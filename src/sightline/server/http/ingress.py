"""The ASGI application: the one pipeline that every request goes through.

    Host ─▶ route ─▶ key ─▶ room ─▶ bytes, as they arrive ─▶ JSON ─▶ handler ─▶ answer ─▶ log, metrics

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
from sightline.server.http.errors import ApiError, invalid
from sightline.server.http.limits import BodyBudget, Limits, parse
from sightline.server.http.routing import EVENTS, JSON, NO_BODY, Call, Header, Reply, Route, RouteTable, Stream
from sightline.server.logs import log
from sightline.server.metrics import ServiceMetrics

logger = logging.getLogger("sightline.server")
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
CLOSED_BY_CLIENT = 499
_ECHOABLE = re.compile(rb"[\x21-\x7e]{1,128}")
_FIXED_HEADERS: tuple[Header, ...] = (
    (b"server", b"sightline"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
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
        *,
        strict: bool,
    ) -> None:
        """`check_room` raises `ApiError` if a caller has no place in the queue; `strict` refuses unused fields."""
        self._table = table
        self._keys = keys
        self._hosts = hosts
        self._limits = limits
        self._check_room = check_room
        self._metrics = metrics
        self._strict = strict
        self._bodies = BodyBudget(limits.max_held_bytes, shared=len(keys) > 1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"expected an HTTP request, got {scope['type']}")
        exchange = Exchange(scope, receive, send, self._limits)
        try:
            await self._serve(exchange)
        except DisconnectedError:
            self._metrics.disconnected()
            exchange.status = CLOSED_BY_CLIENT
        self._metrics.answered(exchange.route_path, exchange.status)
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
                call, route = await self._let_in(exchange, held)
                await exchange.while_connected(self._answer(exchange, route, call))
        except ApiError as error:
            await exchange.refuse(error)
        except DisconnectedError:
            raise
        except Exception as error:
            # Log where it failed but not the message, which may contain a client's text.
            where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in extract_tb(error.__traceback__)]
            fields = {"id": exchange.request_id, "error": type(error).__name__, "where": where}
            log(logger, logging.ERROR, "handler failed", fields)
            await exchange.refuse(
                ApiError(500, f"internal error; see the log for request {exchange.request_id}", kind="server_error")
            )

    async def _let_in(self, exchange: Exchange, held: ExitStack) -> tuple[Call[Any], Route[Any]]:
        """Makes every check that comes before the handler. `held` is closed once the request is answered."""
        headers = first_header(exchange.headers)
        self._hosts.check(headers.get(b"host"))
        try:
            route, tail = self._table.find(exchange.method, exchange.raw_path)
        except ApiError:
            # Only callers with a key learn which paths exist.
            self._keys.caller(headers.get(b"authorization"))
            raise
        exchange.take_route(route)
        caller = self._keys.caller(headers.get(b"authorization")) if route.access is Access.KEY else ""
        if route.holds_room:
            self._check_room(caller)
        body: Any = None
        if route.body is not NO_BODY:
            _check_content(headers)
            # Held until the request is answered: the parsed body lives that long.
            take = held.enter_context(self._bodies.held(caller))
            body, unused = parse(await exchange.read_body(headers, take), route.body)
            self._take_unused(exchange, unused)
        return Call(body, caller, exchange.request_id, exchange.received_at, tail, exchange.facts), route

    def _take_unused(self, exchange: Exchange, unused: list[str]) -> None:
        if not unused:
            return
        shown = ", ".join(unused[:16]) + (f" and {len(unused) - 16} more" if len(unused) > 16 else "")
        if self._strict:
            raise invalid(f"unknown fields: {shown}; leave them out (the server runs with --strict)", unused[0])
        exchange.more_headers.append((b"x-sightline-unused", shown.encode()))

    async def _answer(self, exchange: Exchange, route: Route[Any], call: Call[Any]) -> None:
        outcome = await route.handler(call)
        match outcome:
            case Reply():
                await exchange.reply(outcome)
            case Stream():
                try:
                    await exchange.stream(outcome)
                finally:
                    outcome.close()


class Exchange:
    """One request and its answer, on the wire."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self._receive = receive
        self._send_event = send
        self._limits = limits
        self._body_is_read = False
        self._has_begun = False
        self.method: str = scope["method"]
        self.raw_path: bytes = scope["raw_path"]
        self.headers: list[Header] = scope["headers"]
        self.received_at = time.monotonic()
        self.request_id = secrets.token_hex(12)
        self.status = 0
        self.route_path = "none"
        """The path as written in the table of routes, never as a client sent it."""
        self.is_routine = False
        self.more_headers: list[Header] = [(b"x-request-id", self.request_id.encode())]
        self.facts: dict[str, object] = {}
        self._announces_body = any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.headers
        )
        for name, value in self.headers:
            if name in (b"x-client-request-id", b"x-request-id") and _ECHOABLE.fullmatch(value):
                self.more_headers.append((b"x-client-request-id", value))
                break

    def take_route(self, route: Route[Any]) -> None:
        self.route_path = route.path
        self.is_routine = route.access is Access.PUBLIC

    async def read_body(self, headers: Mapping[bytes, bytes], take: Callable[[int], None]) -> bytes:
        """Reads the body. Raises `ApiError` as soon as it is too large or too late. `take` counts the bytes."""
        most = self._limits.max_body_bytes
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or len(declared) > 18 or int(declared) > most:
            raise _too_large(most)
        pieces, size = [], 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while not self._body_is_read:
                    event = await self._receive()
                    if event["type"] == "http.disconnect":
                        raise DisconnectedError
                    piece = event.get("body", b"")
                    size += len(piece)
                    if size > most:
                        raise _too_large(most)
                    take(len(piece))
                    pieces.append(piece)
                    self._body_is_read = not event.get("more_body", False)
        except TimeoutError as error:
            seconds = self._limits.body_seconds
            raise ApiError(
                408, f"expected the whole body within {seconds:g} s, got a part of it", code="body_timeout"
            ) from error
        return b"".join(pieces)

    async def while_connected(self, work: Awaitable[None]) -> None:
        """Does the work, and cancels it if the client disconnects or keeps sending a body."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._disconnected())
        # Retrieve the exception even if nobody awaits this task, so that asyncio does not log it.
        leaving.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                working.cancel()
                await asyncio.wait({working})
                leaving.result()
                raise DisconnectedError
            working.result()
        finally:
            leaving.cancel()
            working.cancel()

    async def reply(self, reply: Reply) -> None:
        await self._begin(reply.status, reply.content_type, reply.headers, len(reply.body))
        await self._send({"type": "http.response.body", "body": reply.body})

    async def stream(self, stream: Stream) -> None:
        await self._begin(200, EVENTS, stream.headers, None)
        async with aclosing(stream.events) as events:
            async for event in events:
                await self._send({"type": "http.response.body", "body": event, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, error: ApiError) -> None:
        """Sends the error's body. If an answer has begun, only closes the connection."""
        if self._has_begun:
            return
        await self.reply(Reply(error.body(), error.status, JSON, error.headers))

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

    async def _disconnected(self) -> None:
        """Returns when the client disconnects. Raises `ApiError` if it keeps sending a body that is too large."""
        size = 0
        while (event := await self._receive())["type"] != "http.disconnect":
            size += len(event.get("body", b""))
            if size > self._limits.max_body_bytes:
                raise _too_large(self._limits.max_body_bytes)


def _check_content(headers: Mapping[bytes, bytes]) -> None:
    """Guards against CSRF: a browser sends JSON to another site only after a preflight request, which is refused."""
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


def json_reply(value: object, headers: tuple[Header, ...] = ()) -> Reply:
    return Reply(msgspec.json.encode(value), headers=headers)
