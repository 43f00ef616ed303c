"""What the front end and a desk say to each other, in frames.

    body ─▶ ReadBody ─▶ desk ─▶ Order ─▶ (engine) ─▶ WriteAnswer ─▶ desk ─▶ WrittenAnswer ─▶ answer

A desk keeps nothing between two jobs: what it needs to write an answer comes back to it as the order's `ticket`, which
the front end never opens. Numbers name jobs; a desk does one at a time and repeats its number. Does not know HTTP.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct, field

from sightline.core.conversation import AnswerEvent, CollectedAnswer, EventKind, collected, merged
from sightline.server.process.frames import Codec
from sightline.server.process.protocol import Delta, ScoredToken, read_scored_tokens
from sightline.server.store import StoredResponse

MAX_JOB_BYTES = 1 << 28
"""A frame to a desk: the largest holds a vocabulary, or the log probabilities of a whole answer."""
MAX_PIECES = 256
"""Pieces of text before they are joined, so that an answer is few objects however many tokens it has."""
MAX_RESULT_BYTES = 1 << 29
"""A frame from a desk: the largest holds the JSON of a whole answer."""


class FormName(StrEnum):
    """The kinds of bodies that a desk reads."""

    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT = "count"
    COMPLETION = "completion"
    EMBED = "embed"
    SCORE = "score"
    RERANK = "rerank"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"


class Setup(Struct, tag="setup", frozen=True):
    """The first message: the served model, as far as bodies and answers depend on it."""

    tokenizer: bytes
    """`TokenizerData` in msgpack."""
    names: tuple[str, ...]
    """The names that clients may use."""
    vocab_size: int
    vector_size: int | None
    """Numbers in a vector; None if the model generates."""
    max_model_len: int
    max_cost: int
    allows_unknown: bool
    """Names unknown fields in a header instead of refusing them."""
    least_priority: int
    """The least priority that a request may ask for: the lower, the earlier."""
    log_level: str
    seconds: float
    """How long a job may take."""
    max_answer_bytes: int
    """Most that the engine process may send for one request."""
    max_kept_bytes: int = 0
    """Most bytes that are kept of one response; 0: none is stored."""


class Head(Struct, frozen=True):
    """The fields that every body and every event of an answer begins with."""

    id: str
    created: int
    model: str


class Continuation(Struct):
    """One of the answers, as far as it has been generated."""

    pieces: list[str] = field(default_factory=list)
    logprobs: bytearray = field(default_factory=bytearray)
    """The log probabilities of every delta: length (4 bytes), then `list[ScoredToken]` in msgpack."""
    num_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    events: list[AnswerEvent] = field(default_factory=list)
    """What the answer says, instead of `pieces`, if the request says how it is read."""
    num_reasoning: int = 0
    """Its tokens that are reasoning."""
    num_kept: int = 0
    """Events that were left when neighbours were last joined."""

    def count(self, delta: Delta) -> None:
        """Takes in what is known of an answer whose text is sent as it comes."""
        self.num_tokens += delta.num_tokens
        self.num_reasoning += delta.num_reasoning
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def keep(self, delta: Delta) -> None:
        """Keeps the text for an answer that is sent as a whole."""
        self.pieces.append(delta.text)
        if len(self.pieces) > MAX_PIECES:
            self.pieces = [self.text]
        self.events += delta.events
        if len(self.events) > 2 * self.num_kept + MAX_PIECES:
            self.events = merged(self.events)
            self.num_kept = len(self.events)
        if delta.logprobs is not None:
            self.logprobs += len(delta.logprobs).to_bytes(4, "big") + delta.logprobs

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def answer(self) -> CollectedAnswer:
        """The answer, of which the text is content if nothing says how it is read."""
        return collected(self.events) if self.events else CollectedAnswer(self.text)

    def told(self) -> list[AnswerEvent]:
        """What the answer says, in order."""
        if self.events or not self.text:
            return merged(self.events)
        return [AnswerEvent(EventKind.CONTENT, self.text)]

    def scored_tokens(self) -> list[ScoredToken]:
        """The tokens with their log probabilities."""
        tokens, place, packed = [], 0, memoryview(self.logprobs)
        while place < len(packed):
            end = place + 4 + int.from_bytes(packed[place : place + 4], "big")
            tokens += read_scored_tokens(packed[place + 4 : end])
            place = end
        return tokens


class Generated(Struct):
    """The continuations of all prompts of a request."""

    num_prompt_tokens: int
    n: int
    """Continuations per prompt."""
    continuations: list[Continuation]
    """`n` of the first prompt, then `n` of the second, and so on."""
    num_cached: int = 0
    prompt_logprobs: dict[int, bytes] = field(default_factory=dict)
    """Log probabilities of prompts, by the prompt's index; each `PackedScores` in msgpack."""

    @property
    def num_generated(self) -> int:
        return sum(each.num_tokens for each in self.continuations)

    @property
    def num_reasoning(self) -> int:
        return sum(each.num_reasoning for each in self.continuations)


