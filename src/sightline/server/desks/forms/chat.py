"""Chat completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct

from sightline.core.conversation import Conversation
from sightline.server.api.answers import ChatChoice, ChatCompletion
from sightline.server.api.schema import ChatRequest
from sightline.server.api.scores import chat_logprobs, prompt_logprobs, usage
from sightline.server.api.spoken import chat_answer
from sightline.server.desks.forms.conversation import ConversationForm
from sightline.server.desks.forms.form import ServedModel
from sightline.server.desks.forms.generation import ReadPrompt
from sightline.server.desks.forms.turns import conversation_of
from sightline.server.desks.protocol import Generated, Head
from sightline.server.desks.text import ending_of
from sightline.server.http.errors import invalid
from sightline.text.templates.chat_template import Ending


class ChatTicket(Struct, frozen=True):
    """What the answer to a conversation depends on."""

    num_logprobs: int | None


class ChatForm(ConversationForm[ChatRequest, ChatTicket]):
    """Bodies and answers of chat completions."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model, ChatRequest, ChatTicket, Generated)

    def conversation(self, request: ChatRequest) -> Conversation:
        return conversation_of(
            request.messages,
            tools=request.tools,
            choice=request.tool_choice,
            parallel_calls=request.parallel_tool_calls,
            effort=request.reasoning_effort,
            budget=request.thinking_token_budget,
            switches=request.chat_template_kwargs,
        )

    def ending(self, request: ChatRequest) -> Ending:
        return ending_of(request.add_generation_prompt, request.continue_final_message)

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
                    chat_answer(each.answer()),
                    each.finish_reason,
                    None if wanted is None else chat_logprobs(each.scored_tokens(), wanted),
                    each.stop_reason,
                )
                for index, each in enumerate(outcome.continuations)
            ],
            usage(outcome),
            prompt_logprobs(self.prompt_positions(outcome.prompt_logprobs[0])) if outcome.prompt_logprobs else UNSET,
        )
