"""What the processes of ranks say to each other beside orders, over a socket: how to start, and how it went."""

from __future__ import annotations

import socket
import struct

import msgspec

from sightline.core.config import EngineConfig
from sightline.core.errors import RankLostError

_LENGTH = struct.Struct("<I")
_MOST_BYTES = 1 << 24


class RankStart(msgspec.Struct, frozen=True, tag=1):
    """The leading rank's first message."""

    index: int
    config: EngineConfig
    store: str
    """The file by which the ranks find each other."""
    num_threads: int
    """Threads of a CPU that are this rank's."""


class RankHere(msgspec.Struct, frozen=True, tag=2):
    """A rank runs, and connects itself to the others now."""


class RankReady(msgspec.Struct, frozen=True, tag=3):
    """A rank has its part of the model, and can take orders."""


class RankFailed(msgspec.Struct, frozen=True, tag=4):
    """A rank ends because of an error."""

    error: str
    details: str = ""
    """Where it was raised."""


Message = RankStart | RankHere | RankReady | RankFailed
_decoder = msgspec.msgpack.Decoder(Message)


def send(connection: socket.socket, message: Message) -> None:
    """Sends one message. Raises `RankLostError` if the other side is gone."""
    body = msgspec.msgpack.encode(message)
    try:
        connection.sendall(_LENGTH.pack(len(body)) + body)
    except OSError as error:
        raise RankLostError(f"another rank is gone: {error}") from error


def receive(connection: socket.socket) -> Message:
    """The next message. Raises `RankLostError` if the other side is gone, or says something else."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > _MOST_BYTES:
        raise RankLostError(f"expected a message of at most {_MOST_BYTES} bytes from another rank, got {length}")
    try:
        message: Message = _decoder.decode(_exactly(connection, length))
    except msgspec.MsgspecError as error:
        raise RankLostError(f"expected a known message from another rank, got something else: {error}") from error
    return message


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        try:
            more = connection.recv(count - len(found))
        except OSError as error:
            raise RankLostError(f"another rank is gone: {error}") from error
        if not more:
            raise RankLostError("another rank is gone")
        found += more
    return found
