"""How content lies in the bytes of an HTTP answer: in chunks, so many bytes, to the end; and events in content.

Owns the framing, of pieces that may be cut anywhere. Reads nothing from anywhere.
"""

from __future__ import annotations

from typing import Protocol

from sightline.core.errors import SightlineError

READ_SIZE = 1 << 16
"""Bytes of one read at most."""
MAX_BODY = 1 << 26
"""Bytes of a body that is read whole, and of one event."""
SHOWN = 80
"""Bytes of something unexpected that a message shows."""


class Body(Protocol):
    """Takes a body's bytes as they come from the wire and gives its content."""

    ended: bool

    def feed(self, data: bytes) -> bytes: ...

    def close(self) -> None:
        """The connection was closed. Raises where that is not how this body ends."""


class ChunkedBody:
    """Content in chunks, each with its size before it: cut anywhere."""

    def __init__(self) -> None:
        self.ended = False
        self._rest = b""
        """Of a line that is not whole."""
        self._left = 0
        """Bytes of the chunk under way."""
        self._in_chunk = self._in_trailer = False

    def feed(self, data: bytes) -> bytes:
        if not (self._rest or self._in_chunk or self._in_trailer):
            size, _, rest = data.partition(b"\r\n")
            if len(rest) > 2 and size == b"%x" % (len(rest) - 2) and rest.endswith(b"\r\n"):
                return rest[:-2]  # exactly one chunk, as servers that stream mostly send
        data, self._rest, at = self._rest + data, b"", 0
        content: list[bytes] = []
        while not self.ended:
            if self._left:
                part = data[at : at + self._left]
                content.append(part)
                at += len(part)
                self._left -= len(part)
            end = data.find(b"\r\n", at)
            if self._left or end < 0:
                break
            self._take_line(data[at:end])
            at = end + 2
        if not self.ended:
            self._rest = data[at:]
            if len(self._rest) > READ_SIZE:
                raise SightlineError(f"expected the size of a chunk, got {self._rest[:SHOWN]!r}")
        return b"".join(content)

    def _take_line(self, line: bytes) -> None:
        if self._in_trailer:
            self.ended = not line
        elif self._in_chunk:
            if line:
                raise SightlineError(f"expected the end of a chunk, got {line[:SHOWN]!r}")
            self._in_chunk = False
        else:
            size = line.partition(b";")[0].strip()
            if not size or size.strip(b"0123456789abcdefABCDEF"):
                raise SightlineError(f"expected the size of a chunk, got {line[:SHOWN]!r}")
            self._left = int(size, 16)
            self._in_chunk, self._in_trailer = self._left > 0, self._left == 0

    def close(self) -> None:
        raise ConnectionResetError("expected the last chunk of the body, got a closed connection")


class SizedBody:
    """So many bytes."""

    def __init__(self, size: int) -> None:
        self._left = size
        self.ended = size == 0

    def feed(self, data: bytes) -> bytes:
        content = data[: self._left]
        self._left -= len(content)
        self.ended = self._left == 0
        return content

    def close(self) -> None:
        raise ConnectionResetError(f"expected {self._left} more bytes of the body, got a closed connection")


class OpenBody:
    """All that comes until the connection is closed."""

    def __init__(self) -> None:
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        return data

    def close(self) -> None:
        self.ended = True


class EventSplitter:
    """Cuts server-sent events out of bytes, which may come cut anywhere; lines end in any of the three ways."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_return = False
        """Whether the last line ended with a return, whose newline may be yet to come."""
        self._data: list[bytes] = []
        """Of the event that is not over."""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that is over with this piece, which is not empty."""
        if self._after_return and piece.startswith(b"\n"):
            piece = piece[1:]
        self._after_return = piece.endswith(b"\r")
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_BODY:
            raise SightlineError(f"expected events of at most {MAX_BODY} bytes, got one that is longer")
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        return events

    @property
    def unfinished(self) -> bool:
        """Whether an event has begun that is not over."""
        return bool(self._rest.strip() or self._data)
