"""Streams of server-sent events: what a generation handler needs of each interface's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import msgspec

from sightline.core.conversation import AnswerEvent, EventKind
from sightline.server.desks.protocol import Generated, Head, StreamShape
from sightline.server.http.errors import ApiError
from sightline.server.process.protocol import Delta

_ENCODER = msgspec.json.Encoder()


class AnswerStream(ABC):
    """Makes the events of one stream, as they are sent."""

    id_prefix: ClassVar[str]
    keeps_text: ClassVar[bool] = False
    """True if the text that was sent is needed for later events."""
    ends_with_body: ClassVar[bool] = False
    """True if the last event holds the whole answer, which a desk writes."""

    def __init__(self, head: Head, shape: StreamShape, outcome: Generated) -> None:
        """`outcome` is what was generated so far."""
        self._head = head
        self._shape = shape
        self._outcome = outcome

    @abstractmethod
    def begin(self) -> Iterable[bytes]:
        """Events before the first token."""

    @abstractmethod
    def tell(self, index: int, delta: Delta) -> Iterable[bytes]:
        """The events for a piece of a continuation."""

    @abstractmethod
    def end(self, body: bytes) -> Iterable[bytes]:
        """The last events. `body` is the whole answer, or empty."""

    @abstractmethod
    def fail(self, error: ApiError) -> Iterable[bytes]:
        """The last events of a stream that could not be finished."""


def plain_event(event: object) -> bytes:
    """An event without a name."""
    return b"data: " + _ENCODER.encode(event) + b"\n\n"


def named_event(event: msgspec.Struct) -> bytes:
    """An event with the name that its type says."""
    return b"event: " + str(event.__struct_config__.tag).encode() + b"\n" + plain_event(event)


def told_events(delta: Delta) -> Iterable[AnswerEvent]:
    """The steps of an answer that a delta tells."""
    return delta.events or ((AnswerEvent(EventKind.CONTENT, delta.text),) if delta.text else ())
