"""Chat completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct

from sightline.core.request import SamplingParams
from sightline.server.api.answers import ChatAnswer, ChatChoice, ChatCompletion
from sightline.server.api.fields import also_unused
from sightline.server.api.schema import ChatRequest
from sightline.server.api.scores import chat_logprobs, prompt_logprobs, usage
from sightline.server.desks.forms.form import ServedModel
from sightline.server.desks.forms.generation import GenerationForm, ReadPrompt
from sightline.server.desks.protocol import Generated, Head, Order
from sightline.server.desks.text import ending_of
from sightline.server.http.errors import invalid

MAX_CHARACTER_BYTES = 4


class ChatTicket(Struct, frozen=True):
    """What the answer to a conversation depends on."""

    num_logprobs: int | None


class ChatForm(GenerationForm[ChatRequest, ChatTicket]):
    """Bodies and answers of chat completions."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model, ChatRequest, ChatTicket, Generated)

    def take(self, number: int, request: ChatRequest, unused: tuple[str, ...]) -> Order:
        unread = self._model.text.unread_switches(request.chat_template_kwargs)
        return super().take(number, request, also_unused(unused, unread))

    def num_prompts(self, request: ChatRequest) -> int:
        del request
        return 1

    def num_prompt_bytes(self, request: ChatRequest) -> int:
        return sum(MAX_CHARACTER_BYTES * message.num_characters + 64 for message in request.messages)

    def prompts(self, request: ChatRequest, params: SamplingParams) -> list[ReadPrompt]:
        ending = ending_of(request.add_generation_prompt, request.continue_final_message)
        tokens = self._model.text.encode_chat(request.messages, request.chat_template_kwargs, ending)
        return [ReadPrompt(self.kept_tokens(tokens, params, "messages"))]

    def sampling(self, request: ChatRequest) -> dict[str, Any]:
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        asked, completion = request.max_tokens, request.max_completion_tokens
        if asked is not None and completion is not None and asked != completion:
            raise invalid("max_tokens and max_completion_tokens differ; send one of them", "max_tokens")
        return {
            "max_tokens": asked if completion is None else completion,
            "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
        }

    def ticket(self, request: ChatRequest, prompts: Sequence[ReadPrompt]) -> ChatTicket:
        del prompts
        return ChatTicket((request.top_logprobs or 0) if request.logprobs else None)

    def answer(self, ticket: ChatTicket, head: Head, outcome: Generated) -> ChatCompletion:
        wanted = ticket.num_logprobs
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
                    None if wanted is None else chat_logprobs(each.scored_tokens(), wanted),
                    each.stop_reason,
                )
                for index, each in enumerate(outcome.continuations)
            ],
            usage(outcome),
            prompt_logprobs(self.prompt_positions(outcome.prompt_logprobs[0])) if outcome.prompt_logprobs else UNSET,
        )
