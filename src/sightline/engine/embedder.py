"""Embedding: the step loop with pooling, texts to vectors.

A text that fits a step is computed whole and touches no cache: `TRANSIENT`. A text that does not, or every text if what
texts have in common is to be kept, goes through pages in chunks: `PAGED`. Does not know text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from sightline.core.batch import MaskKind
from sightline.core.device import DeviceKind
from sightline.core.errors import RequestError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.core.metrics import PhaseSeconds
from sightline.core.request import Request, RowNeeds, Terms, new_request_id
from sightline.engine.pooled import LiveText, pool
from sightline.engine.requests import LiveRequest
from sightline.engine.steps import StepLoop
from sightline.models.contract import EmbedderDefinition
from sightline.models.loading.pooling import Pooling, PoolingKind
from sightline.runner.runtime import Runtime
from sightline.scheduler.costs import StepCosts
from sightline.scheduler.sequence import SequenceState

CPU_PACK_TOKENS = 1024
"""Step size above which a CPU gains nothing from more texts: activations leave its caches.

A longer text is a step of its own."""


@dataclass(frozen=True, eq=False)
class TextResult:
    """How a text ended."""

    vector: Tensor | None
    """[state_size] fp32 on the CPU; None if it failed."""
    num_cached: int
    """Tokens of the text that were in the cache already."""
    error: str | None
    phases: PhaseSeconds


class Embedder(StepLoop[LiveText, None, TextResult]):
    """Computes vectors, many texts at a time."""

    def __init__(
        self,
        runtime: Runtime,
        definition: EmbedderDefinition,
        pooling: Pooling,
        ledger: Ledger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` tells seconds: deadlines go by it."""
        if pooling.kind is PoolingKind.CLS and definition.mask.kind is not MaskKind.FULL:
            raise UnsupportedModelError(
                "expected cls pooling of a model whose first token sees the others, got one where it sees nothing"
            )
        config = runtime.config
        on_cpu = config.device.kind is DeviceKind.CPU
        super().__init__(
            runtime,
            partial(pool, pooling=pooling),
            ledger,
            clock,
            mask=definition.mask,
            costs=StepCosts(logit=0.0, context=definition.step_costs()[1]),
            max_scored_tokens=config.max_step_tokens,
            max_whole_tokens=min(config.max_step_tokens, CPU_PACK_TOKENS) if on_cpu else config.max_step_tokens,
        )
        self.definition = definition
        self.pooling = pooling

    @property
    def is_transient(self) -> bool:
        """True if no text needs a page."""
        return self.runtime.config.num_pages == 0

    @property
    def _num_queued(self) -> int:
        return self._scheduler.num_waiting + self._scheduler.num_running

    @property
    def _max_queued(self) -> int:
        """Texts that a step has room for do not count as waiting."""
        return self.runtime.config.max_queued + self.runtime.config.max_rows

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises `RequestError` for a text that cannot be embedded."""
        most, vocab_size = self.runtime.config.max_model_len, self.definition.vocab_size
        if not 0 < len(token_ids) <= most:
            raise RequestError(
                f"expected a text of 1 to {most} tokens, got {len(token_ids)}; shorten it, ask for it to be truncated, "
                "or raise max_model_len"
            )
        for position, token in enumerate(token_ids):
            if type(token) is not int or not 0 <= token < vocab_size:
                raise RequestError(
                    f"expected token ids from 0 to {vocab_size - 1}, got {token!r} at position {position}"
                )

    def _start(
        self, prompt_token_ids: Sequence[int], params: None, prompt: str | None, terms: Terms, now: float
    ) -> LiveRequest[LiveText]:
        del params
        self.check(prompt_token_ids)
        needs = RowNeeds(
            max_new_tokens=0,
            every_output=self.pooling.kind is not PoolingKind.LAST,
            is_whole=not self.prefixes and len(prompt_token_ids) <= self.runtime.config.max_step_tokens,
        )
        request = Request(new_request_id(), prompt, tuple(prompt_token_ids), needs, terms, terms.deadline(now))
        return LiveRequest(request, (LiveText(SequenceState(request)),), now)

    def _output(self, live: LiveRequest[LiveText], now: float) -> TextResult:
        [text] = live.sequences
        return TextResult(text.vector, text.sequence.num_cached, text.error, live.phases(now))
