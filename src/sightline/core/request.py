"""What a user asks for and what they get back.

Owns sampling parameters and output shapes. Does not know tokenizers, scheduling or tensors.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral

from sightline.core.errors import RequestError

MAX_SEED = 2**64 - 1
_INFINITY = float("inf")


class FinishReason(StrEnum):
    """Why a sequence ended; the values are those that clients of other engines know."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. A field that is None takes the model's own default, then the neutral value."""

    temperature: float | None = None
    """0 is greedy. Neutral: greedy, as transformers decodes a model that asks for nothing."""
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 keep every token."""
    min_p: float | None = None
    seed: int | None = None
    """The same seed and the same logits give the same tokens, whatever else is in the batch."""
    max_tokens: int | None = 16
    """None goes on to the end of the context."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 1e4)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("expected top_p in (0, 1], got 0.0; use temperature 0 for greedy decoding")
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _check_integer("top_k", self.top_k, 0, 2**31 - 1)
        _check_integer("seed", self.seed, 0, MAX_SEED)
        _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_flag("ignore_eos", self.ignore_eos)
        _check_flag("skip_special_tokens", self.skip_special_tokens)
        if not isinstance(self.stop_token_ids, Sequence):
            raise RequestError(f"expected stop_token_ids to be a list of token ids, got {self.stop_token_ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            if token is None:
                raise RequestError("expected every stop_token_ids entry to be an integer, got None")
            _check_integer("every stop_token_ids entry", token, 0, 2**31 - 1)


@dataclass(frozen=True)
class EffectiveParams:
    """Sampling parameters with nothing left open: what really runs, and what is echoed."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    """The model's end tokens unless ignored, and the caller's."""
    skip_special_tokens: bool


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if value is None:
        return
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or value in (_INFINITY, -_INFINITY)
        or value != value
    ):
        raise RequestError(f"expected {name} to be a finite number, got {value!r}")
    if not low <= value <= high:
        raise RequestError(f"expected {name} between {low:g} and {high:g}, got {value}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"expected {name} to be True or False, got {value!r}")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"expected {name} to be an integer, got {value!r}")
    if not low <= value <= high:
        raise RequestError(f"expected {name} between {low} and {high}, got {value}")


def check_prompt(token_ids: Sequence[object], vocab_size: int, max_model_len: int) -> None:
    """Raises `RequestError` unless the tokens can be run and at least one more generated."""
    if len(token_ids) == 0:
        raise RequestError("expected a prompt of at least one token, got an empty one")
    if len(token_ids) >= max_model_len:
        raise RequestError(
            f"expected a prompt of at most {max_model_len - 1} tokens (max_model_len {max_model_len} less one "
            f"to generate), got {len(token_ids)}; shorten it or raise max_model_len"
        )
    for position, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            raise RequestError(f"expected token ids from 0 to {vocab_size - 1}, got {token!r} at position {position}")


def new_request_id() -> str:
    """An id that nobody can guess and no client chooses."""
    return f"request-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class Request:
    """One prompt, checked, with its effective parameters."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: EffectiveParams


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclass(frozen=True)
class RequestOutput:
    """What became of a request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    params: EffectiveParams | None
    """What ran: what the caller left open is filled in. None where the request was refused before that."""
    error: str | None = None
    """Why it failed, where `finish_reason` is "error"."""


@dataclass(frozen=True)
class TextDelta:
    """What a stream gained: whole characters and the tokens that completed them."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    error: str | None = None
