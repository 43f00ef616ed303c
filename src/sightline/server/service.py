"""The state that all handlers share: the engine's port, the tokenizer, admission, and the model's names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from sightline.core.errors import RequestError
from sightline.core.ledger import Ledger
from sightline.core.request import EffectiveParams, SamplingParams, Terms, check_prompt
from sightline.server.desk import TextDesk
from sightline.server.http.admission import AdmissionGate
from sightline.server.http.errors import ApiError, busy, field_named_in, invalid, unavailable
from sightline.server.http.limits import COST_IN_CONTEXTS, Limits
from sightline.server.http.routing import Call
from sightline.server.process.port import Answers, EngineDownError, EnginePort, RefusedError
from sightline.server.process.protocol import Opened

RESTART_SECONDS = 2
"""`Retry-After` while the engine process starts."""
DRAIN_SECONDS = 5
"""`Retry-After` while the server shuts down: another one may have taken its place by then."""


@dataclass(frozen=True)
class Running:
    """The accepted requests of one client's call."""

    answers: Answers
    params: Sequence[EffectiveParams]
    """The effective parameters of each prompt."""
    num_prompt_tokens: int
    release: ExitStack
    """Cancels the requests and gives their places back."""


@dataclass(frozen=True)
class LoadedModel:
    """The front end's part of a loaded model. Every engine process serves the same one."""

    desk: TextDesk
    admission: AdmissionGate

    @staticmethod
    def build(opened: Opened, *, shared: bool) -> LoadedModel:
        """`shared` says that there are several callers."""
        desk = TextDesk(opened.tokenizer, opened.max_model_len)
        return LoadedModel(desk, AdmissionGate(opened.max_rows + opened.max_queued, shared=shared))


@dataclass
class Service:
    """One served model, from the start of the server: it refuses requests until the model is loaded."""

    port: EnginePort
    loaded: Future[LoadedModel]
    """Resolved when the first engine process has loaded the model."""
    limits: Limits
    served_names: tuple[str, ...]
    """The names that clients may use; empty: the name that the engine process gives."""
    request_timeout: float | None
    """Seconds that a request may run."""
    ledger: Ledger
    """The front end's ledger; the engine's entries are in `opened`."""
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    """Whether the server is shutting down: nothing more is admitted."""

    @property
    def opened(self) -> Opened:
        """The report of the latest engine process. Raises `ApiError` before there is one."""
        if self.port.opened is None:
            raise _loading()
        return self.port.opened

    @property
    def desk(self) -> TextDesk:
        """Raises `ApiError` while the model loads."""
        return self._model().desk

    @property
    def admission(self) -> AdmissionGate:
        """Raises `ApiError` while the model loads or the server shuts down."""
        if self.is_draining:
            raise unavailable("the server is shutting down; use another one", DRAIN_SECONDS)
        return self._model().admission

    @property
    def num_under_way(self) -> int:
        """Sequences that were admitted and have not ended."""
        return self._model().admission.num_held if self.loaded.done() else 0

    def check_room(self, caller: str) -> None:
        """Raises `ApiError` if nothing more of this caller can be admitted at present."""
        self.admission.check_room(caller)

    def _model(self) -> LoadedModel:
        if not self.loaded.done():
            raise _loading()
        return self.loaded.result()

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_names or (self.opened.model,)

    @property
    def max_cost(self) -> int:
        return self.limits.max_cost or COST_IN_CONTEXTS * self.opened.max_model_len

    def check_model(self, asked: str | None) -> str:
        """The name to answer under. Raises `ApiError` if another model is asked for."""
        if asked is not None and asked not in self.names:
            raise ApiError(
                404,
                f"expected a served model, {' or '.join(self.names)}, got {asked[:80]!r}; see /v1/models",
                param="model",
                code="model_not_found",
            )
        return self.names[0] if asked is None else asked

    def check_tokens(self, prompt: Sequence[int], param: str) -> None:
        """Raises `ApiError` for a prompt that the model cannot take; `param` is the field that it came in."""
        try:
            check_prompt(prompt, self.opened.vocab_size, self.opened.max_model_len)
        except RequestError as error:
            is_long = len(prompt) >= self.opened.max_model_len
            raise invalid(str(error), param, "context_length_exceeded" if is_long else None) from error

    def check_text(self, tokens: Sequence[int], param: str) -> None:
        """Raises `ApiError` for a text that the model cannot embed; `param` is the field that it came in."""
        most, vocab_size = self.opened.max_model_len, self.opened.vocab_size
        if not 0 < len(tokens) <= most:
            raise invalid(
                f"expected texts of 1 to {most} tokens, got {len(tokens)}; shorten it, or send truncate_prompt_tokens",
                param,
                "context_length_exceeded" if tokens else None,
            )
        if max(tokens) >= vocab_size:
            raise invalid(f"expected token ids from 0 to {vocab_size - 1}, got {max(tokens)}", param)

    async def start(
        self, call: Call[Any], prompts: Sequence[Sequence[int]], params: SamplingParams, release: ExitStack
    ) -> Running:
        """Submits prompts and waits until all are accepted. `release` already holds their places."""
        terms = Terms(caller=call.caller, timeout=self.request_timeout)
        with release:
            try:
                answers = self.port.submit([tuple(prompt) for prompt in prompts], params, terms, call.received_at)
                release.callback(self.port.cancel, answers)
                accepted = await answers.accepted()
            except EngineDownError as error:
                raise unavailable(str(error), RESTART_SECONDS) from error
            except RefusedError as error:
                raise self.refusal(error, len(prompts) * params.n, field_named_in(str(error))) from error
            num_tokens = sum(map(len, prompts))
            call.facts["prompt_tokens"] = num_tokens
            return Running(answers, accepted, num_tokens, release.pop_all())

    def refusal(self, error: RefusedError, count: int, param: str | None) -> ApiError:
        """The answer to a request of `count` sequences that the engine refused."""
        return busy(str(error), self.admission.retry_after(count)) if error.is_full else invalid(str(error), param)


def _loading() -> ApiError:
    return unavailable("the model is still loading; try again soon", RESTART_SECONDS)
