"""Every way into the server, who may take it, and what goes in and out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from sightline.core.config import Task
from sightline.server.api.answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Detokenized,
    Embeddings,
    ModelCard,
    Models,
    Ranking,
    Scores,
    ServerInfo,
    Status,
    Tokens,
    Version,
)
from sightline.server.api.chat import ChatCompleter
from sightline.server.api.completion import TextCompleter
from sightline.server.api.embeddings import Vectorizer
from sightline.server.api.inspection import Inspection
from sightline.server.api.openapi import openapi_document
from sightline.server.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from sightline.server.http.access import Access
from sightline.server.http.routing import HTML, JSON, NO_BODY, PLAIN, Call, Reply, Route, RouteTable
from sightline.server.page.pages import Page
from sightline.server.service import Service

Routes: TypeAlias = Iterable[Route[Any]]
KEY, PUBLIC = Access.KEY, Access.PUBLIC


def route_table(service: Service, inspection: Inspection, task: Task, *, needs_key: bool) -> RouteTable:
    """`needs_key` where the server has keys."""
    embeds = task is Task.EMBED
    described = [
        *(_vectors(service) if embeds else _generation(service)),
        *_model(inspection),
        *_server(inspection),
    ]
    document = openapi_document(described, needs_key=needs_key)
    # There is nobody to talk to where texts are embedded.
    return RouteTable([*described, *_pages(document, "docs.html" if embeds else "chat.html")])


def _generation(service: Service) -> Routes:
    for path, handler, summary, body, answer, event, example in (
        (
            "/v1/chat/completions",
            ChatCompleter(service).handle,
            "Go on with a conversation",
            ChatRequest,
            ChatCompletion,
            ChatChunk,
            {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64},
        ),
        (
            "/v1/completions",
            TextCompleter(service).handle,
            "Continue prompts",
            CompletionRequest,
            Completion,
            Completion,
            {"prompt": "The capital of France is", "max_tokens": 16},
        ),
    ):
        yield Route[Any](
            "POST",
            path,
            KEY,
            handler,
            summary,
            body,
            answer,
            event=event,
            refusals=(404, 429, 500, 503),
            tag="Generation",
            example=example,
            holds_room=True,
        )


def _model(inspection: Inspection) -> Routes:
    tag, loading = "Model", (503,)
    yield Route(
        "GET", "/v1/models", KEY, inspection.models, "The served models", NO_BODY, Models, JSON, None, loading, tag
    )
    yield Route(
        "GET",
        "/v1/models/{model}",
        KEY,
        inspection.model,
        "One served model",
        NO_BODY,
        ModelCard,
        refusals=(404, 503),
        tag=tag,
    )
    yield Route(
        "POST",
        "/tokenize",
        KEY,
        inspection.tokenize,
        "A text or a conversation as tokens",
        TokenizeRequest,
        Tokens,
        refusals=(404, 429, 503),
        tag=tag,
        example={"prompt": "Hello"},
        holds_room=True,
    )
    yield Route(
        "POST",
        "/detokenize",
        KEY,
        inspection.detokenize,
        "Tokens as text",
        DetokenizeRequest,
        Detokenized,
        refusals=(404, 429, 503),
        tag=tag,
        example={"tokens": [1, 2, 3]},
        holds_room=True,
    )


def _server(inspection: Inspection) -> Routes:
    yield Route("GET", "/health", PUBLIC, inspection.health, "The front end is alive", NO_BODY, Status)
    works = "The engine works: a forward pass went through lately"
    yield Route("GET", "/ready", PUBLIC, inspection.ready, works, NO_BODY, Status, refusals=(503,))
    yield Route("GET", "/metrics", KEY, inspection.metrics, "Prometheus metrics", NO_BODY, None, PLAIN)
    yield Route("GET", "/version", PUBLIC, inspection.version, "The server's version", NO_BODY, Version)
    what = "What runs, as resolved"
    yield Route("GET", "/server_info", KEY, inspection.server_info, what, NO_BODY, ServerInfo, refusals=(503,))


def _vectors(service: Service) -> Routes:
    vectorizer = Vectorizer(service)
    for path, handler, summary, body, answer, example in (
        ("/v1/embeddings", vectorizer.embed, "Texts as vectors", EmbeddingRequest, Embeddings, {"input": "Hello"}),
        (
            "/v1/score",
            vectorizer.score,
            "How near texts are",
            ScoreRequest,
            Scores,
            {"text_1": "a cat", "text_2": ["a kitten", "a car"]},
        ),
        (
            "/v1/rerank",
            vectorizer.rerank,
            "Documents by how near they are to a query",
            RerankRequest,
            Ranking,
            {"query": "a cat", "documents": ["a car", "a kitten"]},
        ),
    ):
        yield Route[Any](
            "POST",
            path,
            KEY,
            handler,
            summary,
            body,
            answer,
            refusals=(404, 429, 500, 503),
            tag="Embeddings",
            example=example,
            holds_room=True,
        )


def _pages(document: bytes, first: str) -> Routes:
    async def openapi(call: Call[None]) -> Reply:
        del call
        return Reply(document)

    yield Route("GET", "/openapi.json", PUBLIC, openapi, "This document", NO_BODY, None)
    yield Route("GET", "/", PUBLIC, Page(first).show, "Chat", NO_BODY, None, HTML)
    yield Route("GET", "/docs", PUBLIC, Page("docs.html").show, "Documentation", NO_BODY, None, HTML)
