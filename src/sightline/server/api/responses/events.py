"""The events of a streamed response, and the items that they build.

    AnswerEvent ─▶ ResponseWriter ─▶ events of the wire
                        └─▶ items of the whole response

A response that is sent whole is built by the same writer, so both are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import StringIO
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from sightline.core.conversation import AnswerEvent, EventKind
from sightline.server.api.responses.answers import (
    ContentPart,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    ReasoningContent,
    ResponseError,
    ResponseState,
    Status,
    TextContent,
    response_json,
)
from sightline.server.api.streams import AnswerStream, named_event, told_events
from sightline.server.desks.protocol import Generated, Head, StreamShape
from sightline.server.http.errors import ApiError
from sightline.server.process.protocol import Delta

ID_PREFIX = "resp_"
WholeResponse: TypeAlias = Annotated[msgspec.Raw, Meta(extra_json_schema={"$ref": "#/components/schemas/Response"})]


class _Event(Struct, frozen=True):
    """An event of a stream. Numbers count the events from 0."""

    sequence_number: int


class ResponseCreated(_Event, frozen=True, tag="response.created"):
    response: WholeResponse


class ResponseInProgress(_Event, frozen=True, tag="response.in_progress"):
    response: WholeResponse


class ResponseCompleted(_Event, frozen=True, tag="response.completed"):
    response: WholeResponse


class ResponseIncomplete(_Event, frozen=True, tag="response.incomplete"):
    response: WholeResponse


class ResponseFailed(_Event, frozen=True, tag="response.failed"):
    response: WholeResponse


class ItemAdded(_Event, frozen=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(_Event, frozen=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _PartEvent(_Event, frozen=True):
    item_id: str
    output_index: int
    content_index: int


class PartAdded(_PartEvent, frozen=True, tag="response.content_part.added"):
    part: ContentPart


class PartDone(_PartEvent, frozen=True, tag="response.content_part.done"):
    part: ContentPart


class OutputTextDelta(_PartEvent, frozen=True, tag="response.output_text.delta"):
    delta: str
    logprobs: tuple[()] = ()


class OutputTextDone(_PartEvent, frozen=True, tag="response.output_text.done"):
    text: str
    logprobs: tuple[()] = ()


class ReasoningDelta(_PartEvent, frozen=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_PartEvent, frozen=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_Event, frozen=True, tag="response.function_call_arguments.delta"):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(_Event, frozen=True, tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    name: str
    arguments: str


ResponseEvent: TypeAlias = (
    ResponseCreated
    | ResponseInProgress
    | ItemAdded
    | PartAdded
    | OutputTextDelta
    | OutputTextDone
    | ReasoningDelta
    | ReasoningDone
    | PartDone
    | ArgumentsDelta
    | ArgumentsDone
    | ItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)


class ResponseWriter:
    """Turns the events of an answer into those of a response, one item after another."""

    def __init__(self, response_id: str) -> None:
        self._suffix = response_id.removeprefix(ID_PREFIX)
        self._num_events = 0
        self._open: EventKind | None = None
        """The kind of the item that is being written: reasoning, content or call."""
        self._text = StringIO()
        self._call = AnswerEvent(EventKind.CALL)
        self._is_whole = False
        self.items: list[OutputItem] = []
        """The items that are written."""

    def next_number(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def take(self, event: AnswerEvent) -> Iterator[ResponseEvent]:
        """The events that tell the next step of the answer."""
        match event.kind:
            case EventKind.CALL:
                yield from self.close("completed")
                self._call, self._is_whole = event, False
                yield from self._begin(event.kind)
            case EventKind.CALL_END:
                self._is_whole = True
            case kind:
                if kind is not EventKind.ARGUMENTS and kind is not self._open:
                    yield from self.close("completed")
                    yield from self._begin(kind)
                if event.text:
                    self._text.write(event.text)
                    yield self._delta(event.text)

    def close(self, status: Status) -> Iterator[ResponseEvent]:
        """Ends the item that is being written, if there is one. A call that was cut off is never completed."""
        if self._open is None:
            return
        text, place = self._text.getvalue(), (self._item_id, len(self.items))
        if self._open is EventKind.CALL:
            status = status if self._is_whole else "incomplete"
            yield ArgumentsDone(self.next_number(), *place, self._call.name, text)
        else:
            done = OutputTextDone if self._open is EventKind.CONTENT else ReasoningDone
            yield done(self.next_number(), *place, 0, text)
            yield PartDone(self.next_number(), *place, 0, self._part(text))
        item = self._item(status, text)
        yield ItemDone(self.next_number(), len(self.items), item)
        self.items.append(item)
        self._open = None

    def _begin(self, kind: EventKind) -> Iterator[ResponseEvent]:
        self._open, self._text = kind, StringIO()
        yield ItemAdded(self.next_number(), len(self.items), self._item("in_progress", None))
        if kind is not EventKind.CALL:
            yield PartAdded(self.next_number(), self._item_id, len(self.items), 0, self._part(""))

    def _delta(self, text: str) -> ResponseEvent:
        number, item_id, index = self.next_number(), self._item_id, len(self.items)
        match self._open:
            case EventKind.CALL:
                return ArgumentsDelta(number, item_id, index, text)
            case EventKind.CONTENT:
                return OutputTextDelta(number, item_id, index, 0, text)
            case _:
                return ReasoningDelta(number, item_id, index, 0, text)

    @property
    def _item_id(self) -> str:
        """The id of the item that is being written. It tells the response that the item is in."""
        prefixes = {EventKind.CALL: "fc", EventKind.CONTENT: "msg"}
        return f"{prefixes.get(self._open or EventKind.REASONING, 'rs')}_{self._suffix}_{len(self.items)}"

    def _part(self, text: str) -> ContentPart:
        return TextContent(text) if self._open is EventKind.CONTENT else ReasoningContent(text)

    def _item(self, status: Status, text: str | None) -> OutputItem:
        """The item that is being written; `text` is None at its beginning."""
        match self._open:
            case EventKind.CALL:
                return OutputCall(self._item_id, status, self._call.call_id, self._call.name, text or "")
            case EventKind.CONTENT:
                return OutputMessage(self._item_id, status, () if text is None else (TextContent(text),))
            case _:
                return OutputReasoning(self._item_id, status, () if text is None else (ReasoningContent(text),))


class ResponseStream(AnswerStream):
    """The events of a streamed response. Its last one holds the whole response."""

    id_prefix = ID_PREFIX
    keeps_text = True
    ends_with_body = True

    def __init__(self, head: Head, shape: StreamShape, outcome: Generated) -> None:
        super().__init__(head, shape, outcome)
        self._writer = ResponseWriter(head.id)

    def begin(self) -> Iterable[bytes]:
        started = self._response(ResponseState(*self._identity, "in_progress"))
        yield named_event(ResponseCreated(self._writer.next_number(), started))
        yield named_event(ResponseInProgress(self._writer.next_number(), started))

    def tell(self, index: int, delta: Delta) -> Iterable[bytes]:
        del index
        for event in told_events(delta):
            yield from map(named_event, self._writer.take(event))

    def end(self, body: bytes) -> Iterable[bytes]:
        kinds = {"length": ResponseIncomplete, "abort": ResponseFailed, "error": ResponseFailed}
        kind = kinds.get(self._outcome.continuations[0].finish_reason or "", ResponseCompleted)
        yield from map(named_event, self._writer.close("completed" if kind is ResponseCompleted else "incomplete"))
        yield named_event(kind(self._writer.next_number(), msgspec.Raw(body)))

    def fail(self, error: ApiError) -> Iterable[bytes]:
        ended = ResponseState(*self._identity, "failed", error=ResponseError("server_error", error.message))
        yield named_event(ResponseFailed(self._writer.next_number(), self._response(ended)))

    @property
    def _identity(self) -> tuple[str, int, str]:
        return self._head.id, self._head.created, self._head.model

    def _response(self, state: ResponseState) -> msgspec.Raw:
        return response_json(state, self._shape.opening)


def response_id_of(item_id: str) -> str:
    """The id of the response that an item is in, if its id is one of ours."""
    return ID_PREFIX + item_id.partition("_")[2].rpartition("_")[0]
