"""The table of routes, and the types that handlers take and return. Paths are compared byte by byte, as received."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import unquote

from sightline.core.errors import ConfigError
from sightline.server.http.access import Access
from sightline.server.http.errors import ApiError, ErrorShape
from sightline.server.process.timing import RequestTimes

Header: TypeAlias = tuple[bytes, bytes]
JSON, HTML, EVENTS, PLAIN = "application/json", "text/html; charset=utf-8", "text/event-stream", "text/plain"
NO_STORE = b"no-store"


@dataclass(frozen=True)
class Reply:
    """An answer that is sent as a whole."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: tuple[Header, ...] = ()
    caching: bytes = NO_STORE
    """The value of its Cache-Control header."""


@dataclass(frozen=True)
class Stream:
    """An answer of server-sent events."""

    events: AsyncGenerator[bytes, None]
    headers: tuple[Header, ...] = ()


@dataclass
class CallTrace:
    """What a handler tells of a request for its trace: names, numbers and codes, never a client's text."""

    model: str = ""
    response_id: str = ""
    sampling: bytes = b""
    """The effective sampling parameters, as JSON."""
    finish_reasons: tuple[str, ...] = ()
    times: RequestTimes | None = None


@dataclass(frozen=True)
class Call:
    """An admitted request, as a handler sees it."""

    body: bytes
    """The body as it was sent; empty if the route takes none."""
    caller: str
    """The name of the key that it came with."""
    request_id: str
    """The client's `X-Request-Id`, or else `answer_id`. It is only told, in headers and logs."""
    answer_id: str
    """Chosen by the server at random: unique, and known to nobody else."""
    received_at: float
    tail: str = ""
    """The value of the parameter at the end of the route's path, if it has one."""
    facts: dict[str, object] = field(default_factory=dict)
    """Facts for the log: numbers and codes, never a client's text."""
    headers: list[Header] = field(default_factory=list)
    """Headers that whatever answer it gets will carry."""
    held: ExitStack = field(default_factory=ExitStack)
    """What the request holds until its answer is sent."""
    trace: CallTrace = field(default_factory=CallTrace)


Handler: TypeAlias = Callable[[Call], Awaitable[Reply | Stream]]


@dataclass(frozen=True)
class Route:
    """A method and a path, with their handler and what is documented about them."""

    method: str
    path: str
    """Ends with `{name}` if the route takes a parameter."""
    access: Access
    handler: Handler
    summary: str
    body: type[Any]
    """The type of the request's body; `NO_BODY` if none is read."""
    answer: Any
    """The type of the answer's body, or None if it is not JSON."""
    content_type: str = JSON
    event: Any = None
    """The type of the events, if the route can stream."""
    refusals: tuple[int, ...] = ()
    """Error status codes of this route, in addition to those of every route."""
    tag: str = "Server"
    """The section of the documentation that lists it."""
    example: Mapping[str, Any] | None = None
    """An example of a body."""
    holds_room: bool = False
    """Whether it needs a place in the queue; without a free one it is refused before its body is read."""
    operation: str = ""
    """The operation of its traces, as OpenTelemetry names it; empty: it is not traced."""
    error_shape: ErrorShape = ErrorShape.OPENAI


NO_BODY = type(None)


class RouteTable:
    """All routes of the server."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            if not isinstance(route.access, Access):
                raise ConfigError(f"expected {route.method} {route.path} to declare who may use it, got {route.access}")
            path, brace, _ = route.path.partition("{")
            methods = (self._prefixes if brace else self._exact).setdefault(path, {})
            if route.method in methods:
                raise ConfigError(f"expected {route.method} {route.path} once in the table, got it twice")
            methods[route.method] = route

    def find(self, method: str, raw_path: bytes) -> tuple[Route, str]:
        """The route and the value of its parameter. Raises `ApiError` if no route matches."""
        path = raw_path.decode("latin-1")
        methods, tail = self._find(path)
        if not methods:
            raise ApiError(404, "there is no such path; see /docs for those that exist", code="not_found")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(sorted({*methods, *(["HEAD"] if "GET" in methods else [])}))
            raise ApiError(
                405,
                f"expected {allowed}, got a {method[:16]} request",
                code="method_not_allowed",
                headers=((b"allow", allowed.encode()),),
            )
        return route, tail

    def _find(self, path: str) -> tuple[Mapping[str, Route], str]:
        if path in self._exact:
            return self._exact[path], ""
        for prefix, methods in self._prefixes.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods, unquote(path[len(prefix) :])
        return {}, ""
