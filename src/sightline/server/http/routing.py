"""The table of routes, and the types that handlers take and return. Paths are compared byte by byte, as received."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import unquote

from sightline.core.errors import ConfigError
from sightline.server.http.access import Access
from sightline.server.http.errors import ApiError

BodyT = TypeVar("BodyT")
Header: TypeAlias = tuple[bytes, bytes]
JSON, HTML, EVENTS, PLAIN = "application/json", "text/html; charset=utf-8", "text/event-stream", "text/plain"


@dataclass(frozen=True)
class Reply:
    """An answer that is sent as a whole."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: tuple[Header, ...] = ()


@dataclass(frozen=True)
class Stream:
    """An answer of server-sent events. The sender must call `close`, however the stream ends."""

    events: AsyncGenerator[bytes, None]
    close: Callable[[], None]
    headers: tuple[Header, ...] = ()


@dataclass(frozen=True)
class Call(Generic[BodyT]):
    """An admitted request, as a handler sees it."""

    body: BodyT
    caller: str
    """The name of the key that it came with."""
    request_id: str
    """Chosen by the server, never by a client."""
    received_at: float
    tail: str = ""
    """The value of the parameter at the end of the route's path, if it has one."""
    facts: dict[str, object] = field(default_factory=dict)
    """Facts for the log: numbers and codes, never a client's text."""


Handler: TypeAlias = Callable[[Call[BodyT]], Awaitable[Reply | Stream]]


@dataclass(frozen=True)
class Route(Generic[BodyT]):
    """A method and a path, with their handler and what is documented about them."""

    method: str
    path: str
    """Ends with `{name}` if the route takes a parameter."""
    access: Access
    handler: Handler[BodyT]
    summary: str
    body: type[BodyT]
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


NO_BODY = type(None)


class RouteTable:
    """All routes of the server."""

    def __init__(self, routes: Iterable[Route[Any]]) -> None:
        self.routes = tuple(routes)
        self._exact: dict[str, dict[str, Route[Any]]] = {}
        self._prefixes: dict[str, dict[str, Route[Any]]] = {}
        for route in self.routes:
            if not isinstance(route.access, Access):
                raise ConfigError(f"expected {route.method} {route.path} to declare who may use it, got {route.access}")
            path, brace, _ = route.path.partition("{")
            methods = (self._prefixes if brace else self._exact).setdefault(path, {})
            if route.method in methods:
                raise ConfigError(f"expected {route.method} {route.path} once in the table, got it twice")
            methods[route.method] = route

    def find(self, method: str, raw_path: bytes) -> tuple[Route[Any], str]:
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

    def _find(self, path: str) -> tuple[Mapping[str, Route[Any]], str]:
        if path in self._exact:
            return self._exact[path], ""
        for prefix, methods in self._prefixes.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods, unquote(path[len(prefix) :])
        return {}, ""
