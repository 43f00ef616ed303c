"""Embeddings, and what is computed from them: scores of pairs, and rankings."""

from __future__ import annotations

import base64
from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Struct

from sightline.server.api.answers import (
    EmbeddingData,
    Embeddings,
    EmbeddingUsage,
    Ranked,
    RankedText,
    Ranking,
    Scores,
    TextScore,
)
from sightline.server.api.schema import EmbeddingRequest, RerankRequest, ScoreRequest, VectorFields
from sightline.server.desks.forms.completion import listed_texts
from sightline.server.desks.forms.form import EngineForm, ServedModel, TicketT
from sightline.server.desks.protocol import EmbeddedTexts, Head, Order
from sightline.server.http.errors import check_model, invalid
from sightline.server.http.limits import check_cost
from sightline.server.process.frames import pack_tokens

Vectors = npt.NDArray[np.float32]
VectorT = TypeVar("VectorT", bound=VectorFields)


class VectorForm(EngineForm[VectorT, TicketT, EmbeddedTexts], Generic[VectorT, TicketT]):
    """Bodies that ask for vectors of texts, and answers that are computed from them."""

    def take(self, number: int, request: VectorT, unused: tuple[str, ...]) -> Order:
        name = check_model(request.model, self._model.names)
        texts, param = self.texts(request)
        tokens = self._tokens(texts, request.truncate_prompt_tokens, param)
        ticket = msgspec.msgpack.encode(self.ticket(request))
        priority = self._model.priority(request.priority)
        return Order(number, name, tuple(map(pack_tokens, tokens)), None, 1, ticket, unused=unused, priority=priority)

    @abstractmethod
    def texts(self, request: VectorT) -> tuple[Sequence[str | list[int]], str]:
        """The texts, and the name of the field that they come in."""

    @abstractmethod
    def ticket(self, request: VectorT) -> TicketT:
        """What the answer needs beside the vectors."""

    def _tokens(self, texts: Sequence[str | list[int]], most: int | None, param: str) -> list[list[int]]:
        """The tokens of each text, cut to `most`."""
        model = self._model
        model.check_answer(len(texts) * (model.vector_size or 0) * np.dtype(np.float32).itemsize)
        longest = max(len(text.encode()) if isinstance(text, str) else len(text) for text in texts)
        tokens = min(longest, model.max_model_len)
        check_cost(prompts=len(texts), n=1, tokens=tokens, logprobs=0, most=model.max_cost)
        limit = None if most is None else model.max_model_len if most == -1 else min(most, model.max_model_len)
        found = [model.text.encode_cut(text, limit, param) if isinstance(text, str) else text[:limit] for text in texts]
        for each in found:
            model.check_text(each, param)
        return found


class EmbedTicket(Struct, frozen=True):
    """What the answer depends on beside the vectors."""

    dimensions: int | None
    as_bytes: bool


class EmbedForm(VectorForm[EmbeddingRequest, EmbedTicket]):
    """Vectors of texts."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model, EmbeddingRequest, EmbedTicket, EmbeddedTexts)

    def texts(self, request: EmbeddingRequest) -> tuple[Sequence[str | list[int]], str]:
        size, dimensions = self._model.vector_size or 0, request.dimensions
        if dimensions is not None and dimensions > size:
            raise invalid(f"expected dimensions of at most {size}, the vector's size, got {dimensions}", "dimensions")
        return listed_texts(request.input, "input"), "input"

    def ticket(self, request: EmbeddingRequest) -> EmbedTicket:
        return EmbedTicket(request.dimensions, request.encoding_format == "base64")

    def answer(self, ticket: EmbedTicket, head: Head, outcome: EmbeddedTexts) -> Embeddings:
        vectors, usage = _vectors(outcome)
        if ticket.dimensions is not None:
            vectors = at_length_one(vectors[:, : ticket.dimensions])
        data = [
            EmbeddingData("embedding", index, _base64(vector) if ticket.as_bytes else vector.tolist())
            for index, vector in enumerate(vectors)
        ]
        return Embeddings("list", data, head.model, usage)


class ScoreTicket(Struct, frozen=True):
    """What the answer depends on beside the vectors."""

    num_first: int


class ScoreForm(VectorForm[ScoreRequest, ScoreTicket]):
    """Similarities of pairs of texts."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model, ScoreRequest, ScoreTicket, EmbeddedTexts)

    def texts(self, request: ScoreRequest) -> tuple[Sequence[str | list[int]], str]:
        first, second = _listed(request.text_1), _listed(request.text_2)
        if len(first) != 1 and len(first) != len(second):
            raise invalid(
                f"expected one text_1, or as many as text_2, got {len(first)} and {len(second)}; pair them", "text_1"
            )
        return [*first, *second], "text_1"

    def ticket(self, request: ScoreRequest) -> ScoreTicket:
        return ScoreTicket(len(_listed(request.text_1)))

    def answer(self, ticket: ScoreTicket, head: Head, outcome: EmbeddedTexts) -> Scores:
        num_first = ticket.num_first
        vectors, usage = _vectors(outcome)
        scores = cosines(vectors[:num_first], vectors[num_first:])
        data = [TextScore("score", index, float(score)) for index, score in enumerate(scores)]
        return Scores(head.id, "list", head.created, head.model, data, usage)


class RerankTicket(Struct, frozen=True):
    """What the answer depends on beside the vectors."""

    top_n: int | None
    documents: list[str] | None
    """None if their texts are not returned."""


class RerankForm(VectorForm[RerankRequest, RerankTicket]):
    """Documents by their similarity to a query."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model, RerankRequest, RerankTicket, EmbeddedTexts)

    def texts(self, request: RerankRequest) -> tuple[Sequence[str | list[int]], str]:
        return [request.query, *request.documents], "documents"

    def ticket(self, request: RerankRequest) -> RerankTicket:
        return RerankTicket(request.top_n, None if request.return_documents is False else request.documents)

    def answer(self, ticket: RerankTicket, head: Head, outcome: EmbeddedTexts) -> Ranking:
        texts, (vectors, usage) = ticket.documents, _vectors(outcome)
        scores = cosines(vectors[:1], vectors[1:])
        results = [
            Ranked(int(index), float(scores[index]), UNSET if texts is None else RankedText(texts[index]))
            # A stable sort: of two documents with equal scores, the one that was sent first comes first.
            for index in np.argsort(-scores, kind="stable")[: ticket.top_n]
        ]
        return Ranking(head.id, head.model, results, usage)


def at_length_one(vectors: Vectors) -> Vectors:
    lengths = np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), np.float32(1e-12))
    return np.asarray(vectors / lengths, dtype=np.float32)


def cosines(first: Vectors, second: Vectors) -> Vectors:
    """The cosine of each pair; if `first` has one vector, it is paired with all of `second`."""
    return np.asarray((at_length_one(first) * at_length_one(second)).sum(-1), dtype=np.float32)


def _vectors(outcome: EmbeddedTexts) -> tuple[Vectors, EmbeddingUsage]:
    """The vectors, [num_texts, vector_size]."""
    joined = np.frombuffer(b"".join(outcome.vectors), dtype="<f4").reshape(len(outcome.vectors), -1)
    return joined, EmbeddingUsage(outcome.num_prompt_tokens, outcome.num_prompt_tokens)


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _base64(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
