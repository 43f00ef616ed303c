"""What every handler works with: the engine's port, the text desk, who is admitted, and what the model is called."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
"""What a client is told to wait while the engine process starts."""


@dataclass(frozen=True)
class Running:
    """Requests under way for one client."""

    answers: Answers
    params: Sequence[EffectiveParams]
    """What each prompt really runs with."""
    num_prompt_tokens: int
    release: ExitStack
    """Ends what runs and gives its places back."""


@dataclass
class Service:
    """One served model."""

    port: EnginePort
    admission: AdmissionGate
    limits: Limits
    served_names: tuple[str, ...]
    """As the model is asked for; empty: as the engine process calls it."""
    request_timeout: float | None
    """Seconds that a request may run."""
    ledger: Ledger
    """The front end's own; the engine's is in what the engine process told."""
    created: int = field(default_factory=lambda: int(time.time()))
    _desk: TextDesk | None = None

    @property
    def opened(self) -> Opened:
        """What the engine process told; an error before it has."""
        if self.port.opened is None:
            raise unavailable("expected a loaded model, got one that is still loading", RESTART_SECONDS)
        return self.port.opened

    @property
    def desk(self) -> TextDesk:
        if self._desk is None:
            raise unavailable("expected a loaded model, got one that is still loading", RESTART_SECONDS)
        return self._desk

    def prepare(self) -> None:
        """Once an engine process has told of itself. The next one has the same config, and the same model."""
        self._desk = TextDesk(self.opened.tokenizer, self.opened.max_model_len)

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_names or (self.opened.model,)

    @property
    def max_cost(self) -> int:
        return self.limits.max_cost or COST_IN_CONTEXTS * self.opened.max_model_len

    def check_model(self, asked: str | None) -> str:
        """The name to answer under."""
        if asked is not None and asked not in self.names:
            raise ApiError(
                404,
                f"expected a served model, {' or '.join(self.names)}, got {asked[:80]!r}; see /v1/models",
                param="model",
                code="model_not_found",
            )
        return self.names[0] if asked is None else asked

    def check_tokens(self, prompt: Sequence[int], param: str) -> None:
        """Raises for a prompt that this model cannot take; `param` is the field that it came in."""
        try:
            check_prompt(prompt, self.opened.vocab_size, self.opened.max_model_len)
        except RequestError as error:
            is_long = len(prompt) >= self.opened.max_model_len
            raise invalid(str(error), param, "context_length_exceeded" if is_long else None) from error

    def check_text(self, tokens: Sequence[int], param: str) -> None:
        """Raises for a text that this model cannot embed."""
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
        """Submits prompts and waits until they are accepted. `release` already holds their places."""
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
