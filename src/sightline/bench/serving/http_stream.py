"""A small HTTP/1.1 client on asyncio: one request a connection, bodies as they come.

Owns addresses, connections and heads; how a body is framed is `http_bodies`'. It takes little of the processor, because
what it measures runs on the same one. Does not know what is in a body, nor follow redirects, nor decompress.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from sightline.bench.serving.http_bodies import MAX_BODY, READ_SIZE, SHOWN, Body, ChunkedBody, OpenBody, SizedBody
from sightline.core.errors import ConfigError, SightlineError

_PORTS = {"http": 80, "https": 443}
_SHUTDOWN_SECONDS = 1.0
"""That a secure connection may take to say goodbye."""


@dataclass(frozen=True)
class Address:
    """Where a server is."""

    secure: bool
    host: str
    port: int
    path: str
    """In front of every path that is asked for; empty, or begins with a slash and ends without one."""

    @staticmethod
    def parse(url: str) -> Address:
        """`http://host:port`, or https; a path that ends in /v1 is taken without that, since endpoints have it."""
        wanted = "expected an address such as http://127.0.0.1:8000"
        try:
            parts = urlsplit(url.strip())
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{wanted}, got {url!r}: {error}") from None
        if "@" in parts.netloc:
            raise ConfigError(f"{wanted}, got one with a user's name in it; give a key with --api-key")
        if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{wanted}, got {url!r}")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return Address(parts.scheme == "https", parts.hostname, port or _PORTS[parts.scheme], _clean("path", path))

    @property
    def authority(self) -> str:
        """Host and port, as a head names them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.authority}{self.path}"


class Response:
    """A head that has come, and the body behind it."""

    def __init__(self, reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self.headers = headers
        """By names in small letters."""
        self._reader = reader
        self._body = _body_of(status, headers)

    async def read_some(self) -> bytes:
        """Content as soon as there is any; nothing at the end of the body."""
        while not self._body.ended:
            data = await self._reader.read(READ_SIZE)
            if not data:
                self._body.close()
                break
            if content := self._body.feed(data):
                return content
        return b""

    async def read(self) -> bytes:
        """The rest of the body."""
        parts, size = [], 0
        while part := await self.read_some():
            parts.append(part)
            size += len(part)
            if size > MAX_BODY:
                raise SightlineError(f"expected a body of at most {MAX_BODY} bytes, got a longer one")
        return b"".join(parts)


class Client:
    """Sends requests to one address, each on a connection of its own."""

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
        """Sends, and gives the answer's head when it is there. `body` is JSON.

        Raises OSError where the network fails and SightlineError where the answer is not HTTP. The connection is closed
        at the end, whatever is left of the body.
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
            yield await _read_head(reader)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> Response:
    """The first head that is not about what comes later."""
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                raise ConnectionResetError("expected an answer, got a closed connection") from None
            raise SightlineError(f"expected an answer in HTTP, got {error.partial[:SHOWN]!r}") from None
        except asyncio.LimitOverrunError:
            raise SightlineError("expected an answer in HTTP, got a head without an end") from None
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not (rest[:3].isascii() and rest[:3].isdecimal() and len(rest) >= 3):
            raise SightlineError(f"expected an answer in HTTP/1.1, got {first[:SHOWN]!r}")
        if int(rest[:3]) >= 200:
            return Response(reader, int(rest[:3]), _headers_of(lines))


def _headers_of(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        key = name.strip().lower()
        headers[key] = f"{headers[key]}, {value.strip()}" if key in headers else value.strip()
    return headers


def _body_of(status: int, headers: Mapping[str, str]) -> Body:
    if status in (204, 304):
        return SizedBody(0)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return ChunkedBody()
    size = headers.get("content-length")
    if size is None:
        return OpenBody()
    if not (size.isascii() and size.isdecimal()):
        raise SightlineError(f"expected a content-length in digits, got {size[:SHOWN]!r}")
    return SizedBody(int(size))


def _clean(what: str, text: str) -> str:
    """What goes into a head: nothing that could end a line of it. The text may be secret, and is not told."""
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise ConfigError(f"expected printable characters without spaces in the {what}, got others")
    return text
