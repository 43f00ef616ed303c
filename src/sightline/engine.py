"""The step loop: schedule, assemble, plan, forward, sample, commit.

Owns the life of requests from submission to their last token. Knows text only through a tokenizer that it may not
have. Not safe to step from two threads; `cancel` may be called from any.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from torch import Tensor

from sightline.core.errors import EngineClosedError, RequestError
from sightline.core.ledger import Ledger
from sightline.core.request import (
    CompletionOutput,
    EffectiveParams,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TextDelta,
    check_prompt,
    new_request_id,
)
from sightline.models.loading.generation import GenerationDefaults
from sightline.runner.batching import RowWork, assemble
from sightline.runner.build import Runtime
from sightline.runner.sampler import RowSampling, sample
from sightline.scheduler.scheduler import Schedule, Scheduler, SequenceState
from sightline.text.detokenizer import IncrementalDetokenizer, check_streamable
from sightline.text.tokenizer import Tokenizer

_T = TypeVar("_T")


@dataclass(eq=False)
class LiveRequest:
    """A request in the engine, and what it has produced."""

    request: Request
    sequence: SequenceState
    detokenizer: IncrementalDetokenizer | None
    text: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_taken_in: int = 0
    """Generated tokens whose text and meaning are known."""
    num_read_pieces: int = 0
    """Pieces of text that a stream has taken."""
    num_read_tokens: int = 0
    """Generated tokens that a stream has taken."""

    def generated(self, start: int = 0) -> tuple[int, ...]:
        """The generated tokens from the `start`-th on."""
        return tuple(self.sequence.tokens[len(self.request.prompt_token_ids) + start :])


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
        self._scheduler = Scheduler(runtime.store, runtime.config.max_step_tokens)
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
    def vocab_size(self) -> int:
        return self.runtime.definition.vocab_size

    def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams, prompt: str | None = None) -> str:
        """Queues a request and returns its id. Raises `RequestError` for one that cannot run."""
        if self._closed:
            raise EngineClosedError("expected an open engine, got one that was closed; build a new one")
        max_model_len = self.runtime.config.max_model_len
        check_prompt(prompt_token_ids, self.vocab_size, max_model_len)
        for token in params.stop_token_ids:
            if token >= self.vocab_size:
                raise RequestError(f"expected stop_token_ids below {self.vocab_size}, got {token}")
        request = Request(
            request_id=new_request_id(),
            prompt=prompt,
            prompt_token_ids=tuple(int(token) for token in prompt_token_ids),
            params=self.effective_params(params, max_model_len - len(prompt_token_ids)),
        )
        self._live[request.request_id] = self._admit(request)
        return request.request_id

    def effective_params(self, params: SamplingParams, room: int) -> EffectiveParams:
        """The caller's wishes, then the model's own, then neutral values; `room` is what the context leaves."""
        model = self.generation
        greedy = model.do_sample is False or (model.temperature is None and not model.do_sample)
        model_temperature = 0.0 if greedy else _first(model.temperature, 1.0)
        end_tokens = frozenset() if params.ignore_eos else model.eos_token_ids
        return EffectiveParams(
            temperature=_first(params.temperature, model_temperature),
            top_p=_first(params.top_p, model.top_p, 1.0),
            top_k=_first(params.top_k, model.top_k, 0),
            min_p=_first(params.min_p, model.min_p, 0.0),
            seed=_first(params.seed, self._seeds.getrandbits(64)),
            max_tokens=min(_first(params.max_tokens, room), room),
            stop_token_ids=end_tokens | frozenset(params.stop_token_ids),
            skip_special_tokens=params.skip_special_tokens,
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
                wants_logits=row.completes,
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
        return self._find(request_id).finish_reason is not None

    def take_delta(self, request_id: str) -> TextDelta | None:
        """What the request gained since the last call; None where nothing is new."""
        live = self._find(request_id)
        pieces, tokens = live.text[live.num_read_pieces :], live.generated(live.num_read_tokens)
        if not tokens and not pieces and live.finish_reason is None:
            return None
        live.num_read_pieces += len(pieces)
        live.num_read_tokens += len(tokens)
        return TextDelta(request_id, "".join(pieces), tokens, live.finish_reason, live.error)

    def pop_output(self, request_id: str) -> RequestOutput:
        """The result of a finished request, which the engine then forgets."""
        live = self._find(request_id)
        if live.finish_reason is None:
            raise ValueError(f"expected a finished request, got {request_id}, which is running")
        self.forget(request_id)
        completion = CompletionOutput(0, "".join(live.text), live.generated(), live.finish_reason.value)
        return RequestOutput(
            request_id=request_id,
            prompt=live.request.prompt,
            prompt_token_ids=live.request.prompt_token_ids,
            outputs=(completion,),
            finished=True,
            params=live.request.params,
            error=live.error,
        )

    def forget(self, request_id: str) -> None:
        """Ends a request if it runs, and drops what it produced."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self._scheduler.remove(live.sequence)

    def close(self) -> None:
        """Ends everything and gives the pages back."""
        for request_id in tuple(self._live):
            self.forget(request_id)
        self._closed = True

    def _admit(self, request: Request) -> LiveRequest:
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self.tokenizer, skip_special_tokens=request.params.skip_special_tokens)
        live = LiveRequest(request, SequenceState(request), detokenizer)
        self._scheduler.submit(live.sequence)
        return live

    def _find(self, request_id: str) -> LiveRequest:
        live = self._live.get(request_id)
        if live is not None:
            return live
        if self._closed:
            raise EngineClosedError(f"expected an open engine, got a closed one: {request_id} ended with it")
        raise ValueError(f"expected a request that the engine knows, got {request_id}")

    def _commit(self, schedule: Schedule, logits: Tensor) -> None:
        """Takes the results in, row by row: at any moment a row is as before the step or as after it."""
        completing = [row for row in schedule.rows if row.completes]
        sampled = sample(
            logits, [RowSampling(row.sequence.request.params, row.sequence.num_generated) for row in completing]
        )
        for row in schedule.rows:
            if not row.completes:
                self._scheduler.commit(row, None)
        for row, token, finite in zip(completing, sampled.tokens, sampled.finite, strict=True):
            live = self._live[row.sequence.request.request_id]
            if finite:
                self._scheduler.commit(row, token)
                self._take_in(live)
            else:
                live.error = (
                    f"the model's logits at position {len(live.sequence.tokens)} held a NaN or an infinity; "
                    "check the weights and the compute dtype"
                )
                self._finish(live, FinishReason.ERROR)

    def _take_in(self, live: LiveRequest) -> None:
        """Reads the generated tokens that were not read yet: their text, and whether one ends the request."""
        for token in live.generated(live.num_taken_in):
            live.num_taken_in += 1
            if token in live.request.params.stop_token_ids:
                self._finish(live, FinishReason.STOP)
                return
            if live.detokenizer is not None:
                live.text.append(live.detokenizer.push([token]))
        if live.sequence.num_generated >= live.request.params.max_tokens:
            self._finish(live, FinishReason.LENGTH)

    def _finish(self, live: LiveRequest, reason: FinishReason) -> None:
        if live.detokenizer is not None:
            live.text.append(live.detokenizer.flush())
        live.finish_reason = reason
        self._scheduler.remove(live.sequence)

    def _resume_interrupted(self) -> None:
        """Takes in what a step that was interrupted between commit and here left behind."""
        for live in tuple(self._live.values()):
            if live.finish_reason is None and live.num_taken_in < live.sequence.num_generated:
                self._take_in(live)

    def _end_cancelled(self) -> None:
        while self._cancelled:
            live = self._live.get(self._cancelled.popleft())
            if live is not None and live.finish_reason is None:
                self._finish(live, FinishReason.ABORT)
        while self._abandoned:
            self.forget(self._abandoned.popleft())


def _first(*values: _T | None) -> _T:
    """The first value that is not None; the last one never is."""
    return next(value for value in values if value is not None)
