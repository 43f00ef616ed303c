"""The events of a streamed answer of /v1/messages, and the blocks that they build.

An answer that is sent whole is built by the same writer, so both are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import StringIO
from typing import TypeAlias

import msgspec
from msgspec import Struct

from sightline.core.conversation import AnswerEvent, EventKind
from sightline.server.api.messages.answers import (
    AnswerBlock,
    MessagesAnswer,
    MessagesUsage,
    StopReason,
    TextAnswer,
    ThinkingAnswer,
    ToolUseAnswer,
)
from sightline.server.api.streams import AnswerStream, named_event, told_events
from sightline.server.desks.protocol import Continuation, Generated, Head, StreamShape
from sightline.server.http.errors import ApiError, ErrorShape
from sightline.server.process.protocol import Delta

ID_PREFIX = "msg_"


class MessageStart(Struct, frozen=True, tag="message_start"):
    message: MessagesAnswer


class Ping(Struct, frozen=True, tag="ping"):
    """Nothing: it shows that the server is there."""


class TextBlockPiece(Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingBlockPiece(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputBlockPiece(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockStart(Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class BlockDelta(Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextBlockPiece | ThinkingBlockPiece | InputBlockPiece


class BlockStop(Struct, frozen=True, tag="content_block_stop"):
    index: int


class AnswerEnd(Struct, frozen=True):
    """How an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag="message_delta"):
    delta: AnswerEnd
    usage: MessagesUsage


class MessageStop(Struct, frozen=True, tag="message_stop"):
    """The last event."""


MessagesEvent: TypeAlias = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class BlockWriter:
    """Turns the events of an answer into blocks, one after another."""

    def __init__(self) -> None:
        self._open: EventKind | None = None
        """The kind of the block that is being written: reasoning, content or call."""
        self._text = StringIO()
        self._call = AnswerEvent(EventKind.CALL)
        self._is_whole = False
        self.blocks: list[AnswerBlock] = []
        """The blocks that are written."""

    def take(self, event: AnswerEvent) -> Iterator[MessagesEvent]:
        """The events that tell the next step of the answer."""
        match event.kind:
            case EventKind.CALL:
                yield from self.close()
                self._call, self._is_whole = event, False
                yield self._begin(event.kind)
            case EventKind.CALL_END:
                self._is_whole = True
            case kind:
                if kind is not EventKind.ARGUMENTS and kind is not self._open:
                    yield from self.close()
                    yield self._begin(kind)
                if event.text:
                    self._text.write(event.text)
                    yield BlockDelta(len(self.blocks), self._piece(event.text))

    def close(self) -> Iterator[MessagesEvent]:
        """Ends the block that is being written, if there is one."""
        if self._open is None:
            return
        yield BlockStop(len(self.blocks))
        self.blocks.append(self._block(self._text.getvalue()))
        self._open = None

    def _begin(self, kind: EventKind) -> MessagesEvent:
        self._open, self._text = kind, StringIO()
        return BlockStart(len(self.blocks), self._block(""))

    def _piece(self, text: str) -> TextBlockPiece | ThinkingBlockPiece | InputBlockPiece:
        match self._open:
            case EventKind.CALL:
                return InputBlockPiece(text)
            case EventKind.CONTENT:
                return TextBlockPiece(text)
            case _:
                return ThinkingBlockPiece(text)

    def _block(self, text: str) -> AnswerBlock:
        match self._open:
            case EventKind.CALL:
                # Only a call that was cut off has arguments that are no JSON: the answer's stop reason tells so.
                arguments = text.encode() if self._is_whole and text else b"{}"
                return ToolUseAnswer(self._call.call_id, self._call.name, msgspec.Raw(arguments))
            case EventKind.CONTENT:
                return TextAnswer(text)
            case _:
                return ThinkingAnswer(text)


class MessagesStream(AnswerStream):
    """The events of a streamed answer."""

    id_prefix = ID_PREFIX
    keeps_text = True

    def __init__(self, head: Head, shape: StreamShape, outcome: Generated) -> None:
        super().__init__(head, shape, outcome)
        self._writer = BlockWriter()

    def begin(self) -> Iterable[bytes]:
        first = MessagesAnswer(self._head.id, self._head.model, (), None, None, usage(self._outcome))
        yield named_event(MessageStart(first))
        yield named_event(Ping())

    def tell(self, index: int, delta: Delta) -> Iterable[bytes]:
        del index
        for event in told_events(delta):
            yield from map(named_event, self._writer.take(event))

    def end(self, body: bytes) -> Iterable[bytes]:
        del body
        yield from map(named_event, self._writer.close())
        [continuation] = self._outcome.continuations
        yield named_event(MessageDelta(ending(continuation), usage(self._outcome)))
        yield named_event(MessageStop())

    def fail(self, error: ApiError) -> Iterable[bytes]:
        yield b"event: error\ndata: " + error.body(ErrorShape.ANTHROPIC) + b"\n\n"


def ending(continuation: Continuation) -> AnswerEnd:
    """How an answer ended. One that was cut off by a time-out can be sent back, and is then continued."""
    match continuation.finish_reason, continuation.stop_reason:
        case "tool_calls", _:
            return AnswerEnd("tool_use", None)
        case "length", _:
            return AnswerEnd("max_tokens", None)
        case "stop", str(text):
            return AnswerEnd("stop_sequence", text)
        case "stop", _:
            return AnswerEnd("end_turn", None)
    return AnswerEnd("pause_turn", None)


def usage(outcome: Generated) -> MessagesUsage:
    """Numbers of tokens read and generated."""
    return MessagesUsage(outcome.num_prompt_tokens - outcome.num_cached, outcome.num_generated, outcome.num_cached)
