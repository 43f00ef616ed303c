"""Types of the bodies that clients receive, in OpenAI's shapes. The OpenAPI document is generated from them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType


class PromptDetails(Struct, frozen=True):
    """Details of the prompt's tokens."""

    cached_tokens: int
    """Tokens that were found in the prefix cache."""


class CompletionDetails(Struct, frozen=True):
    """Details of the generated tokens."""

    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """Numbers of tokens read and generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopLogprob(Struct, frozen=True):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(Struct, frozen=True):
    """A token of the answer, and the likeliest tokens at its position."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Log probabilities of an answer's tokens."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """Log probabilities of a continuation's tokens, in the older shape."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True):
    """The log probability of a token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
FinishReason: TypeAlias = Annotated[
    str, Meta(extra_json_schema={"enum": ["stop", "length", "tool_calls", "abort", "error"]})
]


class ChatFunction(Struct, frozen=True):
    """A function to call, and its arguments as JSON text."""

    name: str
    arguments: str


class ChatCall(Struct, frozen=True):
    """A call that the answer asks for."""

    id: str
    type: Literal["function"]
    function: ChatFunction


class ChatAnswer(Struct, frozen=True):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    """Null only beside calls."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One answer."""

    index: int
    message: ChatAnswer
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None


class ChatCompletion(Struct, frozen=True):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatFunctionPiece(Struct, frozen=True):
    """A piece of a call's arguments; the first of a call has the name."""

    arguments: str
    name: str | UnsetType = UNSET


class ChatCallPiece(Struct, frozen=True):
    """A piece of a call; the first of a call has the id."""

    index: int
    function: ChatFunctionPiece
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True, omit_defaults=True):
    """A piece of an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatCallPiece] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """A piece of one of the answers."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(Struct, frozen=True):
    """An event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionChoice(Struct, frozen=True):
    """One continuation, or a piece of it."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: CompletionLogprobs | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, frozen=True):
    """Continuations of prompts, or an event of their stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class EmbeddingUsage(Struct, frozen=True):
    """Numbers of tokens read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingData(Struct, frozen=True):
    """One text's vector: numbers, or their bytes (little-endian fp32) in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Struct, frozen=True):
    """Vectors of texts, in order."""

    object: Literal["list"]
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingUsage


class TextScore(Struct, frozen=True):
    """The similarity of two texts: the cosine of their vectors."""

    object: Literal["score"]
    index: int
    score: float


class Scores(Struct, frozen=True):
    """The similarities of pairs of texts."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[TextScore]
    usage: EmbeddingUsage


class RankedText(Struct, frozen=True):
    """A document."""

    text: str


class Ranked(Struct, frozen=True):
    """A document with its score."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(Struct, frozen=True):
    """Documents, the most similar first."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


class ModelCard(Struct, frozen=True):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(Struct, frozen=True):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Struct, frozen=True):
    """The tokens of a text."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str | None] | None = None


class Detokenized(Struct, frozen=True):
    """The text of tokens."""

    prompt: str


class Status(Struct, frozen=True):
    """The state of the server."""

    status: str


class Version(Struct, frozen=True):
    """The server's version."""

    version: str


class EngineState(Struct, frozen=True):
    """The state of the engine process."""

    is_open: bool
    starts: int
    """How often it was started."""


class HostCacheState(Struct, frozen=True):
    """The host tier of the prefix cache."""

    bytes: int
    """Host memory that it takes."""
    blocks: int
    """Pages that it holds."""
    usage: float
    """Share of it that holds pages, 0 to 1."""
    offloads: int
    """Pages that left the cache for it."""
    returns: int
    """Pages that came back."""
    failures: int
    """Pages that could not be copied, in either direction."""
    hit_tokens: int
    """Prompt tokens that were found in it."""


class ServerInfo(Struct, frozen=True):
    """The resolved configuration of the server and its engine."""

    version: str
    models: list[str]
    vocab_size: int
    engine: EngineState
    config: dict[str, str | int | float | bool | None]
    limits: dict[str, str | int | float | bool | None]
    layers: list[str]
    degradations: list[str]
    """Degradations: respects in which the server does less than was asked for. `--strict` refuses each."""
    notes: list[str]
    """Facts worth knowing that do not change results."""
    host_cache: HostCacheState | None = None
    """Counts of the running engine process; null without a host cache, or before the engine has reported."""
    tools_refusal: str | None = None
    """Why requests with tools are refused; null if they are not."""


class Error(Struct, frozen=True):
    """The details of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, frozen=True):
    """The body of an error."""

    error: Error


class MessagesError(Struct, frozen=True):
    """The details of an error, in Anthropic's shape."""

    type: str
    message: str


class MessagesErrorBody(Struct, frozen=True):
    """The body of an error of /v1/messages."""

    type: Literal["error"]
    error: MessagesError
    request_id: str | None = None
