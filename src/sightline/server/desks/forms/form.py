"""What the forms of all routes share: the served model, and the two halves of a form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from sightline.core.errors import RequestError
from sightline.core.request import check_prompt
from sightline.server.api.fields import unused_fields
from sightline.server.desks.protocol import Head, Order, ReadBody, Recall, Setup, WriteAnswer, WrittenAnswer
from sightline.server.desks.text import TextDesk
from sightline.server.http.errors import invalid, too_long
from sightline.server.http.limits import parse
from sightline.text.tokenizers.tokenizer import TokenizerData

RequestT = TypeVar("RequestT")
TicketT = TypeVar("TicketT")
OutcomeT = TypeVar("OutcomeT")


class ServedModel:
    """The served model: its texts and its limits."""

    def __init__(self, setup: Setup) -> None:
        self.names = setup.names
        self.vocab_size = setup.vocab_size
        self.vector_size = setup.vector_size
        self.max_model_len = setup.max_model_len
        self.max_cost = setup.max_cost
        self.max_answer_bytes = setup.max_answer_bytes
        self.max_kept_bytes = setup.max_kept_bytes
        self.allows_unknown = setup.allows_unknown
        self.least_priority = setup.least_priority
        self.text = TextDesk(msgspec.msgpack.decode(setup.tokenizer, type=TokenizerData), setup.max_model_len)

    def check_tokens(self, prompt: Sequence[int], param: str) -> None:
        """Raises `ApiError` for a prompt that the model cannot take; `param` is the field that it came in."""
        try:
            check_prompt(prompt, self.vocab_size, self.max_model_len)
        except RequestError as error:
            if len(prompt) >= self.max_model_len:
                raise too_long(str(error), self.max_model_len, param) from error
            raise invalid(str(error), param) from error

    def priority(self, asked: int | None) -> int:
        """The priority of a request. Raises `ApiError` for one that would go before those of other callers."""
        if asked is not None and asked < self.least_priority:
            raise invalid(
                f"expected priority of at least {self.least_priority}, got {asked}: the server has several keys, and "
                "nobody goes before the others; send a higher one, which goes later",
                "priority",
            )
        return asked or 0

    def check_answer(self, num_bytes: int) -> None:
        """Raises `ApiError` if the engine would send more than fits: better than after it has computed all of it."""
        if num_bytes > self.max_answer_bytes:
            raise invalid(
                f"expected a request whose results take at most {self.max_answer_bytes:,} bytes, got one for "
                f"{num_bytes:,}; ask for less, or raise --max-answer-bytes",
                code="answer_too_large",
            )

    def check_text(self, tokens: Sequence[int], param: str) -> None:
        """Raises `ApiError` for a text that the model cannot embed; `param` is the field that it came in."""
        most, vocab_size = self.max_model_len, self.vocab_size
        if not 0 < len(tokens) <= most:
            message = f"expected texts of 1 to {most} tokens, got {len(tokens)}"
            if tokens:
                raise too_long(f"{message}; shorten it, or send truncate_prompt_tokens", most, param)
            raise invalid(f"{message}; leave it out", param)
        if max(tokens) >= vocab_size:
            raise invalid(f"expected token ids from 0 to {vocab_size - 1}, got {max(tokens)}", param)


class Form(ABC, Generic[RequestT]):
    """One route's bodies. Raises `ApiError` for a body that is refused."""

    def __init__(self, model: ServedModel, kind: type[RequestT]) -> None:
        """`kind` is the type of the bodies."""
        self._model = model
        self._kind = kind

    def read(self, job: ReadBody) -> Order | WrittenAnswer | Recall:
        """Reads a body: the engine's order, or the answer if the engine is not needed, or what else must be known."""
        request, strays = parse(job.body, self._kind)
        return self.take(job.number, request, unused_fields(strays, allows_unknown=self._model.allows_unknown))

    @abstractmethod
    def take(self, number: int, request: RequestT, unused: tuple[str, ...]) -> Order | WrittenAnswer: ...


class EngineForm(Form[RequestT], Generic[RequestT, TicketT, OutcomeT]):
    """A form whose answers are written from what the engine computed."""

    def __init__(
        self, model: ServedModel, kind: type[RequestT], ticket: type[TicketT], outcome: type[OutcomeT]
    ) -> None:
        super().__init__(model, kind)
        self._tickets = msgspec.msgpack.Decoder(ticket)
        self._outcomes = msgspec.msgpack.Decoder(outcome)

    def write(self, job: WriteAnswer) -> WrittenAnswer:
        """The answer's body."""
        answer = self.answer(self._tickets.decode(job.ticket), job.head, self._outcomes.decode(job.outcome))
        return WrittenAnswer(job.number, msgspec.json.encode(answer))

    @abstractmethod
    def answer(self, ticket: TicketT, head: Head, outcome: OutcomeT) -> object:
        """The answer to the order that the ticket came with."""
