"""Types of the bodies of /v1/responses. Does not know what a field does."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from sightline.server.api.schema import MAX_MESSAGES, MAX_TOOLS, Count, FunctionName, Name, Priority

CallId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512)]
"""Longer than any id that an answer has: what the server says can be sent back, and read from what it keeps."""
ResponseId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


class InputText(Struct, frozen=True, tag_field="type", tag="input_text"):
    """A piece of a message."""

    text: str


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """A piece of an earlier answer."""

    text: str


class Refusal(Struct, frozen=True, tag_field="type", tag="refusal"):
    """A piece of an earlier answer that declined."""

    refusal: str


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """A piece of reasoning."""

    text: str


class SummaryText(Struct, frozen=True, tag_field="type", tag="summary_text"):
    """A piece of a summary of reasoning."""

    text: str


class MessageItem(Struct, frozen=True, tag_field="type", tag="message"):
    """A message of a conversation. Its `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal]


class FunctionCallItem(Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call that an earlier answer asked for."""

    call_id: CallId
    name: FunctionName
    arguments: str


class FunctionOutputItem(Struct, frozen=True, tag_field="type", tag="function_call_output"):
    """The result of a call."""

    call_id: CallId
    output: str | list[InputText]


class ReasoningItem(Struct, frozen=True, tag_field="type", tag="reasoning"):
    """The reasoning of an earlier answer."""

    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None


class ItemReference(Struct, frozen=True, tag_field="type", tag="item_reference"):
    """An item of an earlier response that the server keeps, by its id. Its `type` may be left out."""

    id: ResponseId


InputItem: TypeAlias = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | ItemReference


class PlainFormat(Struct, frozen=True, tag_field="type", tag="text"):
    """The answer may be any text."""


class ObjectFormat(Struct, frozen=True, tag_field="type", tag="json_object"):
    """The answer must be a JSON object."""


class SchemaFormat(Struct, frozen=True, tag_field="type", tag="json_schema"):
    """The answer must be JSON that a schema allows."""

    schema: Annotated[dict[str, Any] | bool, Meta(description="The JSON schema.")]
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: Annotated[str, Meta(max_length=1 << 16)] | None = None
    strict: Annotated[
        bool | None, Meta(description="No effect: answers always satisfy the schema, or it is refused.")
    ] = None


class TextSettings(Struct, frozen=True):
    """What the text of the answer must be."""

    format: PlainFormat | ObjectFormat | SchemaFormat | None = None


class ReasoningSettings(Struct, frozen=True):
    """How the model reasons."""

    effort: Annotated[str, Meta(max_length=32)] | None = None
    summary: Annotated[
        Literal["auto"] | None, Meta(description="No effect: reasoning is told whole, and never summarised.")
    ] = None


class FunctionEntry(Struct, frozen=True, tag_field="type", tag="function"):
    """A function that the answer may ask to be called."""

    name: FunctionName
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class FunctionChoice(Struct, frozen=True, tag_field="type", tag="function"):
    """A function that must be called."""

    name: FunctionName


class AllowedFunctions(Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """The tools that may, or must, be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


class ResponsesStreamOptions(Struct, frozen=True):
    """Options of a streamed response."""


class ResponsesRequest(Struct, kw_only=True, frozen=True):
    """A conversation to go on with."""

    input: Annotated[
        str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)],
        Meta(description="A user's message, or the items of a conversation."),
    ]
    model: Annotated[Name | None, Meta(description="The served model's name; may be left out.")] = None
    instructions: Annotated[str | None, Meta(description="A system message before everything else.")] = None
    previous_response_id: Annotated[
        ResponseId | None, Meta(description="Go on from this response, which must be stored under the same key.")
    ] = None
    store: Annotated[bool | None, Meta(description="Keep the response for later requests; on unless false.")] = None
    metadata: Annotated[
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None,
        Meta(description="The client's own notes, given back with the response."),
    ] = None
    stream: Annotated[bool | None, Meta(description="Tell the answer as it comes, in server-sent events.")] = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: Annotated[Count | None, Meta(description="Most tokens to generate.")] = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    tools: Annotated[list[FunctionEntry], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedFunctions | None = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="Several calls in one answer; on unless false.")] = (
        None
    )
    include: Annotated[
        list[Literal["reasoning.encrypted_content"]] | None,
        Meta(description="No effect: reasoning is told as text, not encrypted."),
    ] = None
    priority: Priority = None
