"""Chat completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from sightline.core.request import PositionLogprobs
from sightline.server.api.answers import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    TopLogprob,
    Usage,
)
from sightline.server.api.generation import (
    Chunks,
    Completer,
    GenerationOutcome,
    Head,
    Prompt,
    chosen,
    likeliest,
    told_prompt_logprobs,
)
from sightline.server.api.schema import ChatRequest
from sightline.server.http.errors import invalid
from sightline.server.http.routing import Call
from sightline.server.process.protocol import Delta

MAX_CHARACTER_BYTES = 4


class ChatCompleter(Completer[ChatRequest]):
    """The handler for chat completions."""

    id_prefix = "chatcmpl-"

    def num_prompts(self, request: ChatRequest) -> int:
        del request
        return 1

    def num_prompt_bytes(self, request: ChatRequest) -> int:
        return sum(MAX_CHARACTER_BYTES * message.num_characters + 64 for message in request.messages)

    async def prompts(self, call: Call[ChatRequest]) -> list[Prompt]:
        messages, switches = call.body.messages, call.body.chat_template_kwargs
        tokens = await self._service.desk.encode_chat(call.caller, messages, switches)
        self._service.check_tokens(tokens, "messages")
        return [Prompt(tokens)]

    def sampling(self, request: ChatRequest) -> dict[str, Any]:
        if request.response_format is not None and request.response_format.type != "text":
            raise invalid(f"response_format {request.response_format.type} is not supported yet", "response_format")
        if request.tools:
            raise invalid("tools is not supported yet", "tools")
        if request.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice is not supported yet; leave it out", "tool_choice")
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        asked, completion = request.max_tokens, request.max_completion_tokens
        if asked is not None and completion is not None and asked != completion:
            raise invalid("max_tokens and max_completion_tokens differ; send one of them", "max_tokens")
        return {
            "max_tokens": asked if completion is None else completion,
            "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
        }

    def whole(
        self, request: ChatRequest, head: Head, prompts: Sequence[Prompt], outcome: GenerationOutcome
    ) -> ChatCompletion:
        del prompts
        wanted = request.top_logprobs or 0
        return ChatCompletion(
            head.id,
            "chat.completion",
            head.created,
            head.model,
            [
                ChatChoice(
                    index,
                    ChatAnswer("assistant", each.text),
                    each.finish_reason,
                    _logprobs(each.logprobs, wanted) if request.logprobs else None,
                    each.stop_reason,
                )
                for index, each in enumerate(outcome.continuations)
            ],
            outcome.usage(),
            told_prompt_logprobs(outcome.prompt_logprobs[0]) if outcome.prompt_logprobs else UNSET,
        )

    def chunks(
        self, request: ChatRequest, head: Head, prompts: Sequence[Prompt], *, includes_usage: bool
    ) -> ChatChunks:
        del prompts
        num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return ChatChunks(head, num_logprobs, request.n or 1, includes_usage=includes_usage)


class ChatChunks(Chunks):
    """The events of a streamed chat completion."""

    def __init__(self, head: Head, num_logprobs: int | None, n: int, *, includes_usage: bool) -> None:
        super().__init__(head, includes_usage=includes_usage)
        self._num_logprobs = num_logprobs
        self._n = n

    def opening(self) -> Sequence[ChatChunk]:
        return [self._chunk([ChatChunkChoice(index, ChatDelta("assistant", ""))]) for index in range(self._n)]

    def chunk(self, index: int, delta: Delta) -> ChatChunk | None:
        if not delta.text and delta.finish_reason is None and not delta.logprobs:
            return None
        logprobs = None
        if self._num_logprobs is not None and delta.logprobs:
            logprobs = _logprobs(delta.logprobs, self._num_logprobs)
        choice = ChatChunkChoice(
            index,
            ChatDelta(content=delta.text) if delta.text else ChatDelta(),
            delta.finish_reason,
            logprobs,
            UNSET if delta.finish_reason is None else delta.stop_reason,
        )
        return self._chunk([choice])

    def closing(self, usage: Usage) -> ChatChunk:
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        head = self._head
        told = usage if self.includes_usage else UNSET
        return ChatChunk(head.id, "chat.completion.chunk", head.created, head.model, choices, told)


def _logprobs(entries: Sequence[PositionLogprobs], count: int) -> ChatLogprobs:
    """Log probabilities of each token and of the `count` likeliest tokens at its position."""
    told = []
    for entry in entries:
        text = chosen(entry).decoded_token or ""
        rivals = [TopLogprob(other, logprob, _bytes(other)) for other, logprob in likeliest(entry, count)]
        told.append(ChatLogprob(text, chosen(entry).logprob, _bytes(text), rivals))
    return ChatLogprobs(told)


def _bytes(text: str) -> list[int] | None:
    """The UTF-8 bytes of a token; None for a part of a character, whose bytes its text does not show."""
    return None if "\ufffd" in text else list(text.encode())
