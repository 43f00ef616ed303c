"""Handlers for embeddings, and for what is computed from them: scores of pairs, and rankings.

The engine process sends vectors as bytes; cosines are computed here.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from sightline.core.request import Terms
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
from sightline.server.api.completion import listed_texts
from sightline.server.api.schema import EmbeddingRequest, RerankRequest, ScoreRequest
from sightline.server.http.errors import failed, invalid, unavailable
from sightline.server.http.ingress import json_reply
from sightline.server.http.limits import check_cost
from sightline.server.http.routing import Call, Reply
from sightline.server.process.port import EngineDownError, RefusedError, RequestFailedError
from sightline.server.service import RESTART_SECONDS, Service

Vectors = npt.NDArray[np.float32]


class Vectorizer:
    """Handlers of a server that embeds."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def embed(self, call: Call[EmbeddingRequest]) -> Reply:
        request = call.body
        model = self._service.check_model(request.model)
        self._check_dimensions(request.dimensions)
        texts = listed_texts(request.input, "input")
        vectors, usage = await self._vectors(call, texts, request.truncate_prompt_tokens, "input")
        if request.dimensions is not None:
            vectors = at_length_one(vectors[:, : request.dimensions])
        as_bytes = request.encoding_format == "base64"
        data = [
            EmbeddingData("embedding", index, _base64(vector) if as_bytes else vector.tolist())
            for index, vector in enumerate(vectors)
        ]
        return json_reply(Embeddings("list", data, model, usage))

    async def score(self, call: Call[ScoreRequest]) -> Reply:
        request = call.body
        model = self._service.check_model(request.model)
        first, second = _pairs(request.text_1, request.text_2)
        vectors, usage = await self._vectors(call, [*first, *second], request.truncate_prompt_tokens, "text_1")
        scores = cosines(vectors[: len(first)], vectors[len(first) :])
        data = [TextScore("score", index, float(score)) for index, score in enumerate(scores)]
        return json_reply(Scores(f"score-{secrets.token_hex(12)}", "list", int(time.time()), model, data, usage))

    async def rerank(self, call: Call[RerankRequest]) -> Reply:
        request = call.body
        model = self._service.check_model(request.model)
        texts = [request.query, *request.documents]
        vectors, usage = await self._vectors(call, texts, request.truncate_prompt_tokens, "documents")
        scores = cosines(vectors[:1], vectors[1:])
        tells = request.return_documents is not False
        results = [
            Ranked(int(index), float(scores[index]), *([RankedText(request.documents[index])] if tells else []))
            # A stable sort: of two documents with equal scores, the one that was sent first comes first.
            for index in np.argsort(-scores, kind="stable")[: request.top_n]
        ]
        return json_reply(Ranking(f"rerank-{secrets.token_hex(12)}", model, results, usage))

    async def _vectors(
        self, call: Call[Any], texts: Sequence[str | list[int]], most: int | None, param: str
    ) -> tuple[Vectors, EmbeddingUsage]:
        """Vectors of the texts, [num_texts, vector_size], cut to `most` tokens each; `param` is the texts' field."""
        service, opened = self._service, self._service.opened
        longest = max(len(text.encode()) if isinstance(text, str) else len(text) for text in texts)
        tokens = min(longest, opened.max_model_len)
        check_cost(prompts=len(texts), n=1, tokens=tokens, logprobs=0, most=service.max_cost)
        limit = None if most is None else opened.max_model_len if most == -1 else min(most, opened.max_model_len)
        with ExitStack() as held:
            held.enter_context(service.admission.admitted(call.caller, len(texts)))
            found = [
                await service.desk.encode_text(call.caller, text, limit, param)
                if isinstance(text, str)
                else text[:limit]
                for text in texts
            ]
            for each in found:
                service.check_text(each, param)
            num_tokens = sum(map(len, found))
            call.facts["prompt_tokens"] = num_tokens
            try:
                terms = Terms(caller=call.caller)
                answers = service.port.submit([tuple(each) for each in found], None, terms, call.received_at)
                held.callback(service.port.cancel, answers)
                async with asyncio.timeout(service.request_timeout):
                    vectors = await answers.vectors()
            except TimeoutError as error:
                raise unavailable(
                    f"the texts were not embedded within {service.request_timeout:g} s; send fewer",
                    RESTART_SECONDS,
                ) from error
            except EngineDownError as error:
                raise unavailable(str(error), RESTART_SECONDS) from error
            except RequestFailedError as error:
                raise failed(f"the engine could not embed a text: {error}") from error
            except RefusedError as error:
                raise service.refusal(error, len(texts), param) from error
        joined = np.frombuffer(b"".join(vector.numbers for vector in vectors), dtype="<f4")
        return joined.reshape(len(vectors), -1), EmbeddingUsage(num_tokens, num_tokens)

    def _check_dimensions(self, dimensions: int | None) -> None:
        size = self._service.opened.vector_size or 0
        if dimensions is not None and dimensions > size:
            raise invalid(f"expected dimensions of at most {size}, the vector's size, got {dimensions}", "dimensions")


def at_length_one(vectors: Vectors) -> Vectors:
    lengths = np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), np.float32(1e-12))
    return np.asarray(vectors / lengths, dtype=np.float32)


def cosines(first: Vectors, second: Vectors) -> Vectors:
    """The cosine of each pair; if `first` has one vector, it is paired with all of `second`."""
    return np.asarray((at_length_one(first) * at_length_one(second)).sum(-1), dtype=np.float32)


def _pairs(first: str | list[str], second: str | list[str]) -> tuple[list[str], list[str]]:
    ones = [first] if isinstance(first, str) else first
    others = [second] if isinstance(second, str) else second
    if len(ones) != 1 and len(ones) != len(others):
        raise invalid(
            f"expected one text_1, or as many as text_2, got {len(ones)} and {len(others)}; pair them", "text_1"
        )
    return ones, others


def _base64(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
