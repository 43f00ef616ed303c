"""Types of the bodies that clients send: OpenAI's shapes, with ranges. The OpenAPI document is generated from them.

Numbers are checked to be finite and in range before anything else sees them. What becomes of a field that is not
listed here is in `fields`. Does not know what a field does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, defstruct
from msgspec.structs import fields

from sightline.core.request import (
    LOGIT_OFFSET,
    MAX_BAD_WORDS,
    MAX_COUNT,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    SamplingParams,
    Terms,
)
from sightline.core.settings import Setting, stated

MAX_MESSAGES = 4096
MAX_PROMPTS = 2048
MAX_BIASES = 65536
MAX_TOOLS = 128
MAX_CALLS = 1024
"""The most calls in one message."""
_MOST_IN_JSON = 2**63 - 1

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
NumLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Name: TypeAlias = Annotated[str, Meta(max_length=512)]
FunctionName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
StopText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=1 << 22)]
_priority = stated(Terms)["priority"]
Priority: TypeAlias = Annotated[
    Annotated[int, Meta(ge=_priority.low, le=_priority.high)] | None,
    Meta(description=f"{_priority.help} Not below 0 where the server has several keys."),
]
SpecialTokens: TypeAlias = Annotated[
    bool | None,
    Meta(description="Add the model's special tokens to a text; on unless false. No effect on token ids."),
]
GenerationPrompt: TypeAlias = Annotated[
    bool | None, Meta(description="Open the assistant's turn; on unless false, or the last message is continued.")
]
FinalMessage: TypeAlias = Annotated[
    bool | None, Meta(description="Leave the assistant's last message open, so that the answer continues it.")
]
_SHAPES: dict[str, Any] = {
    "stop": StopText | Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)],
    "stop_token_ids": Annotated[list[TokenId], Meta(max_length=1024)],
    "allowed_token_ids": Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_BIASES)],
    "bad_words": Annotated[list[StopText], Meta(max_length=MAX_BAD_WORDS)],
    "logit_bias": Annotated[
        dict[TokenId, Annotated[float, Meta(ge=LOGIT_OFFSET.low, le=LOGIT_OFFSET.high)]],
        Meta(max_length=MAX_BIASES, extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}),
    ],
    "structured_outputs": dict[str, Any],
}
"""Sampling parameters that are no single number or switch, as JSON has them."""


class StreamOptions(Struct, frozen=True):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Report usage so far in every event; needs `include_usage`."""


def _field(parameter: Setting) -> tuple[str, Any, None]:
    """A sampling parameter as a field of a body, which may be null."""
    low, shape = parameter.low, _SHAPES.get(parameter.name, parameter.kind)
    if parameter.high is not None:
        high = min(parameter.high, _MOST_IN_JSON)
        shape = Annotated[shape, Meta(gt=low, le=high) if parameter.excludes_low else Meta(ge=low, le=high)]
    return parameter.name, Annotated[shape | None, Meta(description=parameter.help)], None


_OWN_OR_REFUSED = frozenset({"logprobs", "detokenize", "reading"})
"""Both kinds of completion have log probabilities of their own; an answer without its text is refused, see `fields`;
how an answer is read follows from the model."""

if TYPE_CHECKING:

    class SampledFields(Struct, kw_only=True, frozen=True):
        """The fields that are read here; the others go to the engine as they come."""

        max_tokens: int | None = None
        n: int | None = None
        skip_special_tokens: bool | None = None
        stop: str | list[str] | None = None
        temperature: float | None = None
        top_p: float | None = None
        top_k: int | None = None
        structured_outputs: dict[str, Any] | None = None
        prompt_logprobs: int | None = None
else:
    SampledFields = defstruct(
        "SampledFields",
        [_field(each) for each in stated(SamplingParams).values() if each.name not in _OWN_OR_REFUSED],
        kw_only=True,
        frozen=True,
    )
SAMPLED = tuple(field.name for field in fields(SampledFields))
"""Fields that go to the engine under their own names."""


class JsonSchemaFormat(Struct, frozen=True):
    """A schema that an answer must satisfy, as OpenAI's API has it."""

    schema: Annotated[dict[str, Any] | bool, Meta(description="The JSON schema.")]
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: Annotated[str, Meta(max_length=1 << 16)] | None = None
    strict: Annotated[
        bool | None, Meta(description="No effect: answers always satisfy the schema, or it is refused.")
    ] = None


class ResponseFormat(Struct, frozen=True):
    """A rule for the answer, as OpenAI's API has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class GenerationFields(SampledFields, kw_only=True, frozen=True):
    """Fields of both kinds of completion."""

    model: Annotated[Name | None, Meta(description="The served model's name; may be left out.")] = None
    stream: Annotated[bool | None, Meta(description="Tell the answer as it comes, in server-sent events.")] = None
    stream_options: StreamOptions | None = None
    priority: Priority = None
    response_format: Annotated[
        ResponseFormat | None,
        Meta(description="What the answer must be: any text, a JSON object, or JSON that a schema allows."),
    ] = None
    guided_json: Annotated[dict[str, Any] | str | bool | None, Meta(description="As structured_outputs.json.")] = None
    guided_json_object: Annotated[bool | None, Meta(description="As structured_outputs.json_object.")] = None
    guided_regex: Annotated[str | None, Meta(description="As structured_outputs.regex.")] = None
    guided_choice: Annotated[list[str] | None, Meta(description="As structured_outputs.choice.")] = None
    guided_grammar: Annotated[str | None, Meta(description="As structured_outputs.grammar.")] = None


class TextPart(Struct, frozen=True):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Struct, frozen=True):
    """The function of a call, and its arguments."""

    name: FunctionName
    arguments: Annotated[
        str | dict[str, Any], Meta(description="JSON text, as OpenAI's API has it, or the object itself.")
    ] = "{}"


class MessageCall(Struct, frozen=True):
    """A call that an earlier answer asked for."""

    function: CalledFunction
    id: Annotated[str, Meta(max_length=256)] | None = None
    type: Literal["function"] = "function"


class Message(Struct, frozen=True):
    """One turn of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: Annotated[list[MessageCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, Meta(description="Another name of reasoning_content.")] = None


class FunctionTool(Struct, frozen=True):
    """A function that the model may ask to be called."""

    name: FunctionName
    description: Annotated[str, Meta(max_length=1 << 16)] | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="The JSON schema of its arguments.")] = None
    strict: Annotated[bool | None, Meta(description="Hold the arguments to the schema.")] = None


