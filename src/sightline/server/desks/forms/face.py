"""The common part of interfaces whose bodies are not OpenAI's chat completions: what they ask for, in our own words.

body of an interface ─▶ AskedConversation ─▶ order
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic

import msgspec

from sightline.core.conversation import Conversation
from sightline.core.request import SamplingParams
from sightline.server.api.schema import GenerationFields
from sightline.server.desks.forms.conversation import ConversationForm
from sightline.server.desks.forms.form import ServedModel, TicketT
from sightline.server.desks.forms.generation import ReadPrompt
from sightline.server.desks.protocol import Generated, Order, ReadBody, Recall, StreamShape
from sightline.server.http.errors import ApiError
from sightline.text.templates.chat_template import Ending


class AskedConversation(GenerationFields, kw_only=True, frozen=True):
    """A request to answer a conversation, of whichever interface."""

    conversation: Conversation
    ticket: Any
    """What the answer needs, beside what the engine generates."""
    ending: Ending = Ending.NEXT_TURN
    opening: bytes = b""
    """What the events of a stream repeat of the request."""


class FaceForm(ConversationForm[AskedConversation, TicketT], Generic[TicketT]):
    """Bodies of an interface that become an `AskedConversation`."""

    field_names: ClassVar[Mapping[str, str]]
    """The interface's names of our own fields, for errors."""

    def __init__(self, model: ServedModel, ticket: type[TicketT]) -> None:
        super().__init__(model, AskedConversation, ticket, Generated)

    @abstractmethod
    def read(self, job: ReadBody) -> Order | Recall:
        """Reads a body as the interface has it."""

    def take(self, number: int, request: AskedConversation, unused: tuple[str, ...]) -> Order:
        try:
            order = super().take(number, request, unused)
        except ApiError as error:
            error.param = self.field_names.get(error.param or "", error.param)
            raise
        shown = sorted(self.field_names.get(name, name) for name in order.unused)
        return msgspec.structs.replace(order, unused=tuple(shown))

    def conversation(self, request: AskedConversation) -> Conversation:
        return request.conversation

    def ending(self, request: AskedConversation) -> Ending:
        return request.ending

    def sampling(self, request: AskedConversation) -> dict[str, Any]:
        return {"max_tokens": request.max_tokens}

    def ticket(self, request: AskedConversation, prompts: Sequence[ReadPrompt]) -> TicketT:
        del prompts
        ticket: TicketT = request.ticket
        return ticket

    def _stream(
        self, request: AskedConversation, params: SamplingParams, prompts: Sequence[ReadPrompt]
    ) -> StreamShape | None:
        shape = super()._stream(request, params, prompts)
        return None if shape is None else msgspec.structs.replace(shape, opening=request.opening)
