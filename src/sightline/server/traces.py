"""What is traced of a request, and where traces go. Does not know OpenTelemetry: `otlp` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol
from urllib.parse import urlsplit

from sightline.core.errors import ConfigError
from sightline.server.http.routing import CallTrace, Route

_PACKAGES = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


@dataclass(frozen=True)
class TracedRequest:
    """A request that was answered, or whose client has left."""

    route: Route
    server: tuple[str, int]
    """The address and port that it came to."""
    request_id: str
    status: int
    received_at: float
    ended_at: float
    parent: Mapping[str, str]
    """The client's W3C trace context: `traceparent` and `tracestate`, if it sent them."""
    facts: Mapping[str, object]
    """The same values as in the log."""
    call: CallTrace


class Traces(Protocol):
    """Takes requests that have ended. Never waits, and never raises."""

    def record(self, request: TracedRequest) -> None: ...

    def close(self) -> None:
        """Sends what is left; gives up after a few seconds. Blocks."""


class NoTraces:
    """Traces of a server that sends none."""

    def record(self, request: TracedRequest) -> None:
        pass

    def close(self) -> None:
        pass


def open_traces(endpoint: str | None, on_drop: Callable[[int], None]) -> Traces:
    """Traces that are sent to a collector; none without one.

    `on_drop` counts spans that were not sent; any thread may call it. Raises `ConfigError`.
    """
    if endpoint is None:
        return NoTraces()
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"expected --otlp-traces-endpoint as a URL of a collector's OTLP/HTTP port, got {endpoint!r}; write for "
            "example http://localhost:4318/v1/traces"
        )
    if not all(_is_installed(name) for name in _PACKAGES):
        raise ConfigError(
            "expected OpenTelemetry's SDK and OTLP exporter for --otlp-traces-endpoint, got an installation without "
            "them; run pip install 'sightline[otel]'"
        )
    from sightline.server.otlp import OtlpTraces, otlp_exporter

    path = parts.path if parts.path.strip("/") else "/v1/traces"
    return OtlpTraces(otlp_exporter(parts._replace(path=path).geturl()), on_drop)


def _is_installed(package: str) -> bool:
    """`find_spec` imports the packages around it, which may be missing too."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
