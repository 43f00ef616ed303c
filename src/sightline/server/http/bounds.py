"""The bounds of HTTP/1.1: how long heads may be and take, how many connections there are, how slowly a client may read.

uvicorn's protocol on llhttp, with what it leaves open closed. One request at a time on a connection: what comes while
an answer is under way is not listened to. Does not know requests' bodies: those are read, and bounded, by `ingress`.
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
    """Raised in the parser: the rest of what came is of no interest."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection."""

    max_connections: ClassVar[int] = min(4096, max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 128))
    """Fewer than there are descriptors: some are for the engine process and the log."""
    max_head_bytes: ClassVar[int] = 32 << 10
    """Of the request line and all headers."""
    head_seconds: ClassVar[float] = 15.0
    """From a connection's beginning, or a request's first byte, to the end of its headers."""
    write_seconds: ClassVar[float] = 60.0
    """In which a client must have taken what was sent, where it holds up what comes next."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._num_head_bytes = 0
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
        # A head that is still open has only itself to count.
        if self._is_in_head and self._num_head_bytes > self.max_head_bytes:
            self._reject(self._too_long())

    def on_message_begin(self) -> None:
        if self._is_answering:
            # Only the latest request of several would be told that its client is gone.
            self._is_deaf, self.cycle.keep_alive = True, False
            raise UnheardError
        self._num_head_bytes = 0
        self._head_size = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._take_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._take_head(len(name) + len(value) + 4)
        # A trailer comes after the body: by then it is decided who asks, and for what.
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

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
        # What the client has not taken by now, it will not.
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _take_head(self, size: int) -> None:
        """Counts what one read may have brought whole."""
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
            message = f"expected whole headers within {self.head_seconds:g} s, got none"
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
        """An error body as everywhere, and the end of the connection."""
        if self.transport.is_closing():
            return
        self._is_deaf = True
        body = error.body()
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
        if error.retry_after is not None:
            head += b"retry-after: %d\r\n" % error.retry_after
        self.transport.write(head % (_STATUS_LINES[error.status], len(body)) + b"\r\n" + body)
        self.transport.close()
