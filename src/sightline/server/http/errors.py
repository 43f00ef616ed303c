"""Errors that are sent to clients, always in the form of OpenAI's error bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields

import msgspec

from sightline.core.request import SamplingParams
from sightline.server.api.answers import Error, ErrorBody


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

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(Error(self.message, self.kind, self.param, self.code)))


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


def field_named_in(message: str) -> str | None:
    """The sampling parameter that an error is about: the first one that its message names."""
    names = {each.name for each in fields(SamplingParams)}
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
