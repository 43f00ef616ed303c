"""Limits at the level of connections: size and time of heads, number of connections, and how slowly a client may read.

Extends uvicorn's protocol class for llhttp, which has none of these limits. A connection serves one request at a time;
bytes that arrive while an answer is being sent are discarded. Does not know bodies: `ingress` reads and bounds them.

uvicorn does not document this class as an interface. pyproject.toml bounds its version, and
`tests/server/test_uvicorn_interface.py` names everything that is used here.
"""

from __future__ import annotations

import asyncio
import resource
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sightline.server.http.errors import ApiError, unavailable

_STATUS_LINES = {
    400: b"400 Bad Request",
    408: b"408 Request Timeout",
    431: b"431 Request Header Fields Too Large",
    503: b"503 Service Unavailable",
}


class UnheardError(Exception):
    """Raised in a parser callback to discard the rest of the received bytes."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection with limits."""

    max_connections: ClassVar[int] = min(4096, max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 128))
    """Below the limit on file descriptors, which the engine process and the log need too."""
    max_head_bytes: ClassVar[int] = 32 << 10
    """The most bytes of the request line and all headers together."""
    head_seconds: ClassVar[float] = 15.0
    """The most time from the start of a connection, or from a request's first byte, to the end of its headers."""
    write_seconds: ClassVar[float] = 60.0
    """How long a client may leave the write buffer full before the connection is aborted."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._num_head_bytes = self._head_size = 0
        self._is_in_head = True
        self._is_deaf = False
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(self.head_seconds, self._head_is_late)
        self._write_timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.max_connections:
            self._reject(unavailable(f"expected at most {self.max_connections} connections, got more", 1))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if self._is_in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        # While the head is incomplete, all bytes counted belong to it.
        if self._is_in_head and self._num_head_bytes > self.max_head_bytes:
            self._reject(self._too_long())

    def on_message_begin(self) -> None:
        if self._is_answering:
            # Refuse pipelining: uvicorn reports a disconnect only to the latest request of a connection.
            self._is_deaf, self.cycle.keep_alive = True, False
            raise UnheardError
        self._num_head_bytes = self._head_size = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._take_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._take_head(len(name) + len(value) + 4)
        # Drop trailers: access was decided before the body was read.
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        super().on_headers_complete()
        # uvicorn before 0.53 keeps the connection of an HTTP/0.9 request open, which could hide a second request.
        self.cycle.keep_alive = self.cycle.keep_alive and self.parser.should_keep_alive()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head, self._num_head_bytes = True, 0

    def send_400_response(self, msg: str) -> None:
        if not self._is_deaf:
            self._reject(ApiError(400, f"expected an HTTP/1.1 request, got something else: {msg}", code="bad_http"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        # Abort rather than close, which would wait for unread data to be sent.
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _take_head(self, size: int) -> None:
        """Counts a piece of the head, which may have arrived whole in a single read."""
        self._head_size += size
        if self._head_size > self.max_head_bytes:
            self._reject(self._too_long())
            raise UnheardError

    def _too_long(self) -> ApiError:
        return ApiError(
            431,
            f"expected a request line and headers of at most {self.max_head_bytes} bytes, got more",
            code="bad_http",
        )

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_in_head and not self._is_answering:
            message = f"expected complete headers within {self.head_seconds:g} s"
            self._reject(ApiError(408, message, code="bad_http"))

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _reject(self, error: ApiError) -> None:
        """Sends an error body and closes the connection."""
        if self.transport.is_closing():
            return
        self._is_deaf = True
        body = error.body()
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
        if error.retry_after is not None:
            head += b"retry-after: %d\r\n" % error.retry_after
        self.transport.write(head % (_STATUS_LINES[error.status], len(body)) + b"\r\n" + body)
        self.transport.close()
