"""The common part of chat and text completions: from a body to prompts and parameters, and from reports to answers.

Does not know the shapes of bodies and answers: those belong to `chat` and `completion`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from sightline.core.errors import RequestError
from sightline.core.request import EffectiveParams, Logprob, PositionLogprobs, SamplingParams
from sightline.server.api.answers import PromptDetails, PromptLogprob, PromptLogprobs, Usage
from sightline.server.api.schema import SAMPLED, GenerationFields
from sightline.server.http.errors import ApiError, failed, field_named_in, invalid, unavailable
from sightline.server.http.limits import check_adjustments, check_cost
from sightline.server.http.routing import Call, Header, Reply, Stream
from sightline.server.process.port import EngineDownError
from sightline.server.process.protocol import Delta, Ended
from sightline.server.service import RESTART_SECONDS, Running, Service

RequestT = TypeVar("RequestT", bound=GenerationFields)
_ENCODER = msgspec.json.Encoder()


@dataclass
class Continuation:
    """One of the answers, as far as it has been generated."""

    pieces: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, delta: Delta) -> None:
        self.pieces.append(delta.text)
        self.logprobs += delta.logprobs or ()
        self.num_tokens += delta.num_tokens
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass
class GenerationOutcome:
    """The continuations of all prompts of a request."""

    num_prompt_tokens: int
    n: int
    """Continuations per prompt."""
    continuations: list[Continuation]
    """`n` of the first prompt, then `n` of the second, and so on."""
    num_cached: int = 0
    prompt_logprobs: dict[int, tuple[PositionLogprobs | None, ...]] = field(default_factory=dict)
    """Log probabilities of prompts, by the prompt's index."""

    def usage(self) -> Usage:
        generated = sum(each.num_tokens for each in self.continuations)
        return Usage(
            self.num_prompt_tokens, generated, self.num_prompt_tokens + generated, PromptDetails(self.num_cached)
        )


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens, and what is needed to echo it."""

    token_ids: list[int]
    echoed: str = ""
    """Its text, if the answer begins with it."""
    first_token: str = ""
    """The text of its first token, if it is echoed: that token has no log probability of its own."""
    offsets: Sequence[int] = ()
    """The offset of each token in `echoed`, if the answer reports them."""


@dataclass(frozen=True)
class Head:
    """The fields that every body and every event of an answer begins with."""

    id: str
    created: int
    model: str


class Completer(ABC, Generic[RequestT]):
    """A handler for one kind of completion."""

    id_prefix: ClassVar[str]

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, call: Call[RequestT]) -> Reply | Stream:
        """Runs a request. Returns its answer, or its stream once the engine has accepted it."""
        request, service = call.body, self._service
        head = Head(self.id_prefix + call.request_id, int(time.time()), service.check_model(request.model))
        params, num_prompts = self._params(request), self.num_prompts(request)
        self._check_cost(params, num_prompts, self.num_prompt_bytes(request))
        with ExitStack() as places:
            places.enter_context(service.admission.admitted(call.caller, num_prompts * params.n))
            prompts = await self.prompts(call)
            # Check again with the real lengths: a template may add text to a conversation.
            self._check_cost(params, num_prompts, max(len(each.token_ids) for each in prompts))
            running = await service.start(call, [each.token_ids for each in prompts], params, places.pop_all())
        headers = (_sampling_header(running.params[0]),)
        continuations = [Continuation() for _ in range(num_prompts * params.n)]
        outcome = GenerationOutcome(running.num_prompt_tokens, params.n, continuations)
        if request.stream:
            options = request.stream_options
            chunks = self.chunks(request, head, prompts, includes_usage=options is not None and options.include_usage)
            return Stream(self._events(call, running, outcome, chunks), running.release.close, headers)
        with running.release:
            await self._finish(call, running, outcome)
        return Reply(_ENCODER.encode(self.whole(request, head, prompts, outcome)), headers=headers)

    @abstractmethod
    def num_prompts(self, request: RequestT) -> int:
        """The number of prompts; called before any of them is encoded."""

    @abstractmethod
    def num_prompt_bytes(self, request: RequestT) -> int:
        """The size of the longest prompt's text in bytes, which bounds its number of tokens."""

    @abstractmethod
    async def prompts(self, call: Call[RequestT]) -> list[Prompt]: ...

    @abstractmethod
    def sampling(self, request: RequestT) -> dict[str, Any]:
        """Sampling parameters that this kind has under other names. Raises `ApiError` for unsupported fields."""

    @abstractmethod
    def whole(self, request: RequestT, head: Head, prompts: Sequence[Prompt], outcome: GenerationOutcome) -> object:
        """The answer's body."""

    @abstractmethod
    def chunks(self, request: RequestT, head: Head, prompts: Sequence[Prompt], *, includes_usage: bool) -> Chunks:
        """The maker of a stream's events."""

    def _params(self, request: RequestT) -> SamplingParams:
        given = {name: getattr(request, name) for name in SAMPLED}
        params = {name: value for name, value in given.items() if value is not None} | self.sampling(request)
        if request.stream and request.prompt_logprobs is not None:
            raise invalid("prompt_logprobs is not supported with stream", "prompt_logprobs")
        if request.stream_options is not None and not request.stream:
            raise invalid("stream_options needs stream: true", "stream_options")
        try:
            return SamplingParams(**params)
        except RequestError as error:
            raise invalid(str(error), field_named_in(str(error))) from error

    def _check_cost(self, params: SamplingParams, count: int, prompt_len: int) -> None:
        context = self._service.opened.max_model_len
        bound = min(context, prompt_len) + min(context, params.max_tokens or context)
        check_cost(
            prompts=count,
            n=params.n,
            tokens=min(context, bound),
            logprobs=max(params.logprobs or 0, params.prompt_logprobs or 0),
            most=self._service.max_cost,
        )
        check_adjustments(
            sequences=count * params.n,
            biases=len(params.logit_bias or ()),
            stop_characters=sum(map(len, params.stop_strings)),
        )

    async def _finish(self, call: Call[RequestT], running: Running, outcome: GenerationOutcome) -> None:
        """Collects all reports. Raises `ApiError` if a continuation failed."""
        try:
            async for place, report in running.answers.reports():
                _take(report, place, outcome)
        except EngineDownError as error:
            raise unavailable(str(error), RESTART_SECONDS) from error
        call.facts["completion_tokens"] = outcome.usage().completion_tokens

    async def _events(
        self, call: Call[RequestT], running: Running, outcome: GenerationOutcome, chunks: Chunks
    ) -> AsyncGenerator[bytes, None]:
        """The stream: chunks, usage if requested, and `[DONE]`. An error is the last event; no `[DONE]` follows it."""
        try:
            for chunk in chunks.opening():
                yield _event(chunk)
            async for place, report in running.answers.reports():
                delta = _take(report, place, outcome)
                chunk = None if delta is None else chunks.chunk(place * outcome.n + delta.index, delta)
                if chunk is not None:
                    yield _event(chunk)
        except EngineDownError as error:
            yield _error_event(call, unavailable(str(error), RESTART_SECONDS))
            return
        except ApiError as error:
            yield _error_event(call, error)
            return
        finally:
            call.facts["completion_tokens"] = outcome.usage().completion_tokens
        if chunks.includes_usage:
            yield _event(chunks.closing(outcome.usage()))
        yield b"data: [DONE]\n\n"


