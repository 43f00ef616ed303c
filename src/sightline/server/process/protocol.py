"""What the front end and the engine process say to each other, in frames.

*Commands* go to the engine process, *reports* come from it. Numbers name requests: the front end counts them, a client
never sees or chooses one. Does not know sockets, HTTP or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

import msgspec

from sightline.core.config import EngineConfig
from sightline.core.conversation import AnswerEvent
from sightline.core.metrics import EngineMetrics, PhaseSeconds
from sightline.core.request import Terms
from sightline.server.process.frames import Codec
from sightline.server.process.window import UnreadLimit

MAX_COMMAND_BYTES = 1 << 26
"""A frame to the engine process: the tokens of a request, a few bytes each."""
REPORT_BYTES = 256
"""Memory of a report without its contents."""
MAX_REPORT_BYTES = 1 << 28
"""A frame from the engine process: the largest holds a vocabulary."""


class Configure(msgspec.Struct, tag="configure", frozen=True):
    """The first command: what engine to build."""

    config: EngineConfig
    log_level: str


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """Run prompts, each as a request of its own."""

    prompts: dict[int, bytes]
    """Packed token ids, by the request's number."""
    params: bytes | None
    """`SamplingParams` in msgpack; None asks for vectors."""
    terms: Terms
    max_unread: UnreadLimit | None = None
    """`Delta` reports that may be unread before a request pauses; None: it never does, as its answer is read whole."""


class Read(msgspec.Struct, tag="read", frozen=True):
    """A client has read more `Delta` reports of its request."""

    number: int
    count: int
    num_bytes: int
    """The size of the reports' contents."""


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """End a request; nothing more is reported of it."""

    number: int


class Probe(msgspec.Struct, tag="probe", frozen=True):
    """Show that a step goes through, even where nobody has asked for one."""


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End the process."""


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """The model is supported, and the engine is being built."""

    doing: str
    """What is read, compiled, captured or tried, and how much of it is done, for a person."""


class Opened(msgspec.Struct, tag="opened", frozen=True):
    """The engine is built: what the front end needs to know of it."""

    model: str
    """The file's or folder's own name."""
    tokenizer: bytes
    """`TokenizerData` in msgpack, for the desks."""
    vocab_size: int
    vector_size: int | None
    """Numbers in a vector, where the engine process embeds."""
    max_model_len: int
    max_rows: int
    """Of all replicas."""
    max_queued: int
    config: dict[str, str | int | float | bool | None]
    """What runs, as a person reads it."""
    lines: tuple[str, ...]
    """What is said at start-up."""
    degradations: tuple[str, ...]
    notes: tuple[str, ...]
    tools_refusal: str | None = None
    """Why requests with tools are refused; None if they are not."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine cannot be built; the process ends."""

    message: str


class Accepted(msgspec.Struct, tag="accepted", frozen=True):
    """A request is in the queue."""

    number: int
    sampling: bytes
    """The sampling parameters that it runs with, as JSON; empty if it asks for a vector."""
    num_bytes: ClassVar[int] = REPORT_BYTES


class ShownSampling(msgspec.Struct, frozen=True):
    """What metrics and traces tell of `Accepted.sampling`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


_NO_SAMPLING = ShownSampling()
_SAMPLING = msgspec.json.Decoder(ShownSampling)


def read_sampling(sampling: bytes) -> ShownSampling:
    """The parameters of a request; none if it asks for a vector."""
    return _SAMPLING.decode(sampling) if sampling else _NO_SAMPLING


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """A request will not run."""

    number: int
    is_full: bool
    """True if the queue is full: the same request can be sent again later. Otherwise the request is invalid."""
    message: str
    num_bytes: ClassVar[int] = REPORT_BYTES


class TokenScore(msgspec.Struct, frozen=True, array_like=True):
    """The log probability of a token at a position."""

    token: int
    logprob: float
    rank: int
    text: str | None
    """The token's text on its own."""


PositionScores: TypeAlias = list[TokenScore]
"""The log probabilities at a position: of the actual token first, then of the likeliest ones."""


