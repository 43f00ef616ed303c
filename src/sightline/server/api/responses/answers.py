"""Types of the bodies that clients of /v1/responses receive."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct, defstruct
from msgspec.structs import fields

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class TextContent(Struct, frozen=True, tag_field="type", tag="output_text"):
    """The visible text of an answer."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class ReasoningContent(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str


class OutputMessage(Struct, frozen=True, tag_field="type", tag="message"):
    """A message of the assistant."""

    id: str
    status: Status
    content: tuple[TextContent, ...] = ()
    role: Literal["assistant"] = "assistant"


class OutputReasoning(Struct, frozen=True, tag_field="type", tag="reasoning"):
    """The reasoning before an answer."""

    id: str
    status: Status
    content: tuple[ReasoningContent, ...] = ()
    summary: tuple[()] = ()
    encrypted_content: None = None


class OutputCall(Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call that the answer asks for."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str = ""


OutputItem: TypeAlias = OutputMessage | OutputReasoning | OutputCall
ContentPart: TypeAlias = TextContent | ReasoningContent


class InputDetails(Struct, frozen=True):
    """Details of the tokens read."""

    cached_tokens: int
    """Tokens that were found in the prefix cache."""
    cache_write_tokens: int = 0
    """Always 0: what is kept in the prefix cache is not counted."""


class OutputDetails(Struct, frozen=True):
    """Details of the tokens generated."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    """Numbers of tokens read and generated."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Struct, frozen=True):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class ResponseError(Struct, frozen=True):
    """Why a response failed."""

    code: Literal["server_error"]
    message: str


class ResponseState(Struct, frozen=True):
    """The part of a response that changes while it is generated."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: tuple[OutputItem, ...] = ()
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    completed_at: int | None = None
    object: Literal["response"] = "response"


class ResponseEcho(Struct, frozen=True):
    """The part of a response that repeats its request."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    """True if the response is kept for later requests."""
    temperature: float | None
    """As requested; null: the server's default, which the header x-sightline-sampling tells."""
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"


Response = defstruct(
    "Response",
    [
        (each.encode_name, each.type, *([] if each.required else [each.default]))
        for each in sorted((*fields(ResponseState), *fields(ResponseEcho)), key=lambda each: not each.required)
    ],
    frozen=True,
)
"""A response."""


def response_json(state: ResponseState, echo: bytes) -> msgspec.Raw:
    """A response as JSON; `echo` is its `ResponseEcho` in JSON. One that failed is not kept, and says so."""
    if state.status == "failed":
        told = msgspec.json.decode(echo, type=dict[str, msgspec.Raw])
        echo = msgspec.json.encode(told | {"store": msgspec.Raw(b"false")})
    return msgspec.Raw(msgspec.json.encode(state)[:-1] + b"," + echo[1:])


class DeletedResponse(Struct, frozen=True):
    """A response that is no longer kept."""

    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: Literal[True] = True
