"""Types of the bodies that clients of /v1/messages receive."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"]


class TextAnswer(Struct, frozen=True, tag_field="type", tag="text"):
    """Visible text."""

    text: str


class ThinkingAnswer(Struct, frozen=True, tag_field="type", tag="thinking"):
    """Reasoning. It is not signed."""

    thinking: str
    signature: str = ""


class ToolUseAnswer(Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call that the answer asks for."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


AnswerBlock: TypeAlias = TextAnswer | ThinkingAnswer | ToolUseAnswer


class MessagesUsage(Struct, frozen=True):
    """Numbers of tokens read and generated."""

    input_tokens: int
    """Tokens of the prompt that were not found in the prefix cache."""
    output_tokens: int
    cache_read_input_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    cache_creation_input_tokens: int = 0
    """Always 0: what is kept in the prefix cache is not counted."""


class MessagesAnswer(Struct, frozen=True):
    """The assistant's turn."""

    id: str
    model: str
    content: tuple[AnswerBlock, ...]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(Struct, frozen=True):
    """The number of tokens of a conversation."""

    input_tokens: int