def position_scores(
    tokens: Sequence[int], logprobs: Sequence[float], ranks: Sequence[int], name: Callable[[int], str]
) -> PositionScores:
    """The scores of a position: the actual token, then the likeliest ones except that token; `name` gives texts."""
    first = tokens[0]
    return [
        TokenScore(token, logprob, rank, name(token))
        for place, (token, logprob, rank) in enumerate(zip(tokens, logprobs, ranks, strict=True))
        if place == 0 or token != first
    ]


SCORE_BYTES = 16
"""Bytes of a token in `PackedScores`."""


class PackedScores(msgspec.Struct, frozen=True, array_like=True):
    """The log probabilities of a prompt, as arrays of native numbers."""

    counts: bytes
    """int32: the number of tokens at each position, from the second on."""
    tokens: bytes
    """int32: the tokens of all positions, one after the other."""
    logprobs: bytes
    """fp64: one for each token."""
    ranks: bytes
    """int32: one for each token."""

    def positions(self, name: Callable[[int], str]) -> list[PositionScores | None]:
        """The scores of every prompt token; None for the first, which nothing predicts."""
        counts, tokens, ranks = (memoryview(each).cast("i") for each in (self.counts, self.tokens, self.ranks))
        logprobs = memoryview(self.logprobs).cast("d")
        positions: list[PositionScores | None] = [None]
        start = 0
        for count in counts:
            taken = slice(start, start + count)
            positions.append(position_scores(tokens[taken], logprobs[taken], ranks[taken], name))
            start += count
        return positions


TOKEN_SCORE_BYTES = 32
"""About the most bytes of a `TokenScore` in msgpack, with a text of a few letters."""


class ScoredToken(msgspec.Struct, frozen=True, array_like=True):
    """A generated token with its log probabilities."""

    offset: int
    """The offset of its text in the text of all generated tokens."""
    scores: PositionScores


_SCORED_TOKENS = msgspec.msgpack.Decoder(list[ScoredToken])


def read_scored_tokens(packed: bytes | memoryview) -> list[ScoredToken]:
    """The tokens of one delta."""
    return _SCORED_TOKENS.decode(packed)


class Delta(msgspec.Struct, tag="delta", frozen=True):
    """What one continuation gained."""

    number: int
    index: int
    text: str
    num_tokens: int
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: bytes | None = None
    """`list[ScoredToken]` in msgpack."""
    events: tuple[AnswerEvent, ...] = ()
    """What the text says, instead of `text`, if the request says how it is read."""
    num_reasoning: int = 0
    """Its tokens that are reasoning."""

    @property
    def num_bytes(self) -> int:
        """Estimates the memory that it takes while it waits to be read."""
        return REPORT_BYTES * (1 + len(self.events)) + self.num_content_bytes

    @property
    def num_content_bytes(self) -> int:
        """Estimates the memory of its text and its log probabilities."""
        told = sum(2 * (len(event.text) + len(event.name) + len(event.call_id)) for event in self.events)
        return 2 * len(self.text) + told + len(self.logprobs or b"")


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """The last of a request."""

    number: int
    error: str | None
    num_cached: int
    phases: PhaseSeconds
    prompt_logprobs: bytes | None
    """`PackedScores` in msgpack."""

    @property
    def num_bytes(self) -> int:
        return REPORT_BYTES + len(self.prompt_logprobs or b"")


class Vector(msgspec.Struct, tag="vector", frozen=True):
    """A text's vector."""

    number: int
    numbers: bytes
    """Little-endian fp32."""

    @property
    def num_bytes(self) -> int:
        return REPORT_BYTES + len(self.numbers)


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """The engine's state after a step."""

    metrics: EngineMetrics


Command: TypeAlias = Configure | Submit | Read | Cancel | Probe | Stop
Report: TypeAlias = Loading | Opened | Failed | Accepted | Refused | Delta | Ended | Vector | Progress


def command_codec() -> Codec[Command]:
    return Codec(list[Command], MAX_COMMAND_BYTES)


def report_codec(max_bytes: int = MAX_REPORT_BYTES) -> Codec[Report]:
    return Codec(list[Report], max_bytes)
