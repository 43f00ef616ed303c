"""What clients send and get: OpenAI's shapes, with ranges, from which the served OpenAPI document is made.

A number is finite and in its range before anything else sees it. A field that is not here is not used, and the answer
says so. Does not know what a field does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

from sightline.core.request import (
    MAX_CONTINUATIONS,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_STOP_STRINGS,
    MIN_REPETITION_PENALTY,
)

MAX_MESSAGES = 4096
MAX_PROMPTS = 2048
MAX_BIASES = 65536
_MOST = 2**31 - 1

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=_MOST)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=_MOST)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2.0, le=2.0)]
NumLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
StopText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
StopTexts: TypeAlias = Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)]
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=1 << 22)]


class StreamOptions(Struct, frozen=True):
    """What a stream tells beside the text."""

    include_usage: bool = False


class GenerationFields(Struct, kw_only=True, frozen=True):
    """What both kinds of completion take."""

    model: Annotated[str, Meta(max_length=512, description="The served model's name; may be left out.")] | None = None
    max_tokens: Annotated[Count, Meta(description="Most tokens to generate.")] | None = None
    temperature: (
        Annotated[float, Meta(ge=0.0, le=1e4, description="0 is greedy. Without it, the model's default.")] | None
    ) = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_MOST, description="0 and -1 keep every token.")] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CONTINUATIONS, description="Continuations of each prompt.")] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: (
        Annotated[StopText | StopTexts, Meta(description="Text that ends the answer, and is not part of it.")] | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_MOST)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = None
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]],
            Meta(
                max_length=MAX_BIASES,
                description="Token id to what is added to its logit.",
                extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
            ),
        ]
        | None
    ) = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class TextPart(Struct, frozen=True, forbid_unknown_fields=False):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(Struct, frozen=True):
    """One turn of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    reasoning_content: str | None = None

    @property
    def num_characters(self) -> int:
        """Of its content."""
        match self.content:
            case None:
                return 0
            case str():
                return len(self.content)
            case parts:
                return sum(len(part.text) for part in parts)


class ResponseFormat(Struct, frozen=True):
    """The form of the answer. Only text is there yet: the others are refused."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatRequest(GenerationFields, kw_only=True, frozen=True):
    """A conversation to go on with."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128, description="Not there yet: refused.")] | None = None
    tool_choice: Annotated[str | dict[str, Any], Meta(description="Not there yet: refused but for 'none'.")] | None = (
        None
    )
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="The template's own switches.")] | None = None


class CompletionRequest(GenerationFields, kw_only=True, frozen=True):
    """Prompts to continue as they stand."""

    prompt: Annotated[
        str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=1 << 22)],
        Meta(
            description="Text, token ids, or a list of either.",
            extra_json_schema={
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _MOST}, "minItems": 1},
                    {
                        "type": "array",
                        "items": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _MOST}},
                        "minItems": 1,
                        "maxItems": MAX_PROMPTS,
                    },
                ]
            },
        ),
    ]
    logprobs: NumLogprobs | None = None
    echo: Annotated[bool, Meta(description="Give the prompt back before the continuation.")] | None = None
    suffix: Annotated[str, Meta(description="Not there: refused unless empty.")] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CONTINUATIONS, description="Not there: refused unless equal to n.")] | (
        None
    ) = None


class TokenizeRequest(Struct, kw_only=True, frozen=True):
    """A text, or a conversation, to turn into tokens."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True, frozen=True):
    """Tokens to turn into text."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    tokens: TokenIds


class PromptDetails(Struct, frozen=True):
    """Of the prompt's tokens."""

    cached_tokens: int
    """Those that were in the cache already."""


class Usage(Struct, frozen=True):
    """What was read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(Struct, frozen=True):
    """A token and how likely the model held it to be."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(Struct, frozen=True):
    """A token of the answer, and its likeliest rivals."""

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
    """Of a prompt's token."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
FinishReason: TypeAlias = Annotated[str, Meta(extra_json_schema={"enum": ["stop", "length", "abort", "error"]})]


class ChatAnswer(Struct, frozen=True):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


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


class ChatDelta(Struct, frozen=True, omit_defaults=True):
    """What an answer gained."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """What one answer gained."""

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
    """One continuation, or what it gained."""

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


class Model(Struct, frozen=True):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(Struct, frozen=True):
    """The served models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Struct, frozen=True):
    """What a text is in tokens."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str | None] | None = None


class Detokenized(Struct, frozen=True):
    """What tokens are as text."""

    prompt: str


class Status(Struct, frozen=True):
    """How the server is."""

    status: str


class Version(Struct, frozen=True):
    """The server's version."""

    version: str


class EngineState(Struct, frozen=True):
    """The engine process."""

    is_open: bool
    starts: int
    """Times that it was started."""


class ServerInfo(Struct, frozen=True):
    """What runs, as it was resolved."""

    version: str
    models: list[str]
    vocab_size: int
    engine: EngineState
    config: dict[str, str | int | float | bool | None]
    limits: dict[str, str | int | float | bool | None]
    layers: list[str]
    degradations: list[str]


class Error(Struct, frozen=True):
    """What is wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, frozen=True):
    """An error."""

    error: Error = field()
