"""The events of streamed answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

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
from sightline.server.api.spoken import chat_delta
from sightline.server.api.streams import AnswerStream, plain_event
from sightline.server.desks.protocol import UsageEvents
from sightline.server.http.errors import ApiError
from sightline.server.process.protocol import Delta, read_scored_tokens


class Chunks(AnswerStream):
    """Makes the events of a stream of completions. If only the last one reports usage, it is null in the others."""

    def begin(self) -> Iterable[bytes]:
        return map(plain_event, self.opening())

    def tell(self, index: int, delta: Delta) -> Iterable[bytes]:
        chunk = self.chunk(index, delta)
        return () if chunk is None else (plain_event(chunk),)

    def end(self, body: bytes) -> Iterable[bytes]:
        """Usage if requested, and `[DONE]`."""
        del body
        if (last := self.closing()) is not None:
            yield plain_event(last)
        yield b"data: [DONE]\n\n"

    def fail(self, error: ApiError) -> Iterable[bytes]:
        """The error. No `[DONE]` follows it."""
        yield b"data: " + error.body() + b"\n\n"

    @abstractmethod
    def opening(self) -> Sequence[object]:
        """Events before the first token."""

    def chunk(self, index: int, delta: Delta) -> object | None:
        """The event for a piece of a continuation; None if there is nothing to send."""
        if not (delta.text or delta.events or delta.logprobs) and delta.finish_reason is None:
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
            ChatDelta(content=delta.text) if delta.text else chat_delta(delta.events),
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
