"""What an answer says, in the shapes of chat completions: reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from sightline.core.conversation import AnswerEvent, CollectedAnswer, EventKind
from sightline.server.api.answers import (
    ChatAnswer,
    ChatCall,
    ChatCallPiece,
    ChatDelta,
    ChatFunction,
    ChatFunctionPiece,
)


def chat_answer(answer: CollectedAnswer) -> ChatAnswer:
    """The assistant's message. Content is null only beside calls."""
    calls = [ChatCall(call.id, "function", ChatFunction(call.name, call.arguments)) for call in answer.calls]
    return ChatAnswer(
        "assistant",
        answer.content if answer.content is not None or calls else "",
        None,
        UNSET if answer.reasoning is None else answer.reasoning,
        calls or UNSET,
    )


def chat_delta(events: Iterable[AnswerEvent]) -> ChatDelta:
    """The delta that tells some events. Reasoning, content and each call are fields of their own, joined in order."""
    texts: dict[EventKind, list[str]] = {EventKind.REASONING: [], EventKind.CONTENT: []}
    begun: dict[int, AnswerEvent] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        match event.kind:
            case EventKind.CALL:
                begun[event.call] = event
                arguments.setdefault(event.call, [])
            case EventKind.ARGUMENTS:
                arguments.setdefault(event.call, []).append(event.text)
            case EventKind.CALL_END:
                pass
            case kind:
                texts[kind].append(event.text)
    calls = [_call_piece(index, begun.get(index), "".join(pieces)) for index, pieces in arguments.items()]
    return ChatDelta(
        content="".join(texts[EventKind.CONTENT]) or UNSET,
        reasoning_content="".join(texts[EventKind.REASONING]) or UNSET,
        tool_calls=calls or UNSET,
    )


def _call_piece(index: int, begun: AnswerEvent | None, arguments: str) -> ChatCallPiece:
    if begun is None:
        return ChatCallPiece(index, ChatFunctionPiece(arguments))
    return ChatCallPiece(index, ChatFunctionPiece(arguments, begun.name), begun.call_id, "function")
