"""The events of streamed answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from sightline.server.api.answers import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    Completion,
    CompletionChoice,
    Usage,
)
from sightline.server.api.scores import chat_logprobs, completion_logprobs, usage
from sightline.server.desks.protocol import Generated, Head, StreamShape, UsageEvents
from sightline.server.process.protocol import Delta, read_scored_tokens


class Chunks(ABC):
    """Makes the events of one stream."""

    id_prefix: ClassVar[str]

    def __init__(self, head: Head, shape: StreamShape, outcome: Generated) -> None:
        """`outcome` is what was generated so far. If only the last event reports usage, it is null in the others."""
        self._head = head
        self._shape = shape
        self._outcome = outcome

    @abstractmethod
    def opening(self) -> Sequence[object]:
        """Events before the first token."""

    def chunk(self, index: int, delta: Delta) -> object | None:
        """The event for a piece of a continuation; None if there is nothing to send."""
        if not delta.text and delta.finish_reason is None and not delta.logprobs:
            return None
        return self.piece(index, delta)

    @abstractmethod
    def piece(self, index: int, delta: Delta) -> object: ...

    def closing(self) -> object | None:
        """The last event, which has no choices; None if no usage is reported."""
        return None if self._shape.usage is UsageEvents.NONE else self._event([], usage(self._outcome))

    @abstractmethod
    def _event(self, choices: list[Any], told: Usage | UnsetType | None) -> object:
        """An event that reports `told` as its usage."""

    def _usage_so_far(self) -> Usage | UnsetType | None:
        """The usage that events before the last report."""
        match self._shape.usage:
            case UsageEvents.NONE:
                return UNSET
            case UsageEvents.LAST:
                return None
            case UsageEvents.EVERY:
                return usage(self._outcome)


class ChatChunks(Chunks):
    """The events of a streamed chat completion."""

    id_prefix = "chatcmpl-"

    def opening(self) -> Sequence[ChatChunk]:
        choices = [ChatChunkChoice(index, ChatDelta("assistant", "")) for index in range(self._outcome.n)]
        return [self._event([choice], self._usage_so_far()) for choice in choices]

    def piece(self, index: int, delta: Delta) -> ChatChunk:
        logprobs = None
        if self._shape.num_logprobs is not None and delta.logprobs:
            logprobs = chat_logprobs(read_scored_tokens(delta.logprobs), self._shape.num_logprobs)
        choice = ChatChunkChoice(
            index,
            ChatDelta(content=delta.text) if delta.text else ChatDelta(),
            delta.finish_reason,
            logprobs,
            UNSET if delta.finish_reason is None else delta.stop_reason,
        )
        return self._event([choice], self._usage_so_far())

    def _event(self, choices: list[ChatChunkChoice], told: Usage | UnsetType | None) -> ChatChunk:
        head = self._head
        return ChatChunk(head.id, "chat.completion.chunk", head.created, head.model, choices, told)


class CompletionChunks(Chunks):
    """The events of streamed text completions."""

    id_prefix = "cmpl-"

    def opening(self) -> Sequence[Completion]:
        texts = enumerate(text for text in self._shape.echoed for _ in range(self._outcome.n))
        return [self._event([CompletionChoice(index, text)], self._usage_so_far()) for index, text in texts if text]

    def piece(self, index: int, delta: Delta) -> Completion:
        logprobs = None
        if self._shape.num_logprobs is not None and delta.logprobs is not None:
            tokens = read_scored_tokens(delta.logprobs)
            scores, offsets = [token.scores for token in tokens], [token.offset for token in tokens]
            logprobs = completion_logprobs(scores, self._shape.num_logprobs, offsets)
        choice = CompletionChoice(
            index,
            delta.text,
            delta.finish_reason,
            logprobs,
            UNSET if delta.finish_reason is None else delta.stop_reason,
        )
        return self._event([choice], self._usage_so_far())

    def _event(self, choices: list[CompletionChoice], told: Usage | UnsetType | None) -> Completion:
        head = self._head
        return Completion(head.id, "text_completion", head.created, head.model, choices, told)
