"""A small HTTP/1.1 client on asyncio: one connection per request, bodies as they arrive.

Parsing is httptools'; this module adds addresses, connections and limits. It uses little processor time, because the
server that it measures may run on the same cores. Does not interpret bodies, follow redirects or decompress.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from sightline.core.errors import ConfigError, SightlineError

READ_SIZE = 1 << 16
"""Most bytes per read, and most bytes of head, trailers or chunk extensions in a row."""
MAX_BODY = 1 << 26
"""Most bytes of a body that is read whole."""
_SHOWN = 80
"""Bytes of an unexpected response that a message shows."""
_PORTS = {"http": 80, "https": 443}
_SHUTDOWN_SECONDS = 1.0
"""Time limit for closing a TLS connection."""


@dataclass(frozen=True)
class Address:
    """The base URL of a server."""

    secure: bool
    host: str
    port: int
    path: str
    """Prefix of every requested path: empty, or with a leading and without a trailing slash."""

    @staticmethod
    def parse(url: str) -> Address:
        """Parses `http://host:port` or https. A trailing /v1 is removed, because endpoints include it."""
        wanted = "expected an address such as http://127.0.0.1:8000"
        try:
            parts = urlsplit(url.strip())
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{wanted}, got {url!r}: {error}") from None
        if "@" in parts.netloc:
            raise ConfigError(f"{wanted}, got one with a user name in it; pass a key with --api-key")
        if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{wanted}, got {url!r}")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return Address(parts.scheme == "https", parts.hostname, port or _PORTS[parts.scheme], _clean("path", path))

    @property
    def authority(self) -> str:
        """Host and port, as in a Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.authority}{self.path}"


class Response:
    """A response: status and headers, and the body as it arrives. Takes the callbacks of httptools' parser."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """By lower-case name; repeated headers are joined by commas."""
        self._reader = reader
        self._parser = HttpResponseParser(self)
        self._start = b""
        """The first bytes received."""
        self._content: list[bytes] = []
        self._has_head = self._is_complete = False

    async def read_head(self) -> None:
        """Reads status and headers, past any interim response (1xx).

        Raises OSError if the network fails and SightlineError if the response is not HTTP/1.x.
        """
        await self._receive_until(lambda: self._has_head)
        if not self._start.startswith(b"HTTP/1."):
            raise self._not_http()

    async def read_some(self) -> bytes:
        """Returns content as soon as some has arrived; empty at the end of the body."""
        await self._receive_until(lambda: bool(self._content))
        content = b"".join(self._content)
        self._content.clear()
        return content

    async def read(self) -> bytes:
        """Returns the rest of the body."""
        parts, size = [], 0
        while part := await self.read_some():
            parts.append(part)
            size += len(part)
            if size > MAX_BODY:
                raise SightlineError(f"expected a body of at most {MAX_BODY} bytes, got a longer one")
        return b"".join(parts)

    def on_message_begin(self) -> None:
        if not self._has_head:
            self.headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # otherwise a trailer
            key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
            self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        if not self._has_head:
            self.status = self._parser.get_status_code()
            self._has_head = self.status >= 200

    def on_body(self, body: bytes) -> None:
        if not self._is_complete:
            self._content.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = self._has_head

    async def _receive_until(self, is_there: Callable[[], bool]) -> None:
        """Feeds the parser until `is_there`, or until the response is complete."""
        received = 0
        while not (is_there() or self._is_complete):
            data = await self._reader.read(READ_SIZE)
            if not data:
                self._close()
                return
            if len(self._start) < _SHOWN:
                self._start += data[:_SHOWN]
            received += len(data)
            try:
                self._parser.feed_data(data)
            except (HttpParserError, HttpParserUpgrade) as error:
                if not self._is_complete:  # bytes after the response do not matter
                    raise self._not_http(str(error)) from None
            if received > READ_SIZE and not (is_there() or self._is_complete):
                wanted = "content" if self._has_head else "the end of the head"
                raise SightlineError(f"expected {wanted} within {READ_SIZE} bytes of the response, got none")

    def _close(self) -> None:
        """Ends a body that declares no length when the server closes the connection. Raises in any other case."""
        if not self._start:
            raise ConnectionResetError("expected a response, got a closed connection")
        if not self._has_head:
            raise self._not_http("no whole head")
        if "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "").lower():
            raise ConnectionResetError("expected the rest of the body, got a closed connection")
        self._is_complete = True

    def _not_http(self, reason: str = "not HTTP/1.x") -> SightlineError:
        return SightlineError(f"expected an HTTP/1.1 response, got {self._start!r}: {reason}")


class Client:
    """Sends requests to one address, each on its own connection."""

    def __init__(self, address: Address, api_key: str | None = None) -> None:
        self.address = address
        self._tls = ssl.create_default_context() if address.secure else None
        key = "" if api_key is None else f"Authorization: Bearer {_clean('API key', api_key)}\r\n"
        self._headers = (
            f"Host: {address.authority}\r\nUser-Agent: sightline\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
            f"Connection: close\r\n{key}"
        )

    @asynccontextmanager
    async def exchange(self, method: str, path: str, body: bytes | None = None) -> AsyncIterator[Response]:
        """Sends a request and yields the response once its head has arrived. `body` is JSON.

        Raises OSError if the network fails and SightlineError if the response is not HTTP. The connection is closed at
        the end, even if the body was not read to its end.
        """
        sized = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"{method} {self.address.path}{path} HTTP/1.1\r\n{self._headers}{sized}\r\n".encode("ascii")
        reader, writer = await asyncio.open_connection(
            self.address.host,
            self.address.port,
            ssl=self._tls,
            ssl_shutdown_timeout=None if self._tls is None else _SHUTDOWN_SECONDS,
        )
        try:
            writer.write(head + (body or b""))
            await writer.drain()
            response = Response(reader)
            await response.read_head()
            yield response
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _clean(what: str, text: str) -> str:
    """Guards against header injection. The message does not contain the text, which may be secret."""
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise ConfigError(f"expected printable characters without spaces in the {what}, got others")
    return text
