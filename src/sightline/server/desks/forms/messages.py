"""Messages, Anthropic's interface: turns of blocks in, the assistant's next blocks out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import TypeVar

import msgspec
from msgspec import Struct

from sightline.core.conversation import Conversation, Tool, ToolCall, ToolChoice, ToolMode, Turn
from sightline.server.api.fields import also_unused, unused_fields
from sightline.server.api.messages.answers import MessagesAnswer, TokenCount
from sightline.server.api.messages.body import (
    AnyChoice,
    AutoChoice,
    CountRequest,
    MessageFormat,
    MessagesRequest,
    MessagesTool,
    MessageTurn,
    NamedChoice,
    NoChoice,
    TextBlock,
    ThinkingBlock,
    ThinkingOff,
    ThinkingOn,
    ToolResultBlock,
    ToolUseBlock,
)
from sightline.server.api.messages.events import BlockWriter, ending, usage
from sightline.server.api.schema import JsonSchemaFormat, ResponseFormat
from sightline.server.desks.forms.face import AskedConversation, FaceForm
from sightline.server.desks.forms.form import Form, ServedModel
from sightline.server.desks.forms.turns import check_choice, check_tools
from sightline.server.desks.protocol import Generated, Head, Order, ReadBody, WrittenAnswer
from sightline.server.http.errors import check_model, invalid
from sightline.server.http.limits import parse
from sightline.text.templates.chat_template import Ending

_BlockT = TypeVar("_BlockT")
_FIELD_NAMES = MappingProxyType(
    {
        "stop": "stop_sequences",
        "reasoning_effort": "output_config.effort",
        "thinking_token_budget": "thinking.budget_tokens",
        "response_format": "output_config.format",
        "response_format.json_schema": "output_config.format",
        "structured_outputs": "output_config.format",
    }
)


class MessagesTicket(Struct, frozen=True):
    """Nothing: an answer depends on what was generated alone."""


class MessagesForm(FaceForm[MessagesTicket]):
    """Bodies and answers of /v1/messages."""

    field_names = _FIELD_NAMES

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model, MessagesTicket)

    def read(self, job: ReadBody) -> Order:
        request, strays = parse(job.body, MessagesRequest)
        unused = unused_fields(strays, allows_unknown=self._model.allows_unknown)
        asked = AskedConversation(
            conversation=_conversation(request),
            ticket=MessagesTicket(),
            ending=_ending(request),
            model=request.model,
            stream=request.stream,
            priority=request.priority,
            max_tokens=request.max_tokens,
            stop=request.stop_sequences or None,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            response_format=_format(request),
        )
        return self.take(job.number, asked, also_unused(unused, _without_effect(request)))

    def answer(self, ticket: MessagesTicket, head: Head, outcome: Generated) -> MessagesAnswer:
        del ticket
        [continuation] = outcome.continuations
        writer = BlockWriter()
        for event in continuation.told():
            for _ in writer.take(event):
                pass
        for _ in writer.close():
            pass
        end = ending(continuation)
        return MessagesAnswer(
            head.id, head.model, tuple(writer.blocks), end.stop_reason, end.stop_sequence, usage(outcome)
        )


class CountForm(Form[CountRequest]):
    """Numbers of tokens of conversations."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model, CountRequest)

    def take(self, number: int, request: CountRequest, unused: tuple[str, ...]) -> WrittenAnswer:
        model, conversation = self._model, _conversation(request)
        check_model(request.model, model.names)
        count = len(model.text.open(conversation, _ending(request)).token_ids)
        unread = [*model.text.unread(conversation), *_without_effect(request)]
        return WrittenAnswer(number, msgspec.json.encode(TokenCount(count)), also_unused(unused, unread))


def _conversation(request: CountRequest) -> Conversation:
    """Raises `ApiError` for a choice of tools that are not there."""
    tools = check_tools(tuple(map(_tool, request.tools or ())))
    choice, parallel = _choice(request)
    config, thinking = request.output_config, request.thinking
    effort = None if config is None else config.effort
    return Conversation(
        tuple(_turns(request)),
        tools,
        check_choice(choice, tools),
        parallel,
        "none" if isinstance(thinking, ThinkingOff) else effort,
        thinking.budget_tokens if isinstance(thinking, ThinkingOn) else None,
    )