class EmbeddedTexts(Struct, frozen=True):
    """The vectors of all texts of a request."""

    num_prompt_tokens: int
    vectors: list[bytes]
    """Little-endian fp32."""


class ReadBody(Struct, tag="read", frozen=True):
    """Read a request's body."""

    number: int
    form: FormName
    body: bytes
    recalled: dict[str, StoredResponse] | None = None
    """The stored responses that the body refers to, by id, as far as its caller has them; None: not asked for yet."""


class WriteAnswer(Struct, tag="write", frozen=True):
    """Write the body of an answer."""

    number: int
    form: FormName
    ticket: bytes
    """A copy of what came with the order."""
    head: Head
    outcome: bytes
    """`Generated` or `EmbeddedTexts` in msgpack."""


class Ready(Struct, tag="ready", frozen=True):
    """The desk can take jobs."""

    number: int = 0


class UsageEvents(StrEnum):
    """Which events of a stream report usage."""

    NONE = "none"
    LAST = "last"
    EVERY = "every"


class StreamShape(Struct, frozen=True):
    """What a stream's events depend on."""

    num_logprobs: int | None
    usage: UsageEvents
    echoed: tuple[str, ...] = ()
    """The text that each prompt's continuations begin with; empty if they begin with nothing."""
    opening: bytes = b""
    """What the events repeat of the request, if they do, as JSON."""

    @property
    def num_scored(self) -> int:
        """Log probabilities of each generated token: its own, and those of the likeliest."""
        return 0 if self.num_logprobs is None else 1 + self.num_logprobs


class Order(Struct, tag="order", frozen=True):
    """What the engine has to do for a body."""

    number: int
    model: str
    """The name to answer under."""
    prompts: tuple[bytes, ...]
    """Packed token ids."""
    params: bytes | None
    """`SamplingParams` in msgpack; None asks for vectors."""
    n: int
    """Continuations per prompt."""
    ticket: bytes
    """What the desk needs to write the answer."""
    stream: StreamShape | None = None
    """None if the answer is sent as a whole."""
    unused: tuple[str, ...] = ()
    """Paths of the body's fields that have no effect."""
    priority: int = 0
    """Lower goes first."""


class WrittenAnswer(Struct, tag="written", frozen=True):
    """The body of an answer."""

    number: int
    body: bytes
    unused: tuple[str, ...] = ()
    kept: bytes | None = None
    """What is kept beside the body, for later requests; None: the answer is not stored."""


class Recall(Struct, tag="recall", frozen=True):
    """The body refers to stored responses: it must be read with them."""

    number: int
    responses: tuple[str, ...]
    """Their ids."""


class Declined(Struct, tag="declined", frozen=True):
    """The body is refused: the fields of an `ApiError`."""

    number: int
    status: int
    message: str
    kind: str
    param: str | None
    code: str | None


class Broken(Struct, tag="broken", frozen=True):
    """Something raised that must not."""

    number: int
    error: str
    """The exception's type. Its message may contain a client's text."""
    where: tuple[str, ...]
    """The lines of the traceback."""
    is_last: bool = False
    """The desk ends: after a panic a library's state may be lost, and without memory more may not come back."""


Job: TypeAlias = Setup | ReadBody | WriteAnswer
Result: TypeAlias = Ready | Order | WrittenAnswer | Recall | Declined | Broken


def job_codec() -> Codec[Job]:
    return Codec(list[Job], MAX_JOB_BYTES)


def result_codec() -> Codec[Result]:
    return Codec(list[Result], MAX_RESULT_BYTES)