class Chunks(ABC):
    """Makes the events of one stream."""

    def __init__(self, head: Head, *, includes_usage: bool) -> None:
        """If a stream ends with an event for usage, every event before it has a null `usage`."""
        self._head = head
        self.includes_usage = includes_usage

    @abstractmethod
    def opening(self) -> Sequence[object]:
        """Events before the first token."""

    @abstractmethod
    def chunk(self, index: int, delta: Delta) -> object | None:
        """The event for a piece of a continuation; None if there is nothing to send."""

    @abstractmethod
    def closing(self, usage: Usage) -> object:
        """The event that reports usage."""


def _take(report: Delta | Ended, place: int, outcome: GenerationOutcome) -> Delta | None:
    """Adds a report to the outcome. Returns it if it is a piece of text; raises `ApiError` if the prompt failed."""
    first = place * outcome.n
    match report:
        case Delta(index=index):
            outcome.continuations[first + index].take(report)
            return report
        case Ended(error=error, num_cached=num_cached, prompt_logprobs=prompt_logprobs):
            outcome.num_cached += num_cached
            if prompt_logprobs is not None:
                outcome.prompt_logprobs[place] = prompt_logprobs
            ended = outcome.continuations[first : first + outcome.n]
            if error is not None and "error" in {each.finish_reason for each in ended}:
                raise failed(f"the engine could not finish the request: {error}")
            if error is not None and not any(each.num_tokens for each in ended):
                raise unavailable(f"the request did not start: {error}", RESTART_SECONDS)
            return None


def told_prompt_logprobs(entries: Sequence[PositionLogprobs | None]) -> PromptLogprobs:
    """A prompt's log probabilities in the form of an answer's body."""
    return [
        None
        if entry is None
        else {str(token): PromptLogprob(each.logprob, each.rank, each.decoded_token) for token, each in entry.items()}
        for entry in entries
    ]


def chosen(entry: PositionLogprobs) -> Logprob:
    """The log probability of the token at this position: the first of the entry."""
    return next(iter(entry.values()))


def likeliest(entry: PositionLogprobs, count: int) -> list[tuple[str, float]]:
    """The text and log probability of a position's `count` likeliest tokens, the likeliest first."""
    # The first token of an entry is the chosen one, which need not be among the likeliest.
    known = list(entry.items())[len(entry) > count :]
    ranked = sorted((each.rank, token) for token, each in known)
    return [(entry[token].decoded_token or "", entry[token].logprob) for _, token in ranked][:count]


def _sampling_header(params: EffectiveParams) -> Header:
    """The sampling parameters in effect, as a header."""
    shown = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in asdict(params).items()}
    for name in ("stop", "logit_bias", "eos_token_ids", "stop_token_ids"):
        shown.pop(name)
    return (b"x-sightline-sampling", _ENCODER.encode(shown))


def _event(chunk: object) -> bytes:
    return b"data: " + _ENCODER.encode(chunk) + b"\n\n"


def _error_event(call: Call[Any], error: ApiError) -> bytes:
    """An error as an event, for an answer whose status has been sent."""
    call.facts["error"] = error.code
    return b"data: " + error.body() + b"\n\n"