def _turns(request: CountRequest) -> Iterator[Turn]:
    match request.system:
        case str(text) if text:
            yield Turn("system", text)
        case [*blocks] if blocks:
            yield Turn("system", _texts(blocks))
    names: dict[str, str] = {}
    for place, message in enumerate(request.messages):
        content = message.content
        if isinstance(content, str):
            yield Turn(message.role, content)
        elif message.role == "assistant":
            turn = _assistant(content, f"messages[{place}].content")
            names |= {call.id: call.name for call in turn.calls}
            yield turn
        else:
            yield from _said(message, content, names, f"messages[{place}].content")


def _assistant(blocks: Sequence[object], where: str) -> Turn:
    """One turn of the assistant: its blocks are told apart by what they are, not by their order."""
    if _of(blocks, ToolResultBlock):
        raise invalid("expected tool_result in a message of the user, got it in the assistant's", where)
    texts, calls = _of(blocks, TextBlock), _of(blocks, ToolUseBlock)
    thoughts = [each.thinking for each in _of(blocks, ThinkingBlock)]
    return Turn(
        "assistant",
        _texts(texts) if texts else None,
        reasoning="\n".join(thoughts) or None,
        calls=tuple(ToolCall(each.id, each.name, msgspec.json.encode(each.input).decode()) for each in calls),
    )


def _said(message: MessageTurn, blocks: Sequence[object], names: dict[str, str], where: str) -> Iterator[Turn]:
    """The turns of a message that is not the assistant's: a result of a call is a turn of its own."""
    if not blocks:
        raise invalid("expected a block, got none; leave the message out", where)
    texts: list[TextBlock] = []
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(block)
            case ToolResultBlock(tool_use_id, content) if message.role == "user":
                if texts:
                    yield Turn(message.role, _texts(texts))
                    texts = []
                told = content if isinstance(content, str) else _texts(content or [])
                yield Turn("tool", told, names.get(tool_use_id), call_id=tool_use_id)
            case _:
                raise invalid(f"expected text in a message of the {message.role}, got {_kind(block)}", where)
    if texts:
        yield Turn(message.role, _texts(texts))


def _kind(block: object) -> str:
    return str(msgspec.to_builtins(block)["type"])


def _of(blocks: Sequence[object], kind: type[_BlockT]) -> list[_BlockT]:
    return [each for each in blocks if isinstance(each, kind)]


def _texts(blocks: Sequence[TextBlock]) -> str | tuple[str, ...]:
    return blocks[0].text if len(blocks) == 1 else tuple(each.text for each in blocks)


def _tool(tool: MessagesTool) -> Tool:
    parameters = msgspec.json.encode(tool.input_schema).decode()
    return Tool(tool.name, tool.description, parameters, strict=tool.strict is True)


def _choice(request: CountRequest) -> tuple[ToolChoice, bool]:
    """Which tools may be called, and whether several at once."""
    match request.tool_choice:
        case AutoChoice(disable_parallel_tool_use=disabled):
            choice = ToolChoice()
        case AnyChoice(disable_parallel_tool_use=disabled):
            choice = ToolChoice(ToolMode.REQUIRED)
        case NamedChoice(name=name, disable_parallel_tool_use=disabled):
            choice = ToolChoice(ToolMode.REQUIRED, (name,))
        case NoChoice():
            return ToolChoice(ToolMode.NONE), True
        case None:
            return ToolChoice(), True
    return choice, not disabled


def _ending(request: CountRequest) -> Ending:
    """A conversation that ends with the assistant's text is continued, as Anthropic's does."""
    return Ending.CONTINUED if request.messages[-1].role == "assistant" else Ending.NEXT_TURN


def _format(request: MessagesRequest) -> ResponseFormat | None:
    match None if request.output_config is None else request.output_config.format:
        case MessageFormat(schema=schema):
            return ResponseFormat("json_schema", JsonSchemaFormat(schema))
        case None:
            return None


def _without_effect(request: CountRequest) -> list[str]:
    """The paths of known fields that have no effect."""
    results = [block for message in request.messages for block in _of(message.content, ToolResultBlock)]
    return ["messages[].content[].is_error"] if any(each.is_error for each in results) else []
