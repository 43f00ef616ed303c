"""What the front end and the engine process say to each other: typed msgpack in frames with a length and a cap.

    frame = length (4 bytes, big-endian) + msgpack array of messages

*Commands* go to the engine process, *reports* come from it. Numbers name requests: the front end counts them, a client
never sees or chooses one. Does not know sockets, HTTP or the engine.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Generic, TypeAlias, TypeVar

import msgspec

from sightline.core.config import EngineConfig
from sightline.core.metrics import EngineMetrics
from sightline.core.request import EffectiveParams, PositionLogprobs, SamplingParams, Terms
from sightline.text.tokenizers.tokenizer import TokenizerData

LENGTH_BYTES = 4
MAX_COMMAND_BYTES = 1 << 26
"""A frame to the engine process: the tokens of a request, a few bytes each."""
MAX_REPORT_BYTES = 1 << 28
"""A frame from the engine process: the largest holds a vocabulary."""
_LENGTH = struct.Struct(">I")
_T = TypeVar("_T")


class ProtocolError(Exception):
    """The other side of the socket said what nobody may say; the connection is of no more use."""


class Configure(msgspec.Struct, tag="configure", frozen=True):
    """The first command: what engine to build."""

    config: EngineConfig
    log_level: str


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """Run prompts, each as a request of its own."""

    prompts: dict[int, tuple[int, ...]]
    """Token ids, by the request's number."""
    params: SamplingParams | None
    """None asks for vectors."""
    terms: Terms


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """End a request; nothing more is reported of it."""

    number: int


class Probe(msgspec.Struct, tag="probe", frozen=True):
    """Show that a step goes through, even where nobody has asked for one."""


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End the process."""


class Opened(msgspec.Struct, tag="opened", frozen=True):
    """The engine is built: what the front end needs to know of it."""

    model: str
    """The file's or folder's own name."""
    tokenizer: TokenizerData
    vocab_size: int
    vector_size: int | None
    """Numbers in a vector, where the engine process embeds."""
    max_model_len: int
    max_rows: int
    max_queued: int
    config: dict[str, str | int | float | bool | None]
    """What runs, as a person reads it."""
    lines: tuple[str, ...]
    """What is said at start-up."""
    degradations: tuple[str, ...]
    notes: tuple[str, ...]


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine cannot be built; the process ends."""

    message: str


class Accepted(msgspec.Struct, tag="accepted", frozen=True):
    """A request is in the queue."""

    number: int
    params: EffectiveParams | None
    """What it runs with; None if it asks for a vector."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """A request will not run."""

    number: int
    is_full: bool
    """As many wait as may: the same request can be sent again later. Otherwise it is invalid."""
    message: str


class Delta(msgspec.Struct, tag="delta", frozen=True):
    """What one continuation gained."""

    number: int
    index: int
    text: str
    num_tokens: int
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """The last of a request."""

    number: int
    error: str | None
    num_cached: int
    queue_seconds: float
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None


class Vector(msgspec.Struct, tag="vector", frozen=True):
    """A text's vector."""

    number: int
    numbers: bytes
    """Little-endian fp32."""


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """The engine's state after a step."""

    metrics: EngineMetrics


Command: TypeAlias = Configure | Submit | Cancel | Probe | Stop
Report: TypeAlias = Opened | Failed | Accepted | Refused | Delta | Ended | Vector | Progress


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
        """Of the body that follows, before anything is set aside for it."""
        (length,) = _LENGTH.unpack(header)
        if length > self._max_bytes:
            raise ProtocolError(f"expected a frame of at most {self._max_bytes} bytes, got {length}")
        return int(length)

    def decode(self, body: bytes) -> list[_T]:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"expected a frame of known messages, got something else: {error}") from error


def command_codec() -> Codec[Command]:
    return Codec(list[Command], MAX_COMMAND_BYTES)


def report_codec(max_bytes: int = MAX_REPORT_BYTES) -> Codec[Report]:
    return Codec(list[Report], max_bytes)
