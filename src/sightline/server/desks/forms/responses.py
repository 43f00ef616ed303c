"""Responses, OpenAI's newer interface: items in, the next items out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from msgspec import Struct

from sightline.core.conversation import Conversation, Tool, ToolChoice, ToolMode, Turn
from sightline.server.api.fields import also_unused, unused_fields
from sightline.server.api.responses.answers import (
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    ResponseEcho,
    ResponseError,
    ResponseState,
    ResponseUsage,
    response_json,
)
from sightline.server.api.responses.body import (
    AllowedFunctions,
    FunctionChoice,
    FunctionEntry,
    InputItem,
    ObjectFormat,
    ReasoningSettings,
    ResponsesRequest,
    SchemaFormat,
    TextSettings,
)
from sightline.server.api.responses.events import ResponseWriter
from sightline.server.api.schema import JsonSchemaFormat, ResponseFormat
from sightline.server.desks.forms.face import AskedConversation, FaceForm
from sightline.server.desks.forms.form import ServedModel
from sightline.server.desks.forms.items import (
    earlier_items,
    listed_items,
    references,
    resolved,
    turns_of,
    with_types,
)
from sightline.server.desks.forms.turns import check_choice, check_tools
from sightline.server.desks.protocol import Generated, Head, Order, ReadBody, Recall, WriteAnswer, WrittenAnswer
from sightline.server.http.errors import invalid, not_stored
from sightline.server.http.limits import parse
from sightline.server.store import StoredResponse

_FAILED = ("abort", "error")
"""Reasons to end that make a response one that failed."""


class ResponsesTicket(Struct, frozen=True):
    """What a response depends on, beside what was generated."""

    echo: bytes
    """`ResponseEcho` in JSON."""
    items: bytes | None
    """The conversation before the answer, as JSON; None if nothing is stored."""


class ResponsesForm(FaceForm[ResponsesTicket]):
    """Bodies and answers of /v1/responses."""

    field_names = MappingProxyType(
        {
            "messages": "input",
            "reasoning_effort": "reasoning.effort",
            "max_tokens": "max_output_tokens",
            "response_format": "text.format",
            "response_format.json_schema": "text.format",
            "structured_outputs": "text.format",
        }
    )

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model, ResponsesTicket)

    def read(self, job: ReadBody) -> Order | Recall:
        request, strays = parse(job.body, ResponsesRequest, with_types)
        unused = unused_fields(strays, allows_unknown=self._model.allows_unknown)
        needed = _needed(request)
        if needed and job.recalled is None:
            return Recall(job.number, tuple(needed))
        items = _items(request, job.recalled or {})
        stored = self._stored(request, items, len(job.body))
        echo = msgspec.json.encode(_echo(request, is_stored=stored is not None))
        asked = AskedConversation(
            conversation=_conversation(request, items),
            ticket=ResponsesTicket(echo, stored),
            opening=echo,
            model=request.model,
            stream=request.stream,
            priority=request.priority,
            max_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            response_format=_format(request.text),
        )
        return self.take(job.number, asked, also_unused(unused, _without_effect(request)))

    def write(self, job: WriteAnswer) -> WrittenAnswer:
        ticket, [continuation] = self._tickets.decode(job.ticket), self._outcomes.decode(job.outcome).continuations
        kept = None if continuation.finish_reason in _FAILED else ticket.items
        return msgspec.structs.replace(super().write(job), kept=kept)

    def answer(self, ticket: ResponsesTicket, head: Head, outcome: Generated) -> msgspec.Raw:
        return response_json(finished(head, outcome), ticket.echo)

    def _stored(self, request: ResponsesRequest, items: list[InputItem], num_repeated: int) -> bytes | None:
        """What is kept of the conversation. Raises `ApiError` if it must be kept, and cannot.

        A response also repeats parts of its body, of `num_repeated` bytes.
        """
        if request.store is False:
            return None
        packed = msgspec.json.encode(items)
        # The other half is for the answer, so that what is said to be stored is.
        size, most = len(packed) + num_repeated, self._model.max_kept_bytes // 2
        if size <= most:
            return packed
        if request.store:
            raise invalid(
                f"expected store with a conversation of at most {most:,} bytes, got {size:,}; leave it out, or start "
                "the server with larger --max-stored-bytes and --max-body-bytes",
                "store",
            )
        return None


def finished(head: Head, outcome: Generated) -> ResponseState:
    """A response whose generation has ended."""
    [continuation] = outcome.continuations
    writer = ResponseWriter(head.id)
    for event in continuation.told():
        for _ in writer.take(event):
            pass
    is_cut, failed = continuation.finish_reason == "length", continuation.finish_reason in _FAILED
    for _ in writer.close("incomplete" if is_cut or failed else "completed"):
        pass
    return ResponseState(
        head.id,
        head.created,
        head.model,
        "failed" if failed else "incomplete" if is_cut else "completed",
        tuple(writer.items),
        ResponseUsage(
            outcome.num_prompt_tokens,
            InputDetails(outcome.num_cached),
            outcome.num_generated,
            OutputDetails(outcome.num_reasoning),
            outcome.num_prompt_tokens + outcome.num_generated,
        ),
        IncompleteDetails("max_output_tokens") if is_cut else None,
        ResponseError("server_error", "the response was ended before it was complete") if failed else None,
    )


def _needed(request: ResponsesRequest) -> list[str]:
    """The ids of the stored responses that a body goes on from."""
    first = [] if request.previous_response_id is None else [request.previous_response_id]
    return list(dict.fromkeys([*first, *references(listed_items(request.input))]))


def _items(request: ResponsesRequest, recalled: Mapping[str, StoredResponse]) -> list[InputItem]:
    """The items of the whole conversation. Raises `ApiError` for those that are not stored."""
    previous = request.previous_response_id
    if previous is not None and previous not in recalled:
        raise not_stored(previous, "previous_response_id")
    earlier = [] if previous is None else earlier_items(recalled[previous])
    return [*earlier, *resolved(listed_items(request.input), recalled)]


def _conversation(request: ResponsesRequest, items: list[InputItem]) -> Conversation:
    first = () if request.instructions is None else (Turn("system", request.instructions),)
    tools = check_tools(tuple(map(_tool, request.tools or ())))
    return Conversation(
        (*first, *turns_of(items)),
        tools,
        check_choice(_choice(request), tools),
        request.parallel_tool_calls is not False,
        None if request.reasoning is None else request.reasoning.effort,
    )


def _tool(tool: FunctionEntry) -> Tool:
    parameters = None if tool.parameters is None else msgspec.json.encode(tool.parameters).decode()
    # OpenAI's default is strict, but not every schema can be held: only those that ask for it are.
    return Tool(tool.name, tool.description, parameters, strict=tool.strict is True)


def _choice(request: ResponsesRequest) -> ToolChoice:
    match request.tool_choice:
        case None:
            return ToolChoice()
        case str(mode):
            return ToolChoice(ToolMode(mode))
        case FunctionChoice(name=name):
            return ToolChoice(ToolMode.REQUIRED, (name,))
        case AllowedFunctions(mode=mode, tools=tools):
            return ToolChoice(ToolMode(mode), tuple(each.name for each in tools))


def _format(text: TextSettings | None) -> ResponseFormat | None:
    match None if text is None else text.format:
        case SchemaFormat(schema=schema):
            return ResponseFormat("json_schema", JsonSchemaFormat(schema))
        case ObjectFormat():
            return ResponseFormat("json_object")
        case _:
            return None


def _without_effect(request: ResponsesRequest) -> list[str]:
    """The paths of known fields that have no effect."""
    summary = request.reasoning is not None and request.reasoning.summary is not None
    return [*(["include"] if request.include else []), *(["reasoning.summary"] if summary else [])]


def _echo(request: ResponsesRequest, *, is_stored: bool) -> ResponseEcho:
    reasoning = request.reasoning or ReasoningSettings()
    wanted = None if request.text is None else request.text.format
    text = {"format": {"type": "text"} if wanted is None else msgspec.to_builtins(wanted)}
    choice = "auto" if request.tool_choice is None else msgspec.to_builtins(request.tool_choice)
    return ResponseEcho(
        request.instructions,
        request.max_output_tokens,
        request.metadata or {},
        request.parallel_tool_calls is not False,
        request.previous_response_id,
        {"effort": reasoning.effort, "summary": None},
        is_stored,
        request.temperature,
        text,
        choice,
        [msgspec.to_builtins(tool) for tool in request.tools or ()],
        request.top_p,
    )
