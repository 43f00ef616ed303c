"""The table of routes, and what goes in and out of a handler. A path is compared as it came, byte by byte."""

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
    """An answer in one piece."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: tuple[Header, ...] = ()


@dataclass(frozen=True)
class Stream:
    """An answer in events. Whoever sends it calls `close`, however it ends."""

    events: AsyncGenerator[bytes, None]
    close: Callable[[], None]
    headers: tuple[Header, ...] = ()


@dataclass(frozen=True)
class Call(Generic[BodyT]):
    """A request that was let in, as a handler sees it."""

    body: BodyT
    caller: str
    """Whose key it came with."""
    request_id: str
    """Ours: no client chooses one."""
    received_at: float
    tail: str = ""
    """What the path has where the route's ends with a parameter."""
    facts: dict[str, object] = field(default_factory=dict)
    """For the log: numbers, never texts."""


Handler: TypeAlias = Callable[[Call[BodyT]], Awaitable[Reply | Stream]]


@dataclass(frozen=True)
class Route(Generic[BodyT]):
    """One way in."""

    method: str
    path: str
    """Ends with `{name}` where it takes a parameter."""
    access: Access
    handler: Handler[BodyT]
    summary: str
    body: type[BodyT]
    """What is read; `type(None)` reads nothing."""
    answer: Any
    """The type of the answer's body, or None where it is no JSON."""
    content_type: str = JSON
    event: Any = None
    """The type of a stream's events, where it can stream."""
    refusals: tuple[int, ...] = ()
    """Status codes beside those that every route has."""
    tag: str = "Server"
    """Under what it stands in the documentation."""
    example: Mapping[str, Any] | None = None
    """A body to begin with."""
    holds_room: bool = False
    """Takes a place in the queue: refused before its body is read where there is none."""


NO_BODY = type(None)


class RouteTable:
    """Every way in; there is no other."""

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
        """The route, and its parameter. Raises for what is not in the table."""
        path = raw_path.decode("latin-1")
        methods, tail = self._find(path)
        if not methods:
            raise ApiError(404, "expected the path of a route, got one that is not there; see /docs", code="not_found")
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