class ToolEntry(Struct, frozen=True):
    """A tool, as OpenAI's API lists it."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Struct, frozen=True):
    """The name of a function."""

    name: FunctionName


class FunctionReference(Struct, frozen=True):
    """A tool by its name."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Struct, frozen=True):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionReference], Meta(min_length=1, max_length=MAX_TOOLS)]


class ChosenTools(Struct, frozen=True):
    """A choice of tools that is more than a word."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


Tools: TypeAlias = Annotated[
    Annotated[list[ToolEntry], Meta(max_length=MAX_TOOLS)] | None,
    Meta(description="Functions that the model may ask to be called."),
]
Effort: TypeAlias = Annotated[
    Annotated[str, Meta(max_length=32)] | None,
    Meta(description="How much the model should reason, where its chat template reads it; none turns reasoning off."),
]


class ChatRequest(GenerationFields, kw_only=True, frozen=True):
    """A conversation to continue."""

    messages: Annotated[
        list[Message], Meta(min_length=1, max_length=MAX_MESSAGES, description="The conversation so far.")
    ]
    max_completion_tokens: Annotated[Count | None, Meta(description="The newer name of max_tokens.")] = None
    logprobs: Annotated[bool | None, Meta(description="Tell the log probability of every token.")] = None
    top_logprobs: Annotated[NumLogprobs | None, Meta(description="Tell so many of the likeliest tokens too.")] = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: FinalMessage = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="The template's own switches.")] = None
    tools: Tools = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ChosenTools | None,
        Meta(description="Whether the answer may call tools, must, or must call a named one; auto unless stated."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="Allow several calls in an answer; on unless false.")
    ] = None
    reasoning_effort: Effort = None
    thinking_token_budget: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None,
        Meta(description="Most tokens of reasoning; the reasoning is closed behind them."),
    ] = None


TextInput: TypeAlias = Annotated[
    str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=1 << 22)],
    Meta(
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_COUNT}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_COUNT}},
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                },
            ]
        },
    ),
]
"""Text, token ids, or a list of either."""


class CompletionRequest(GenerationFields, kw_only=True, frozen=True):
    """Prompts to continue, without a chat template."""

    prompt: Annotated[TextInput, Meta(description="Text, token ids, or a list of either.")]
    logprobs: Annotated[
        NumLogprobs | None, Meta(description="Tell the log probability of every token, and so many of the likeliest.")
    ] = None
    echo: Annotated[bool | None, Meta(description="Give the prompt back before the continuation.")] = None
    add_special_tokens: SpecialTokens = None


Truncation: TypeAlias = Annotated[
    Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None,
    Meta(description="Cut texts to so many tokens; -1 cuts to the model's limit. Left out: a long text is an error."),
]


class VectorFields(Struct, kw_only=True, frozen=True):
    """Fields of all requests for vectors."""

    model: Name | None = None
    truncate_prompt_tokens: Truncation = None
    priority: Priority = None


class EmbeddingRequest(VectorFields, kw_only=True, frozen=True):
    """Texts to turn into vectors."""

    input: Annotated[TextInput, Meta(description="Text, token ids, or a list of either.")]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[
        Count | None, Meta(description="Keep this many of a vector's first numbers, normalised again.")
    ] = None


class ScoreRequest(VectorFields, kw_only=True, frozen=True):
    """Texts to compare: one with many, or in pairs."""

    text_1: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]
    text_2: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]


class RerankRequest(VectorFields, kw_only=True, frozen=True):
    """Documents to sort by their similarity to a query."""

    query: str
    documents: Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]
    top_n: Annotated[Count | None, Meta(description="Return only this many of the most similar.")] = None
    return_documents: Annotated[bool | None, Meta(description="Return their texts too; on unless false.")] = None


class TokenizeRequest(Struct, kw_only=True, frozen=True):
    """A text, or a conversation, to turn into tokens."""

    model: Name | None = None
    prompt: Annotated[str | None, Meta(description="A text, instead of messages.")] = None
    messages: Annotated[
        Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None,
        Meta(description="A conversation, instead of a prompt."),
    ] = None
    add_special_tokens: SpecialTokens = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: FinalMessage = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="The template's own switches.")] = None
    tools: Tools = None
    reasoning_effort: Effort = None
    return_token_strs: Annotated[bool | None, Meta(description="Return the vocabulary's spelling of each token.")] = (
        None
    )


class DetokenizeRequest(Struct, kw_only=True, frozen=True):
    """Tokens to turn into text."""

    model: Name | None = None
    tokens: TokenIds
