"""Frames between the processes of a server: typed msgpack messages with a length and a cap.

    frame = length (4 bytes, big-endian) + msgpack array of messages

Does not know what the messages mean.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

LENGTH_BYTES = 4
TOKEN_BYTES = 4
"""Bytes of a packed token id."""
_LENGTH = struct.Struct(">I")
_T = TypeVar("_T")


class ProtocolError(Exception):
    """The other side of the socket sent an invalid frame; the connection must be closed."""


class Codec(Generic[_T]):
    """Frames of one direction."""

    def __init__(self, kind: type[list[_T]], max_bytes: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._max_bytes = max_bytes

    def encode(self, messages: Sequence[_T]) -> bytes:
        """A whole frame."""
        body = self._encoder.encode(messages)
        if len(body) > self._max_bytes:
            raise ProtocolError(f"expected a frame of at most {self._max_bytes} bytes, got {len(body)}")
        return _LENGTH.pack(len(body)) + body

    def length(self, header: bytes) -> int:
        """The length of the body that follows, checked before memory is allocated for it."""
        (length,) = _LENGTH.unpack(header)
        if length > self._max_bytes:
            raise ProtocolError(f"expected a frame of at most {self._max_bytes} bytes, got {length}")
        return int(length)

    def decode(self, body: bytes) -> list[_T]:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"expected a frame of known messages, got something else: {error}") from error


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes, four each: a process that only passes them on need not read them."""
    return array("i", token_ids).tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    token_ids = array("i")
    token_ids.frombytes(packed)
    return tuple(token_ids)
