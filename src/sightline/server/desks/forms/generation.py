"""The common part of chat and text completions: from a body to prompts and parameters.

Does not know the shapes of bodies and answers: those belong to `chat` and `completion`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import msgspec

from sightline.core.answer_format import AnswerReading
from sightline.core.errors import RequestError
from sightline.core.request import SamplingParams
from sightline.server.api.schema import SAMPLED, GenerationFields, StreamOptions
from sightline.server.desks.forms.form import EngineForm, TicketT
from sightline.server.desks.forms.structured import structured_outputs
from sightline.server.desks.protocol import Generated, Order, StreamShape, UsageEvents
from sightline.server.http.errors import check_model, field_named_in, invalid
from sightline.server.http.limits import check_adjustments, check_cost
from sightline.server.process.frames import pack_tokens
from sightline.server.process.protocol import SCORE_BYTES, PackedScores, PositionScores

GenerationT = TypeVar("GenerationT", bound=GenerationFields)


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt as tokens, and what is needed to echo it."""

    token_ids: Sequence[int]
    echoed: str = ""
    """Its text, if the answer begins with it."""
    first_token: str = ""
    """The text of its first token, if it is echoed: that token has no log probability of its own."""
    offsets: Sequence[int] = ()
    """The offset of each token in `echoed`, if the answer reports them."""
    reading: AnswerReading | None = None
    """How its answers are read; None: they are text."""


class GenerationForm(EngineForm[GenerationT, TicketT, Generated], Generic[GenerationT, TicketT]):
    """Bodies and answers of one kind of completion."""

    def take(self, number: int, request: GenerationT, unused: tuple[str, ...]) -> Order:
        name, priority = check_model(request.model, self._model.names), self._model.priority(request.priority)
        params, num_prompts = self._params(request), self.num_prompts(request)
        self._check_cost(params, num_prompts, self.num_prompt_bytes(request))
        prompts = self.prompts(request, params)
        if (reading := prompts[0].reading) is not None:
            params = replace(params, reading=reading)
        # Check again with the real lengths: a template may add text to a conversation.
        self._check_cost(params, num_prompts, max(len(each.token_ids) for each in prompts))
        if params.prompt_logprobs is not None:
            num_scores = sum(len(each.token_ids) for each in prompts) * (1 + params.prompt_logprobs)
            self._model.check_answer(num_scores * SCORE_BYTES)
        return Order(
            number,
            name,
            tuple(pack_tokens(each.token_ids) for each in prompts),
            msgspec.msgpack.encode(params),
            params.n,
            msgspec.msgpack.encode(self.ticket(request, prompts)),
            self._stream(request, params, prompts),
            unused,
            priority,
        )

    @abstractmethod
    def num_prompts(self, request: GenerationT) -> int:
        """The number of prompts; called before any of them is encoded."""

    @abstractmethod
    def num_prompt_bytes(self, request: GenerationT) -> int:
        """The size of the longest prompt's text in bytes, which bounds its number of tokens."""

    @abstractmethod
    def prompts(self, request: GenerationT, params: SamplingParams) -> list[ReadPrompt]:
        """The prompts, as far as `truncate_prompt_tokens` keeps them."""

    def kept_tokens(self, prompt: Sequence[int], params: SamplingParams, param: str) -> Sequence[int]:
        """A prompt's tokens that run, checked; `param` is the field that they came in."""
        kept = params.cut(prompt, self._model.max_model_len)
        self._model.check_tokens(kept, param)
        return kept

    @abstractmethod
    def sampling(self, request: GenerationT) -> dict[str, Any]:
        """Sampling parameters that this kind has under other names. Raises `ApiError` for fields that do not agree."""

    @abstractmethod
    def ticket(self, request: GenerationT, prompts: Sequence[ReadPrompt]) -> TicketT:
        """What `answer` needs, beside what the engine generates."""

    def prompt_positions(self, packed: bytes) -> list[PositionScores | None]:
        """The log probabilities of a prompt's tokens; None for the first."""
        return msgspec.msgpack.decode(packed, type=PackedScores).positions(self._model.text.token_text)

    def _stream(
        self, request: GenerationT, params: SamplingParams, prompts: Sequence[ReadPrompt]
    ) -> StreamShape | None:
        if not request.stream:
            return None
        return StreamShape(
            params.logprobs, _usage_events(request.stream_options), tuple(each.echoed for each in prompts)
        )

    def _params(self, request: GenerationT) -> SamplingParams:
        given = {name: getattr(request, name) for name in SAMPLED}
        params = {name: value for name, value in given.items() if value is not None} | self.sampling(request)
        params |= structured_outputs(request)
        if request.stream and request.prompt_logprobs is not None:
            raise invalid("prompt_logprobs is not supported with stream", "prompt_logprobs")
        if request.stream_options is not None and not request.stream:
            raise invalid("stream_options needs stream: true", "stream_options")
        try:
            return SamplingParams(**params)
        except RequestError as error:
            raise invalid(str(error), field_named_in(str(error))) from error

    def _check_cost(self, params: SamplingParams, count: int, prompt_len: int) -> None:
        context = self._model.max_model_len
        bound = min(context, prompt_len) + min(context, context if params.max_tokens is None else params.max_tokens)
        check_cost(
            prompts=count,
            n=params.n,
            tokens=min(context, bound),
            logprobs=max(params.logprobs or 0, params.prompt_logprobs or 0),
            most=self._model.max_cost,
        )
        check_adjustments(
            count * params.n,
            {
                "logit_bias": len(params.logit_bias or ()),
                "allowed_token_ids": len(params.allowed_token_ids or ()),
                "bad_words": sum(map(len, params.bad_words or ())),
                "stop": sum(map(len, params.stop_strings)),
            },
        )


def _usage_events(options: StreamOptions | None) -> UsageEvents:
    if options is None or not options.include_usage:
        if options is not None and options.continuous_usage_stats:
            raise invalid("continuous_usage_stats needs include_usage: true", "stream_options.continuous_usage_stats")
        return UsageEvents.NONE
    return UsageEvents.EVERY if options.continuous_usage_stats else UsageEvents.LAST
