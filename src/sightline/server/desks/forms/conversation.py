"""The common part of all routes that answer a conversation: from a body to a prompt, and how the answer is read.

    body ─ conversation ─▶ Conversation ─ TextDesk.open ─▶ prompt, AnswerReading ─▶ order

A route says what conversation its bodies hold, and writes the answer from `Continuation.answer()`. The events of a
stream come in `Delta.events`. Does not know the shapes of bodies and answers.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic

from sightline.core.conversation import Conversation
from sightline.core.request import SamplingParams
from sightline.server.api.fields import also_unused
from sightline.server.desks.forms.form import TicketT
from sightline.server.desks.forms.generation import GenerationForm, GenerationT, ReadPrompt
from sightline.server.desks.protocol import Order
from sightline.text.templates.chat_template import Ending


class ConversationForm(GenerationForm[GenerationT, TicketT], Generic[GenerationT, TicketT]):
    """Bodies that hold a conversation."""

    @abstractmethod
    def conversation(self, request: GenerationT) -> Conversation:
        """The conversation of a body. Raises `ApiError` for tools and choices that do not agree."""

    def ending(self, request: GenerationT) -> Ending:
        """How the prompt ends."""
        del request
        return Ending.NEXT_TURN

    def take(self, number: int, request: GenerationT, unused: tuple[str, ...]) -> Order:
        unread = self._model.text.unread(self.conversation(request))
        return super().take(number, request, also_unused(unused, unread))

    def num_prompts(self, request: GenerationT) -> int:
        del request
        return 1

    def num_prompt_bytes(self, request: GenerationT) -> int:
        return self._model.text.num_bytes(self.conversation(request))

    def prompts(self, request: GenerationT, params: SamplingParams) -> list[ReadPrompt]:
        opened = self._model.text.open(self.conversation(request), self.ending(request))
        return [ReadPrompt(self.kept_tokens(opened.token_ids, params, "messages"), reading=opened.reading)]
