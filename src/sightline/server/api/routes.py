"""The routes of the server: who may use each, and the types of its body and answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
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
from sightline.server.api.events import ChatChunks, CompletionChunks
from sightline.server.api.generation import GenerationHandler
from sightline.server.api.inspection import Inspection
from sightline.server.api.messages.answers import MessagesAnswer, TokenCount
from sightline.server.api.messages.body import CountRequest, MessagesRequest
from sightline.server.api.messages.events import MessagesEvent, MessagesStream
from sightline.server.api.responses.answers import DeletedResponse, Response
from sightline.server.api.responses.body import ResponsesRequest
from sightline.server.api.responses.events import ResponseEvent, ResponseStream
from sightline.server.api.responses.stored import StoredHandler
from sightline.server.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from sightline.server.api.texts import TextHandler
from sightline.server.api.vectors import VectorHandler
from sightline.server.desks.protocol import FormName
from sightline.server.http.access import Access
from sightline.server.http.errors import ErrorShape
from sightline.server.http.routing import HTML, NO_BODY, PLAIN, Call, Handler, Reply, Route, RouteTable
from sightline.server.page.pages import FILES, Page, PageFiles
from sightline.server.service import Service

Routes: TypeAlias = Iterable[Route]
KEY, PUBLIC = Access.KEY, Access.PUBLIC


def route_table(
    service: Service, inspection: Inspection, task: Task, document: Callable[[Sequence[Route]], bytes]
) -> RouteTable:
    """All routes of a server for `task`. `document` makes the OpenAPI document of routes."""
    embeds = task is Task.EMBED
    described = [
        *(_vectors(service) if embeds else _generation(service)),
        *_model(service, inspection),
        *_server(inspection),
    ]
    # A model that only embeds cannot chat.
    return RouteTable([*described, *_pages(document(described), "docs" if embeds else "chat")])


def _queued(
    tag: str,
    path: str,
    handler: Handler,
    summary: str,
    body: type[Any],
    answer: type[Any],
    example: Mapping[str, Any],
    event: Any = None,
    refusals: tuple[int, ...] = (404, 429, 500, 503),
    operation: str = "",
) -> Route:
    """A route that needs a place in the queue."""
    return Route(
        "POST",
        path,
        KEY,
        handler,
        summary,
        body,
        answer,
        event=event,
        refusals=refusals,
        tag=tag,
        example=example,
        holds_room=True,
        operation=operation,
    )


def _generation(service: Service) -> Routes:
    yield _queued(
        "Generation",
        "/v1/chat/completions",
        GenerationHandler(service, FormName.CHAT, ChatChunks).handle,
        "Continue a conversation",
        ChatRequest,
        ChatCompletion,
        {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64},
        ChatChunk,
        operation="chat",
    )
    yield from _responses(service)
    yield from _messages(service)
    yield _queued(
        "Generation",
        "/v1/completions",
        GenerationHandler(service, FormName.COMPLETION, CompletionChunks).handle,
        "Continue prompts",
        CompletionRequest,
        Completion,
        {"prompt": "The capital of France is", "max_tokens": 16},
        Completion,
        operation="text_completion",
    )


def _responses(service: Service) -> Routes:
    path, stored = "/v1/responses", StoredHandler(service.store)
    yield _queued(
        "Generation",
        path,
        GenerationHandler(service, FormName.RESPONSES, ResponseStream).handle,
        "Continue a conversation, and keep it",
        ResponsesRequest,
        Response,
        {"input": "Why is the sky blue?", "max_output_tokens": 64},
        ResponseEvent,
        operation="chat",
    )
    path += "/{response_id}"
    tag, refusals = "Generation", (404,)
    yield Route("GET", path, KEY, stored.give, "A stored response", NO_BODY, Response, refusals=refusals, tag=tag)
    what = "Forget a stored response"
    yield Route("DELETE", path, KEY, stored.delete, what, NO_BODY, DeletedResponse, refusals=refusals, tag=tag)
    what = "Cancel a response: not supported"
    yield Route("POST", path, KEY, stored.cancel, what, NO_BODY, Response, refusals=refusals, tag=tag)


def _messages(service: Service) -> Routes:
    question = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    answering = _queued(
        "Generation",
        "/v1/messages",
        GenerationHandler(service, FormName.MESSAGES, MessagesStream).handle,
        "Continue a conversation, in Anthropic's shape",
        MessagesRequest,
        MessagesAnswer,
        {"max_tokens": 64, **question},
        MessagesEvent,
        operation="chat",
    )
    counting = _queued(
        "Generation",
        "/v1/messages/count_tokens",
        TextHandler(service, FormName.COUNT).handle,
        "Number of tokens of a conversation, in Anthropic's shape",
        CountRequest,
        TokenCount,
        question,
        refusals=(404, 429, 503),
    )
    yield from (replace(each, error_shape=ErrorShape.ANTHROPIC) for each in (answering, counting))


def _vectors(service: Service) -> Routes:
    tag = "Embeddings"
    yield _queued(
        tag,
        "/v1/embeddings",
        VectorHandler(service, FormName.EMBED).handle,
        "Vectors of texts",
        EmbeddingRequest,
        Embeddings,
        {"input": "Hello"},
        operation="embeddings",
    )
    yield _queued(
        tag,
        "/v1/score",
        VectorHandler(service, FormName.SCORE).handle,
        "Similarity of texts",
        ScoreRequest,
        Scores,
        {"text_1": "a cat", "text_2": ["a kitten", "a car"]},
        operation="embeddings",
    )
    yield _queued(
        tag,
        "/v1/rerank",
        VectorHandler(service, FormName.RERANK).handle,
        "Documents by similarity to a query",
        RerankRequest,
        Ranking,
        {"query": "a cat", "documents": ["a car", "a kitten"]},
        operation="embeddings",
    )


def _model(service: Service, inspection: Inspection) -> Routes:
    tag, without_engine = "Model", (404, 429, 503)
    yield Route(
        "GET", "/v1/models", KEY, inspection.models, "The served models", NO_BODY, Models, refusals=(503,), tag=tag
    )
    path, refusals = "/v1/models/{model}", (404, 503)
    yield Route("GET", path, KEY, inspection.model, "One served model", NO_BODY, ModelCard, refusals=refusals, tag=tag)
    yield _queued(
        tag,
        "/tokenize",
        TextHandler(service, FormName.TOKENIZE).handle,
        "Tokens of a text or a conversation",
        TokenizeRequest,
        Tokens,
        {"prompt": "Hello"},
        refusals=without_engine,
    )
    yield _queued(
        tag,
        "/detokenize",
        TextHandler(service, FormName.DETOKENIZE).handle,
        "Text of tokens",
        DetokenizeRequest,
        Detokenized,
        {"tokens": [1, 2, 3]},
        refusals=without_engine,
    )


def _server(inspection: Inspection) -> Routes:
    yield Route("GET", "/health", PUBLIC, inspection.health, "Whether the front end runs", NO_BODY, Status)
    works = "Whether the engine works: a forward pass finished recently"
    yield Route("GET", "/ready", PUBLIC, inspection.ready, works, NO_BODY, Status, refusals=(503,))
    yield Route("GET", "/metrics", KEY, inspection.metrics, "Prometheus metrics", NO_BODY, None, PLAIN)
    yield Route("GET", "/version", PUBLIC, inspection.version, "The server's version", NO_BODY, Version)
    what = "The resolved configuration"
    yield Route("GET", "/server_info", KEY, inspection.server_info, what, NO_BODY, ServerInfo, refusals=(503,))


def _pages(document: bytes, first: str) -> Routes:
    async def openapi(call: Call) -> Reply:
        del call
        return Reply(document)

    page_files = PageFiles()
    yield Route("GET", "/openapi.json", PUBLIC, openapi, "This document", NO_BODY, None)
    yield Route("GET", "/", PUBLIC, Page(first, page_files).show, "Chat", NO_BODY, None, HTML)
    yield Route("GET", "/docs", PUBLIC, Page("docs", page_files).show, "Documentation", NO_BODY, None, HTML)
    yield Route("GET", FILES + "{file}", PUBLIC, page_files.show, "Files of the pages", NO_BODY, None)
