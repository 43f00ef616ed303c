"""Generation: the step loop with sampling, and text as it comes.

Knows text only through a tokenizer that it may not have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from sightline.attention.lanes import Depth
from sightline.attention.workspace import MAIN_LANE
from sightline.core.batch import CAUSAL
from sightline.core.ledger import Ledger
from sightline.core.metrics import PhaseSeconds
from sightline.core.request import EffectiveParams, RequestOutput, SamplingParams, Terms, TextDelta
from sightline.engine.intake import Intake
from sightline.engine.live import LiveSequence, TextPiece, start
from sightline.engine.requests import LiveRequest
from sightline.engine.sampled import sample
from sightline.engine.steps import StepLoop
from sightline.models.loading.generation import GenerationDefaults
from sightline.runner.runtime import Runtime
from sightline.runner.sampling.logprobs import TokenLogprobs
from sightline.scheduler.costs import StepCosts
from sightline.speculative.drafter import DrafterContext
from sightline.speculative.drafts import AdaptiveDrafts
from sightline.speculative.methods import make_drafts
from sightline.structured.compiler import GrammarCompiler, PendingGrammar
from sightline.structured.vocabulary import read_vocabulary
from sightline.text.detokenizer import check_streamable
from sightline.text.tokenizers.tokenizer import Tokenizer

_MAX_SCORED_LOGITS = 2**24
"""Logits of prompt tokens in one step: 64 MiB of fp32, however large the vocabulary."""


class RequestEnd(NamedTuple):
    """What is left to tell of a request when all pieces of its text were taken."""

    error: str | None
    num_cached_tokens: int
    phases: PhaseSeconds
    prompt_scores: Sequence[TokenLogprobs] | None
    """Log probabilities of the prompt from its second token on, if the request asked for them."""


class Engine(StepLoop[LiveSequence, SamplingParams, RequestOutput]):
    """Generates, many requests at a time."""

    def __init__(
        self,
        runtime: Runtime,
        tokenizer: Tokenizer | None,
        generation: GenerationDefaults,
        ledger: Ledger,
        clock: Callable[[], float] = time.monotonic,
        drafts: AdaptiveDrafts | None = None,
    ) -> None:
        """`clock` tells seconds: deadlines go by it. `drafts` guesses in place of what the settings name."""
        if tokenizer is not None:
            check_streamable(tokenizer)
        vocab_size = runtime.definition.vocab_size
        scored = max(1, _MAX_SCORED_LOGITS // vocab_size)
        costs = StepCosts(*runtime.definition.step_costs())
        consume = partial(sample, runtime.operations.best_tokens)
        speculation, device = runtime.config.speculation, runtime.config.device.kind
        if drafts is None and speculation is not None:
            drafts = make_drafts(DrafterContext(speculation, device, ledger, vocab_size, runtime.draft))
        super().__init__(
            runtime, consume, ledger, clock, mask=CAUSAL, costs=costs, max_scored_tokens=scored, drafts=drafts
        )
        self.tokenizer = tokenizer
        self.generation = generation
        self._intake = Intake(
            vocab_size=self.vocab_size,
            max_model_len=runtime.config.max_model_len,
            generation=generation,
            tokenizer=tokenizer,
            seed=runtime.config.seed,
        )
        self.grammars: GrammarCompiler | None = None
        """The grammars of requests with `structured_outputs`; None without a tokenizer."""
        if tokenizer is not None:
            ends = frozenset(token for token in generation.eos_token_ids if token < vocab_size)
            self.grammars = GrammarCompiler(partial(read_vocabulary, tokenizer, vocab_size, ends))

    @property
    def vocab_size(self) -> int:
        return self.runtime.definition.vocab_size

    def prepare(self, params: SamplingParams, caller: str = "") -> PendingGrammar | None:
        """Begins to compile what the parameters hold answers to, in the caller's turn, so that `submit` need not wait
        for it once it is settled; None if they hold them to nothing. Thread-safe."""
        is_over = self._closed or self._fault is not None
        if self.grammars is None or params.rule is None or is_over:
            return None
        return self.grammars.prepare(params.rule, caller)

    def params(self, request_id: str) -> EffectiveParams:
        """The parameters that the request runs with."""
        return self._find(request_id).sequences[0].asked

    def is_read(self, request_id: str) -> bool:
        """True if the request is finished and `take_delta` has returned everything."""
        return all(sequence.end_was_read for sequence in self._find(request_id).sequences)

    def has_delta(self, request_id: str) -> bool:
        """True if `take_delta` would return something."""
        return any(sequence.has_delta for sequence in self._find(request_id).sequences)

    def take_delta(self, request_id: str) -> TextDelta | None:
        """New output of one continuation since the last call; None if there is none."""
        return self._lanes.run(MAIN_LANE, Depth.ENGINE, self._take_delta, request_id)

    def _take_delta(self, request_id: str) -> TextDelta | None:
        deltas = (sequence.take_delta() for sequence in self._find(request_id).sequences)
        return next((delta for delta in deltas if delta is not None), None)

    def take_piece(self, request_id: str) -> tuple[LiveSequence, TextPiece] | None:
        """Like `take_delta`, with the continuation itself, and without the texts of the tokens in log probabilities."""
        return self._lanes.run(MAIN_LANE, Depth.ENGINE, self._take_piece, request_id)

    def _take_piece(self, request_id: str) -> tuple[LiveSequence, TextPiece] | None:
        for sequence in self._find(request_id).sequences:
            if (piece := sequence.take_piece()) is not None:
                return sequence, piece
        return None

    def pop_end(self, request_id: str) -> RequestEnd:
        """The end of a finished request whose pieces were taken; the loop then forgets the request."""
        return self._lanes.run(MAIN_LANE, Depth.ENGINE, self._pop, request_id, _end)

    def _start(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, prompt: str | None, terms: Terms, now: float
    ) -> LiveRequest[LiveSequence]:
        request, asked = self._intake.request(prompt_token_ids, params, prompt, terms, now)
        grammar = None
        if self.grammars is not None and (rule := asked.rule) is not None:
            grammar = self.grammars.prepared(rule, terms.caller).result()
            self._tell_of_overlap()
        return LiveRequest(request, start(request, asked, self.tokenizer, grammar), now)

    def _tell_of_overlap(self) -> None:
        if self.runtime.config.async_scheduling:
            self.ledger.note(
                "structured_outputs",
                "a row that is held to a grammar joins a step once the host has read its last token, so while other "
                "rows run it is in every other step; answers are the same",
            )

    def _close(self) -> None:
        super()._close()
        if self.grammars is not None:
            self.grammars.close()

    def _output(self, live: LiveRequest[LiveSequence], now: float) -> RequestOutput:
        first = live.sequences[0]
        return RequestOutput(
            request_id=live.request.request_id,
            prompt=live.request.prompt,
            prompt_token_ids=live.request.prompt_token_ids,
            outputs=tuple(sequence.output() for sequence in live.sequences),
            finished=live.is_finished,
            params=first.asked,
            error=live.error,
            prompt_logprobs=first.prompt_logprobs(),
            num_cached_tokens=first.sequence.num_cached,
            num_retractions=sum(each.sequence.num_retractions for each in live.sequences),
            queue_seconds=live.phases(now).queue,
        )


def _end(live: LiveRequest[LiveSequence], now: float) -> RequestEnd:
    first = live.sequences[0]
    return RequestEnd(live.error, first.sequence.num_cached, live.phases(now), first.prompt_scores())
