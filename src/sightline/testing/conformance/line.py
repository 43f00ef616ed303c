"""A connection between two processes on one machine: whole messages of bytes, in order. Does not know what they say."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from selectors import EVENT_READ, DefaultSelector
from socket import socket, socketpair

_LENGTH = struct.Struct(">Q")


class Line:
    """One end."""

    def __init__(self, end: socket) -> None:
        self._end = end

    @staticmethod
    def pair() -> tuple[Line, Line]:
        ours, theirs = socketpair()
        return Line(ours), Line(theirs)

    @staticmethod
    def at(descriptor: int) -> Line:
        """The end that this process was started with. What this process starts in turn does not inherit it."""
        end = socket(fileno=descriptor)
        end.set_inheritable(False)
        return Line(end)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: bytes) -> None:
        """Raises `OSError` where the other end is closed."""
        self._end.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        """Waits for a message. Raises `EOFError` where the other end is closed, and `OSError` where this one is."""
        [length] = _LENGTH.unpack(self._bytes(_LENGTH.size))
        return self._bytes(length)

    def close(self) -> None:
        self._end.close()

    def _bytes(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            more = self._end.recv(count - len(received))
            if not more:
                raise EOFError
            received += more
        return bytes(received)


def wait_for_any(lines: Iterable[Line], seconds: float) -> list[Line]:
    """Those that have something to receive, or an end to tell: as soon as there is one, or none after so long."""
    with DefaultSelector() as selector:
        for line in lines:
            selector.register(line.fileno(), EVENT_READ, line)
        return [key.data for key, _ in selector.select(seconds)]
