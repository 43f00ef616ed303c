"""Limits at the level of connections: size and time of heads, number of connections, and how slowly a client may read.

Extends uvicorn's protocol class for llhttp, which has none of these limits. A connection serves one request at a time;
bytes that arrive while an answer is being sent are discarded. Does not know bodies: `ingress` reads and bounds them.

uvicorn does not document this class as an interface. pyproject.toml bounds its version, and
`tests/server/test_uvicorn_interface.py` names everything that is used here.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sightline.server.http.errors import ApiError, unavailable
from sightline.server.logs import log

logger = logging.getLogger("sightline.server")
CHUNKED_BYTES = 8 << 10
"""Bytes of a chunked body that are parsed in one turn of the event loop: each chunk is a call, even one of a byte."""
UNFRAMED = "sightline.unframed"
"""The ASGI extension of clients before HTTP/1.1: a `send` for answers whose end is the end of the connection."""
UNSENT_BYTES = 4 << 10
"""About the most that the system holds of what it cannot send to a client; without a limit it is megabytes."""
NOTSENT_LOWAT: int | None = {"linux": 25, "darwin": 0x201}.get(sys.platform)
"""The socket option `TCP_NOTSENT_LOWAT`, which Python names only from 3.12 on."""
_UPGRADE = re.compile(rb"(\r\nupgrade)(?=[ \t]*:)", re.IGNORECASE)
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
    write_buffer_bytes: ClassVar[int] = 1 << 10
    """Bytes that may wait to be sent before the sender waits too, until all are sent. Few, because they count as read:
    the request of a client that reads nothing is to pause soon."""
    write_seconds: ClassVar[float] = 60.0
    """The interval at which the progress of a client that leaves the write buffer full is measured."""
    min_write_bytes: ClassVar[int] = 12 << 10
    """Bytes that such a client must take from the full buffer in that time. Otherwise the connection is aborted, if the
    buffer was full for at least half of the time. Bytes that leave while the buffer is not full do not count."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(self.write_buffer_bytes, 0)
        self._num_head_bytes = self._head_size = 0
        self._is_in_head = True
        self._is_deaf = self._is_chunked = False
        self._unparsed = bytearray()
        """What came of a body in chunks and waits for the next turns."""
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(self.head_seconds, self._head_is_late)
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_unsent: int | None = None
        """Bytes in the write buffer when it was last looked at; None if it is not full."""
        self._num_taken = 0
        """Bytes that have left the full buffer since the timer started."""
        self._full_since = self._full_seconds = 0.0
        """When the buffer was last filled, or the timer started; how long it had been full before, since the timer
        started."""
        if len(self.connections) > self.max_connections:
            self._reject(unavailable(f"expected at most {self.max_connections} connections, got more", 1))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._unparsed and len(data) <= CHUNKED_BYTES:
            self._parse(data)
            return
        is_first = not self._unparsed
        self._unparsed += data
        self.transport.pause_reading()
        if is_first:
            self._parse_some()

    def _parse_some(self) -> None:
        """Parses what may be done in one turn: all of a body of a known length, a part of anything else."""
        if self.transport.is_closing():
            return
        count = CHUNKED_BYTES if self._is_in_head or self._is_chunked else len(self._unparsed)
        part = bytes(self._unparsed[:count])
        del self._unparsed[:count]
        self._parse(part)
        if self._unparsed:
            self.loop.call_soon(self._parse_some)
        elif not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if self._is_in_head:
            self._num_head_bytes += len(data)
            data = _without_upgrade(data)
        super().data_received(data)
        # While the head is incomplete, all bytes counted belong to it.
        if self._is_in_head and self._num_head_bytes > self.max_head_bytes:
            self._reject(self._too_long())

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns True to keep the connection open until the answer is sent.

        A client that sends no more may be waiting for its answer, or may have left: both look the same. An answer to a
        GET costs little and is sent. For a POST the client counts as gone, so that the work for it is cancelled.
        """
        if not self._is_answering or self.scope["method"] == "POST":
            return False
        self.cycle.keep_alive = False
        return True

    def on_message_begin(self) -> None:
        if self._is_answering:
            # Refuse pipelining: uvicorn reports a disconnect only to the latest request of a connection.
            self._is_deaf, self.cycle.keep_alive = True, False
            raise UnheardError
        self._num_head_bytes = self._head_size = 0
        self._is_chunked = False
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
            self._is_chunked = self._is_chunked or name.lower() == b"transfer-encoding"
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        if self.parser.should_upgrade():
            # Its body would be taken for the next request.
            message = "expected a request in HTTP/1.1, got one for another protocol; send it without Upgrade"
            self._reject(ApiError(400, message, code="bad_http"))
            raise UnheardError
        super().on_headers_complete()
        # uvicorn before 0.53 keeps the connection of an HTTP/0.9 request open, which could hide a second request.
        self.cycle.keep_alive = self.cycle.keep_alive and self.parser.should_keep_alive()
        if self.scope["http_version"] != "1.1":
            # HTTP/0.9 and 2.0 may ask for keep-alive; the end of an answer is the end of the connection all the same.
            self.cycle.keep_alive = False
            self.scope["extensions"] = {UNFRAMED: partial(_send_unframed, self.cycle)}  # type: ignore[dict-item]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head, self._num_head_bytes = True, 0

    def send_400_response(self, msg: str) -> None:
        if not self._is_deaf:
            self._reject(ApiError(400, f"expected an HTTP/1.1 request, got something else: {msg}", code="bad_http"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._num_unsent, self._full_since = self.transport.get_write_buffer_size(), self.loop.time()
        # A timer that runs goes on: filling the buffer again is no progress.
        if self._write_timer is None:
            self._num_taken, self._full_seconds = 0, 0.0
            self._write_timer = self.loop.call_later(self.write_seconds, self._check_progress)

    def resume_writing(self) -> None:
        self._count_taken()
        self._full_seconds += self.loop.time() - self._full_since
        self._num_unsent = None
        super().resume_writing()

    def slow_client_cut(self) -> None:
        """Called when the connection of a client that reads too slowly is aborted."""

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

    def _count_taken(self) -> None:
        if self._num_unsent is not None:
            before, self._num_unsent = self._num_unsent, self.transport.get_write_buffer_size()
            self._num_taken += before - self._num_unsent

    def _check_progress(self) -> None:
        self._count_taken()
        num_taken, self._num_taken, self._write_timer = self._num_taken, 0, None
        if self._num_unsent is None:
            return
        full_seconds = self._full_seconds + self.loop.time() - self._full_since
        self._full_since, self._full_seconds = self.loop.time(), 0.0
        # A client that stalls twice, a minute apart, is not slow: it took in between all that was sent.
        if num_taken < self.min_write_bytes and 2 * full_seconds >= self.write_seconds:
            fields = {"bytes": num_taken, "seconds": self.write_seconds, "expected_bytes": self.min_write_bytes}
            log(logger, logging.WARNING, "slow client cut", fields)
            self.slow_client_cut()
            self.transport.abort()
            return
        self._write_timer = self.loop.call_later(self.write_seconds, self._check_progress)

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


def _without_upgrade(data: bytes) -> bytes:
    """Renames the header of an offer to use another protocol, which a server may ignore: Java's client makes it.

    llhttp, as httptools uses it, would skip the request's body. A header that arrives in parts is not found here.
    """
    head, end, body = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(rb"\1-ignored", head) + end + body


def bounded(when_cut: Callable[[], None]) -> type[BoundedProtocol]:
    """The protocol class that calls `when_cut` for every client that is cut."""

    class CountedProtocol(BoundedProtocol):
        def slow_client_cut(self) -> None:
            when_cut()

    return CountedProtocol


async def _send_unframed(cycle: RequestResponseCycle, event: Any) -> None:
    """Sends a part of an answer without chunks, which HTTP/1.0 does not have: uvicorn closes the connection after it.

    uvicorn allows the bytes that it expects, so each part is expected when it comes.
    """
    cycle.chunked_encoding = False
    cycle.expected_content_length = len(event.get("body", b""))
    await cycle.send(event)
