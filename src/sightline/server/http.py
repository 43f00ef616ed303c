"""The HTTP/1.1 parser's bounds: how long a request line and headers may be, and how long they may take.

uvicorn's protocol on llhttp, with what it leaves open closed. Does not know requests' bodies: those are read, and
bounded, by `ingress`.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sightline.server.errors import ApiError

_STATUS_LINES = {400: b"400 Bad Request", 408: b"408 Request Timeout", 431: b"431 Request Header Fields Too Large"}


class BoundedProtocol(HttpToolsProtocol):
    """A connection."""

    max_head_bytes: ClassVar[int] = 32 << 10
    """Of the request line and all headers."""
    head_seconds: ClassVar[float] = 15.0
    """From a connection's or a request's first byte to the end of its headers."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._num_head_bytes = 0
        self._is_in_head = True
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(self.head_seconds, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)
        super().data_received(data)
        # Whole bodies may come along with the head; a head that is still open has only itself to count.
        if self._is_in_head and self._num_head_bytes > self.max_head_bytes and not self.transport.is_closing():
            self._reject(431, f"expected a request line and headers of at most {self.max_head_bytes} bytes, got more")

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head, self._num_head_bytes = True, 0

    def send_400_response(self, msg: str) -> None:
        self._reject(400, f"expected an HTTP/1.1 request, got something else: {msg}")

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_in_head and not self.transport.is_closing():
            self._reject(408, f"expected whole headers within {self.head_seconds:g} s, got none")

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _reject(self, status: int, message: str) -> None:
        """An error body as everywhere, and the end of the connection."""
        body = ApiError(status, message, code="bad_http").body()
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (_STATUS_LINES[status], len(body)) + body)
        self.transport.close()
