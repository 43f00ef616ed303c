"""A ring of messages in shared memory, with one writer and several readers, each of which gets every message.

    words    written | read by each reader | asleep, of each reader | beats of each reader
    bytes    (length, checksum, message) (length, checksum, message) …

`written` and `read` count bytes since the beginning. A message that is longer than a part of the ring is sent in
pieces. A reader looks for a message for a short time and then sleeps until its doorbell, a socket, rings; it looks
again now and then, in case a ring was lost. The checksum tells a message that is not all visible yet, as processors may
show the words of another process in another order. `beats` shows the writer that a reader's process is alive.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from sightline.core.errors import RankLostError
from sightline.distributed.channels import OrderReceiver

RING_BYTES = 1 << 20
_MEMORY_FOLDER = "/dev/shm"
"""Files here are in memory. Those of other folders are mapped just as well, and written to a disk at times."""
_WORD = 8
_HEADER = struct.Struct("<II")
_MORE = 1 << 31
"""Marks the length of a piece that is not the last one of its message."""
_LOOKS = 200
"""How often a reader looks for a message before it sleeps."""
_NAP_SECONDS = 0.05
_DAMAGED_SECONDS = 1.0
"""After which a checksum that is still wrong is an error."""


def make_ring_file(num_readers: int, num_bytes: int = RING_BYTES) -> int:
    """Returns the descriptor of new shared memory for a ring, which nobody can open by name."""
    with tempfile.TemporaryFile(dir=_MEMORY_FOLDER if Path(_MEMORY_FOLDER).is_dir() else None) as file:
        os.ftruncate(file.fileno(), _WORD * (1 + 3 * num_readers) + num_bytes)
        return os.dup(file.fileno())


class _Ring:
    """The memory of a ring, as one process sees it."""

    def __init__(self, descriptor: int, num_readers: int) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self._bytes = memoryview(self._memory)
        first = _WORD * (1 + 3 * num_readers)
        self.words = self._bytes[:first].cast("q")
        self._data = self._bytes[first:]
        self.capacity = len(self._data)
        self.read_by = range(1, 1 + num_readers)
        self.asleep = range(1 + num_readers, 1 + 2 * num_readers)
        self.beats = range(1 + 2 * num_readers, 1 + 3 * num_readers)

    @property
    def written(self) -> int:
        """Bytes that were written since the beginning."""
        return int(self.words[0])

    def put(self, place: int, content: bytes) -> None:
        """Writes at a place, which counts from the beginning."""
        start = place % self.capacity
        first = min(len(content), self.capacity - start)
        self._data[start : start + first] = content[:first]
        self._data[: len(content) - first] = content[first:]

    def get(self, place: int, length: int) -> bytes:
        """Reads from a place."""
        start = place % self.capacity
        first = min(length, self.capacity - start)
        return bytes(self._data[start : start + first]) + bytes(self._data[: length - first])


class RingSender:
    """The end of the writer."""

    def __init__(self, descriptor: int, doorbells: Sequence[socket.socket], timeout_s: float) -> None:
        """`doorbells` has a connection to each reader. A reader that takes nothing for `timeout_s` is lost."""
        self._ring = _Ring(descriptor, len(doorbells))
        self._doorbells = tuple(doorbells)
        self._timeout_s = timeout_s

    def send(self, message: bytes) -> None:
        """Sends a message to every reader. Raises `RankLostError` if one takes none."""
        most = self._ring.capacity // 4
        pieces = [message[start : start + most] for start in range(0, len(message), most)] or [b""]
        for number, piece in enumerate(pieces):
            self._send(piece, more=number + 1 < len(pieces))

    def beats(self) -> tuple[int, ...]:
        """A number for each reader that changes as long as its process is alive."""
        return tuple(int(self._ring.words[place]) for place in self._ring.beats)

    def _send(self, piece: bytes, *, more: bool) -> None:
        ring, size = self._ring, _HEADER.size + len(piece)
        self._wait_for_room(size)
        header = _HEADER.pack(len(piece) | (_MORE if more else 0), zlib.crc32(piece))
        ring.put(ring.written, header + piece)
        ring.words[0] = ring.written + size
        for flag, doorbell in zip(ring.asleep, self._doorbells, strict=True):
            if ring.words[flag]:
                self._ring_at(doorbell)

    def _ring_at(self, doorbell: socket.socket) -> None:
        try:
            doorbell.send(b"\0", socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # it has rung often enough
        except OSError as error:
            raise RankLostError(f"a rank that was to be told of a step is gone: {error}") from error

    def _wait_for_room(self, size: int) -> None:
        ring, deadline = self._ring, time.monotonic() + self._timeout_s
        while ring.written + size - min(int(ring.words[place]) for place in ring.read_by) > ring.capacity:
            if time.monotonic() > deadline:
                raise RankLostError(f"a rank read none of its orders for {self._timeout_s:g} s")
            time.sleep(_NAP_SECONDS / 10)


class RingReceiver(OrderReceiver):
    """The end of a reader."""

    def __init__(self, descriptor: int, num_readers: int, reader: int, doorbell: socket.socket) -> None:
        """`reader` counts from 0."""
        self._ring = _Ring(descriptor, num_readers)
        self._read, self._asleep = self._ring.read_by[reader], self._ring.asleep[reader]
        self._beats = self._ring.beats[reader]
        self._doorbell = doorbell

    def beat(self) -> None:
        """Shows the writer that this process is alive."""
        self._ring.words[self._beats] += 1

    def receive(self) -> bytes:
        pieces, more = list[bytes](), True
        while more:
            self._wait()
            piece, more = self._take()
            pieces.append(piece)
        return b"".join(pieces)

    def _wait(self) -> None:
        ring = self._ring
        for _ in range(_LOOKS):
            if ring.written > ring.words[self._read]:
                return
        while True:
            ring.words[self._asleep] = 1
            try:
                if ring.written > ring.words[self._read]:
                    return
                ready, _, _ = select.select([self._doorbell], [], [], _NAP_SECONDS)
            finally:
                ring.words[self._asleep] = 0
            if ready and not self._doorbell.recv(4096):
                raise RankLostError("the leading rank is gone")

    def _take(self) -> tuple[bytes, bool]:
        ring, deadline = self._ring, time.monotonic() + _DAMAGED_SECONDS
        place = int(ring.words[self._read])
        while True:
            length, checksum = _HEADER.unpack(ring.get(place, _HEADER.size))
            size = length & ~_MORE
            if size <= ring.capacity // 4:
                piece = ring.get(place + _HEADER.size, size)
                if zlib.crc32(piece) == checksum:
                    ring.words[self._read] = place + _HEADER.size + size
                    return piece, bool(length & _MORE)
            if time.monotonic() > deadline:
                raise RankLostError("expected an order of the leading rank, got other bytes in the memory of orders")
