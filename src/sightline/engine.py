"""The step loop: schedule, assemble, plan, forward, sample, commit.

Owns the life of requests from submission to their last token. Knows text only through a tokenizer that it may not
have. Not safe to step from two threads; `cancel` may be called from any.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import TypeVar

from torch import Tensor

from sightline.cache.prefix import PrefixCache
from sightline.core.errors import EngineClosedError, RequestError
from sightline.core.ledger import Ledger
from sightline.core.request import (
    EffectiveParams,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TextDelta,
    check_prompt,
    new_request_id,
)
from sightline.live import LiveRequest, LiveSequence, start
from sightline.models.loading.generation import GenerationDefaults
from sightline.runner.batching import RowWork, assemble
from sightline.runner.build import Runtime
from sightline.runner.sampler import sample
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import Schedule, ScheduledRow
from sightline.text.detokenizer import check_streamable
from sightline.text.tokenizer import Tokenizer

_T = TypeVar("_T")
_MAX_SCORED_LOGITS = 2**24
"""Logits of prompt tokens in one step: 64 MiB of fp32, however large the vocabulary."""


class Engine:
    """Runs requests to their end, many at a time."""

    def __init__(
        self, runtime: Runtime, tokenizer: Tokenizer | None, generation: GenerationDefaults, ledger: Ledger
    ) -> None:
        if tokenizer is not None:
            check_streamable(tokenizer)
        self.runtime = runtime
        self.tokenizer = tokenizer
        self.generation = generation
        self.ledger = ledger
        max_scored_tokens = max(1, _MAX_SCORED_LOGITS // runtime.definition.vocab_size)
        self.prefixes = PrefixCache(runtime.store) if runtime.config.prefix_caching else None
        self._scheduler = Scheduler(runtime.store, self.prefixes, runtime.config.max_step_tokens, max_scored_tokens)
        self._live: dict[str, LiveRequest] = {}
        self._cancelled: deque[str] = deque()
        self._abandoned: deque[str] = deque()
        seed = runtime.config.seed
        self._seeds = Random(secrets.randbits(64) if seed is None else seed)
        self._closed = False

    @property
    def has_work(self) -> bool:
        return self._scheduler.num_waiting + self._scheduler.num_running > 0

    @property
    def num_retractions(self) -> int:
        """Times that a running sequence had to give its pages back, and to compute again what it had."""
        return self._scheduler.num_retractions

    @property
    def vocab_size(self) -> int:
        return self.runtime.definition.vocab_size

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        namespace: str = "",
    ) -> str:
        """Queues a request and returns its id. Raises `RequestError` for one that cannot run.

        Only requests of the same namespace share what is cached of their prompts.
        """
        if self._closed:
            raise EngineClosedError("expected an open engine, got one that was closed; build a new one")
        max_model_len = self.runtime.config.max_model_len
        check_prompt(prompt_token_ids, self.vocab_size, max_model_len)
        self._check_tokens(params)
        request = Request(
            request_id=new_request_id(),
            prompt=prompt,
            prompt_token_ids=tuple(int(token) for token in prompt_token_ids),
            params=self.effective_params(params, max_model_len - len(prompt_token_ids)),
            namespace=namespace,
        )
        live = self._live[request.request_id] = start(request, self.tokenizer)
        try:
            for sequence in live.sequences:
                self._scheduler.submit(sequence.sequence)
        except BaseException:
            self.forget(request.request_id)
            raise
        return request.request_id

    def effective_params(self, params: SamplingParams, room: int) -> EffectiveParams:
        """The caller's wishes, then the model's own, then neutral values; `room` is what the context leaves."""
        model = self.generation
        greedy = model.do_sample is False or (model.temperature is None and not model.do_sample)
        model_temperature = 0.0 if greedy else _first(model.temperature, 1.0)
        end_tokens = frozenset(token for token in model.eos_token_ids if token < self.vocab_size)
        max_tokens = min(_first(params.max_tokens, room), room)
        if params.min_tokens is not None and params.min_tokens > max_tokens:
            raise RequestError(
                f"expected min_tokens of at most {max_tokens}, which is what the context leaves, got "
                f"{params.min_tokens}; shorten the prompt or raise max_model_len"
            )
        return EffectiveParams(
            temperature=_first(params.temperature, model_temperature),
            top_p=_first(params.top_p, model.top_p, 1.0),
            top_k=_first(params.top_k, model.top_k, 0),
            min_p=_first(params.min_p, model.min_p, 0.0),
            seed=_first(params.seed, self._seeds.getrandbits(64)),
            max_tokens=max_tokens,
            stop_token_ids=frozenset(params.stop_token_ids),
            skip_special_tokens=params.skip_special_tokens,
            eos_token_ids=frozenset() if params.ignore_eos else end_tokens,
            repetition_penalty=_first(params.repetition_penalty, model.repetition_penalty, 1.0),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=tuple(sorted((params.logit_bias or {}).items())),
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=_first(params.min_tokens, min(_first(model.min_tokens, 0), max_tokens)),
            n=params.n,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )

    def cancel(self, request_id: str) -> None:
        """Ends a request before the next step; an unknown or finished id is no error. Any thread may call it."""
        self._cancelled.append(request_id)

    def abandon(self, request_id: str) -> None:
        """As `cancel`, and nobody will ask for what it produced. Any thread, and a finaliser, may call it."""
        self._abandoned.append(request_id)

    def step(self) -> None:
        """One forward pass over whatever can run."""
        self._resume_interrupted()
        self._end_cancelled()
        schedule = self._scheduler.schedule()
        if not schedule.rows:
            return
        work = [
            RowWork(
                table_row=row.table_row,
                tokens=row.sequence.tokens[row.sequence.num_computed : row.sequence.num_computed + row.num_tokens],
                context_len=row.sequence.num_computed,
                num_logits=row.num_logits,
            )
            for row in schedule.rows
        ]
        planned = self.runtime.planner.plan(assemble(work, self.runtime.store))
        logits = self.runtime.runner.forward(planned)
        self._commit(schedule, logits)

    def params(self, request_id: str) -> EffectiveParams:
        """What the request really runs with."""
        return self._find(request_id).request.params

    def is_finished(self, request_id: str) -> bool:
        return self._find(request_id).is_finished

    def is_read(self, request_id: str) -> bool:
        """True where the request is finished and `take_delta` has given everything out."""
        return self._find(request_id).end_was_read

    def take_delta(self, request_id: str) -> TextDelta | None:
        """What one continuation gained since it was last asked; None where none has anything new."""
        return self._find(request_id).take_delta()

    def pop_output(self, request_id: str) -> RequestOutput:
        """The result of a finished request, which the engine then forgets."""
        live = self._find(request_id)
        if not live.is_finished:
            raise ValueError(f"expected a finished request, got {request_id}, which is running")
        self.forget(request_id)
        return live.output()

    def forget(self, request_id: str) -> None:
        """Ends a request if it runs, and drops what it produced."""
        live = self._live.get(request_id)
        if live is not None:
            for sequence in live.sequences:
                self._scheduler.remove(sequence.sequence)
            del self._live[request_id]

    def close(self) -> None:
        """Ends everything and gives the pages back."""
        for request_id in tuple(self._live):
            self.forget(request_id)
        if self.prefixes is not None:
            self.prefixes.clear()
        self._closed = True

    def _check_tokens(self, params: SamplingParams) -> None:
        """Raises `RequestError` for what this model, or its missing tokenizer, cannot do."""
        for name, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            for token in tokens:
                if token >= self.vocab_size:
                    raise RequestError(f"expected {name} below {self.vocab_size}, the vocabulary's size, got {token}")
        if len({*self.generation.eos_token_ids, *params.stop_token_ids}) >= self.vocab_size:
            raise RequestError("expected stop_token_ids that leave a token to generate, got the whole vocabulary")
        if params.stop_strings and self.tokenizer is None:
            raise RequestError(
                "expected stop_token_ids, got stop strings: the tokenizer was not loaded (skip_tokenizer_init)"
            )

    def _find(self, request_id: str) -> LiveRequest:
        live = self._live.get(request_id)
        if live is not None:
            return live
        if self._closed:
            raise EngineClosedError(f"expected an open engine, got a closed one: {request_id} ended with it")
        raise ValueError(f"expected a request that the engine knows, got {request_id}")

    def _commit(self, schedule: Schedule, logits: Tensor) -> None:
        """Takes the results in, row by row: at any moment a row is as before the step or as after it."""
        ends = list(accumulate(row.num_logits for row in schedule.rows))
        self._keep_prompt_logprobs(schedule, logits, ends)
        completing = [(row, end - 1) for row, end in zip(schedule.rows, ends, strict=True) if row.completes]
        if len(completing) < logits.shape[0]:
            logits = logits[[last for _, last in completing]]
        sampled = sample(logits, [self._of(row).sampling() for row, _ in completing])
        for row in schedule.rows:
            if not row.completes:
                self._scheduler.commit(row, None)
        for index, ((row, _), token, finite) in enumerate(zip(completing, sampled.tokens, sampled.finite, strict=True)):
            live = self._of(row)
            if finite and live.error is None:
                live.keep_logprobs(sampled.logprobs.get(index))
                self._scheduler.commit(row, token)
                self._take_in(live)
            elif not finite:
                live.fail(len(live.sequence.tokens))
        for row in schedule.rows:
            if self._of(row).error is not None:
                self._finish(self._of(row), FinishReason.ERROR)

    def _keep_prompt_logprobs(self, schedule: Schedule, logits: Tensor, ends: Sequence[int]) -> None:
        for row, end in zip(schedule.rows, ends, strict=True):
            if row.sequence.scores_prompt:
                self._of(row).keep_prompt_logprobs(logits[end - row.num_logits : end])

    def _of(self, row: ScheduledRow) -> LiveSequence:
        return self._live[row.sequence.request.request_id].sequences[row.sequence.index]

    def _take_in(self, live: LiveSequence) -> None:
        reason = live.take_in()
        if reason is not None:
            self._finish(live, reason)

    def _finish(self, live: LiveSequence, reason: FinishReason) -> None:
        if live.finish_reason is None:
            live.finish(reason)
        self._scheduler.remove(live.sequence)

    def _resume_interrupted(self) -> None:
        """Takes in what a step that was interrupted between commit and here left behind."""
        for request in tuple(self._live.values()):
            for live in request.sequences:
                if live.lags:
                    self._take_in(live)
                elif live.finish_reason is not None and live.sequence.table_row is not None:
                    self._scheduler.remove(live.sequence)

    def _end_cancelled(self) -> None:
        while self._cancelled:
            request = self._live.get(self._cancelled.popleft())
            for live in () if request is None else request.sequences:
                if live.finish_reason is None:
                    self._finish(live, FinishReason.ABORT)
        while self._abandoned:
            self.forget(self._abandoned.popleft())


def _first(*values: _T | None) -> _T:
    """The first value that is not None; the last one never is."""
    return next(value for value in values if value is not None)
