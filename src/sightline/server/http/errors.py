"""Errors that are sent to clients, in the form of OpenAI's or Anthropic's error bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from types import MappingProxyType

import msgspec

from sightline.core.request import SamplingParams
from sightline.server.api.answers import Error, ErrorBody, MessagesError, MessagesErrorBody


class ErrorShape(Enum):
    """Whose shape a route's error bodies have. The value is the type of the body."""

    OPENAI = ErrorBody
    ANTHROPIC = MessagesErrorBody


class ApiError(Exception):
    """A request that fails, with the status and the body of its answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
        """Seconds."""
        self.headers = headers if retry_after is None else (*headers, (b"retry-after", str(retry_after).encode()))

    def body(self, shape: ErrorShape = ErrorShape.OPENAI, request_id: str | None = None) -> bytes:
        """The error as JSON. `request_id` is told in Anthropic's shape alone."""
        if shape is ErrorShape.OPENAI:
            return msgspec.json.encode(ErrorBody(Error(self.message, self.kind, self.param, self.code)))
        kind = _ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return msgspec.json.encode(MessagesErrorBody("error", MessagesError(kind, self.message), request_id))


_ANTHROPIC_KINDS: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
)
"""Anthropic's names of errors, by status."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request cannot run as it is; sending it again does not help."""
    return ApiError(400, message, param=param, code=code)


def too_long(message: str, max_model_len: int, param: str) -> ApiError:
    """A 400: a text is longer than the context. Clients look for the code, or for the first words of the message."""
    told = f"This model's maximum context length is {max_model_len} tokens: {message}"
    return invalid(told, param, "context_length_exceeded")


def check_model(asked: str | None, names: Sequence[str]) -> str:
    """The name to answer under. Raises `ApiError` if another model is asked for."""
    if asked is not None and asked not in names:
        raise ApiError(
            404,
            f"expected a served model, {' or '.join(names)}, got {asked[:80]!r}; see /v1/models",
            param="model",
            code="model_not_found",
        )
    return names[0] if asked is None else asked


def not_stored(name: str, param: str | None) -> ApiError:
    """A 404: no response of that id is stored under the caller's key, for whatever reason."""
    return ApiError(
        404,
        f"expected the id of something that is stored under this key, got {name[:80]!r}: it was never stored, it was "
        "deleted, or newer ones took its place; send the whole conversation",
        param=param,
        code="response_not_found",
    )


_OTHER_FIELDS = frozenset({"tools", "tool_choice", "thinking_token_budget"})
"""Fields that the engine refuses under their own names, and that are no sampling parameters."""


def field_named_in(message: str) -> str | None:
    """The field that an error is about: the first one that its message names."""
    names = {each.name for each in fields(SamplingParams)} - {"reading"} | _OTHER_FIELDS
    return next((word for word in re.findall(r"\w+", message) if word in names), None)


def busy(message: str, retry_after: int) -> ApiError:
    """A 429: the queue is full."""
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", retry_after=retry_after)


def unavailable(message: str, retry_after: int) -> ApiError:
    """A 503: nothing can run at the moment."""
    return ApiError(503, message, kind="service_unavailable", code="engine_unavailable", retry_after=retry_after)


def failed(message: str) -> ApiError:
    """A 500: the engine started the request and could not finish it."""
    return ApiError(500, message, kind="server_error", code="generation_failed")
