"""The OpenAPI document, generated from the table of routes and the types of their bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import msgspec

from sightline.server.api.fields import REFUSED, described
from sightline.server.http.access import Access
from sightline.server.http.errors import ErrorShape
from sightline.server.http.routing import EVENTS, JSON, NO_BODY, Route
from sightline.version import __version__

_REFUSALS = {
    400: "The request cannot run as it is.",
    401: "The API key is missing or unknown.",
    404: "The model or the path does not exist.",
    405: "The path does not support this method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    421: "The Host header is not a name of this server.",
    429: "The queue is full; Retry-After says when to try again.",
    500: "The engine started the request and could not finish it.",
    503: "The engine is starting or the server is shutting down; Retry-After says when to try again.",
}
_ALWAYS = (400, 421)
_WITH_KEY = (401,)
_WITH_BODY = (408, 413, 415)


def openapi_document(routes: Iterable[Route], *, needs_key: bool, allows_unknown: bool) -> bytes:
    """The document as JSON. `needs_key`: the server has keys. `allows_unknown`: bodies may have unknown fields."""
    listed = [route for route in routes if route.answer is not None or route.content_type.startswith("text/plain")]
    kinds = [*(shape.value for shape in ErrorShape), *(route.answer for route in listed if route.answer is not None)]
    bodies = [route.body for route in listed if route.body is not NO_BODY]
    kinds += bodies
    kinds += [kind for route in listed for kind in _event_kinds(route)]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas = described(components, [each.__name__ for each in bodies], allows_unknown=allows_unknown)
    paths: dict[str, dict[str, Any]] = {}
    for route in listed:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, needs_key=needs_key)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Sightline", "version": __version__, "description": "An OpenAI-compatible LLM service."},
        "paths": paths,
        "components": {"schemas": schemas},
        "x-refused-fields": {name: field.reason for name, field in REFUSED.items()},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(document)


def _operation(route: Route, *, needs_key: bool) -> dict[str, Any]:
    statuses = [*_ALWAYS, *route.refusals]
    if route.access is Access.KEY and needs_key:
        statuses += _WITH_KEY
    operation: dict[str, Any] = {
        "summary": route.summary,
        "tags": [route.tag],
        "operationId": route.handler.__name__ + route.path.translate(str.maketrans("/{}", "___")),
        "x-access": route.access.value,
        "security": [{"key": []}] if route.access is Access.KEY and needs_key else [],
    }
    if "{" in route.path:
        name = route.path.partition("{")[2].rstrip("}")
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if route.body is not NO_BODY:
        statuses += _WITH_BODY
        content: dict[str, Any] = {"schema": _reference(route.body)}
        if route.example is not None:
            content["example"] = route.example
        operation["requestBody"] = {"required": True, "content": {JSON: content}}
    operation["responses"] = {"200": _success(route)} | {
        str(status): {
            "description": _REFUSALS[status],
            "content": {JSON: {"schema": _reference(route.error_shape.value)}},
        }
        for status in sorted(set(statuses))
    }
    return operation


def _success(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answer is not None:
        content[JSON] = {"schema": _reference(route.answer)}
    else:
        content[route.content_type.partition(";")[0]] = {"schema": {"type": "string"}}
    if route.event is not None:
        content[EVENTS] = {"schema": _event(route)}
    return {"description": "Success.", "content": content}


def _event(route: Route) -> dict[str, Any]:
    """The schema of a stream's events: a piece of the answer or an error in JSON, or the final `[DONE]`."""
    kinds = _event_kinds(route)
    told = {"anyOf": [_reference(kind) for kind in (*kinds, route.error_shape.value)]}
    piece: dict[str, Any] = {"type": "string", "contentMediaType": JSON, "contentSchema": told}
    if len(kinds) == 1:
        piece = {"anyOf": [{"const": "[DONE]"}, piece]}
    return {"type": "object", "required": ["data"], "properties": {"data": piece}}


def _event_kinds(route: Route) -> tuple[Any, ...]:
    """The types of a stream's events; none if the route does not stream."""
    return () if route.event is None else get_args(route.event) or (route.event,)


def _reference(kind: Any) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
