"""Types of the bodies of /v1/messages. Does not know what a field does."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from sightline.core.request import MAX_STOP_STRINGS
from sightline.server.api.responses.body import CallId
from sightline.server.api.schema import MAX_MESSAGES, MAX_TOOLS, Count, FunctionName, Name, Priority, StopText


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call that an earlier answer asked for."""

    id: CallId
    name: FunctionName
    input: dict[str, Any]


class ToolResultBlock(Struct, frozen=True, tag_field="type", tag="tool_result"):
    """The result of a call."""

    tool_use_id: CallId
    content: str | list[TextBlock] | None = None
    is_error: Annotated[bool | None, Meta(description="No effect: the result's text tells it.")] = None


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    """The reasoning of an earlier answer."""

    thinking: str


class MessageTurn(Struct, frozen=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock]


class MessagesTool(Struct, frozen=True):
    """A tool that the answer may ask to be called."""

    name: FunctionName
    input_schema: Annotated[dict[str, Any], Meta(description="The JSON schema of its arguments.")]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class AutoChoice(Struct, frozen=True, tag_field="type", tag="auto"):
    """The answer may call tools."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, frozen=True, tag_field="type", tag="any"):
    """The answer must call a tool."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(Struct, frozen=True, tag_field="type", tag="tool"):
    """The answer must call this tool."""

    name: FunctionName
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, frozen=True, tag_field="type", tag="none"):
    """The answer must not call tools."""


class ThinkingOn(Struct, frozen=True, tag_field="type", tag="enabled"):
    """The model reasons, for at most so many tokens."""

    budget_tokens: Count


class ThinkingAdaptive(Struct, frozen=True, tag_field="type", tag="adaptive"):
    """The model reasons as much as it likes."""


class ThinkingOff(Struct, frozen=True, tag_field="type", tag="disabled"):
    """The model does not reason."""


class MessageFormat(Struct, frozen=True, tag_field="type", tag="json_schema"):
    """The answer must be JSON that a schema allows."""

    schema: Annotated[dict[str, Any] | bool, Meta(description="The JSON schema.")]


class OutputSettings(Struct, frozen=True):
    """What the answer must be, and how much the model reasons about it."""

    format: MessageFormat | None = None
    effort: Annotated[str, Meta(max_length=32)] | None = None


System: TypeAlias = str | list[TextBlock]
Thinking: TypeAlias = ThinkingOn | ThinkingAdaptive | ThinkingOff
MessagesChoice: TypeAlias = AutoChoice | AnyChoice | NamedChoice | NoChoice


class CountRequest(Struct, kw_only=True, frozen=True):
    """A conversation whose tokens are to be counted."""

    messages: Annotated[
        list[MessageTurn], Meta(min_length=1, max_length=MAX_MESSAGES, description="The conversation so far.")
    ]
    model: Annotated[Name | None, Meta(description="The served model's name; may be left out.")] = None
    system: Annotated[System | None, Meta(description="A system message before everything else.")] = None
    tools: Annotated[list[MessagesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputSettings | None = None


class MessagesRequest(CountRequest, kw_only=True, frozen=True):
    """A conversation to answer."""

    max_tokens: Annotated[Count, Meta(description="Most tokens to generate.")]
    stream: Annotated[bool | None, Meta(description="Tell the answer as it comes, in server-sent events.")] = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    priority: Priority = None
