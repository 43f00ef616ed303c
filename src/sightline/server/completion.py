"""Text completions: prompts in, what follows them out, in the older shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from msgspec import UNSET

from sightline.core.request import PositionLogprobs
from sightline.server.errors import invalid
from sightline.server.generation import (
    Chunks,
    Completer,
    Continuation,
    Head,
    Outcome,
    Prompt,
    chosen,
    likeliest,
    told_prompt_logprobs,
)
from sightline.server.protocol import Delta
from sightline.server.schema import (
    MAX_PROMPTS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Usage,
)

DEFAULT_MAX_TOKENS = 16


class TextCompleter(Completer[CompletionRequest]):
    """Continues prompts."""

    id_prefix = "cmpl-"

    def num_prompts(self, request: CompletionRequest) -> int:
        return len(_listed(request.prompt))

    def num_prompt_bytes(self, request: CompletionRequest) -> int:
        return max(len(each.encode()) if isinstance(each, str) else len(each) for each in _listed(request.prompt))

    async def prompts(self, request: CompletionRequest) -> list[Prompt]:
        desk, prompts = self._service.desk, []
        for each in _listed(request.prompt):
            tokens = await desk.encode(each) if isinstance(each, str) else each
            self._service.check_tokens(tokens, "prompt")
            if request.echo:
                prompts.append(Prompt(tokens, await desk.decode(tokens), await desk.decode(tokens[:1])))
            else:
                prompts.append(Prompt(tokens))
        return prompts

    def sampling(self, request: CompletionRequest) -> dict[str, Any]:
        if request.suffix:
            raise invalid("expected no suffix, got one: it is not there", "suffix")
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise invalid("expected best_of equal to n, got another: choosing among more is not there", "best_of")
        if request.echo and request.stream and request.logprobs is not None:
            raise invalid("expected echo with logprobs without stream, got all three: a stream has no place", "echo")
        scored = request.logprobs if request.echo else None
        return {
            "max_tokens": DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
            "logprobs": request.logprobs,
            "prompt_logprobs": request.prompt_logprobs if scored is None else max(scored, request.prompt_logprobs or 0),
        }

    def whole(self, request: CompletionRequest, head: Head, prompts: Sequence[Prompt], outcome: Outcome) -> Completion:
        n = len(outcome.continuations) // len(prompts)
        choices = [
            self._choice(request, index, prompts[index // n], each, outcome.prompt_logprobs.get(index // n))
            for index, each in enumerate(outcome.continuations)
        ]
        return Completion(head.id, "text_completion", head.created, head.model, choices, outcome.usage())

    def chunks(self, request: CompletionRequest, head: Head, prompts: Sequence[Prompt]) -> CompletionChunks:
        echoed = [each.echoed for each in prompts for _ in range(request.n or 1)] if request.echo else []
        return CompletionChunks(head, request.logprobs, echoed)

    def _choice(
        self,
        request: CompletionRequest,
        index: int,
        prompt: Prompt,
        each: Continuation,
        scored: Sequence[PositionLogprobs | None] | None,
    ) -> CompletionChoice:
        logprobs = None
        if request.logprobs is not None:
            entries = [*(scored or ()), *each.logprobs] if request.echo else each.logprobs
            logprobs = _logprobs(entries, request.logprobs, prompt.first_token)
        return CompletionChoice(
            index,
            prompt.echoed + each.text,
            each.finish_reason,
            logprobs,
            each.stop_reason,
            UNSET if request.prompt_logprobs is None or scored is None else told_prompt_logprobs(scored),
        )


class CompletionChunks(Chunks):
    """The events of streamed continuations."""

    def __init__(self, head: Head, num_logprobs: int | None, echoed: Sequence[str]) -> None:
        """`echoed` are the texts that the continuations begin with, one for each, or none."""
        self._head = head
        self._num_logprobs = num_logprobs
        self._echoed = echoed
        self._lengths: dict[int, int] = {}
        """By continuation, characters of the tokens that were told."""

    def opening(self, *, include_usage: bool) -> Sequence[Completion]:
        return [
            self._event([CompletionChoice(index, text)], include_usage=include_usage)
            for index, text in enumerate(self._echoed)
        ]

    def chunk(self, index: int, delta: Delta, *, include_usage: bool) -> Completion | None:
        if not delta.text and delta.finish_reason is None and not delta.logprobs:
            return None
        logprobs = None
        if self._num_logprobs is not None and delta.logprobs is not None:
            logprobs = _logprobs(delta.logprobs, self._num_logprobs, start=self._lengths.get(index, 0))
            self._lengths[index] = self._lengths.get(index, 0) + sum(map(len, logprobs.tokens))
        choice = CompletionChoice(
            index,
            delta.text,
            delta.finish_reason,
            logprobs,
            UNSET if delta.finish_reason is None else delta.stop_reason,
        )
        return self._event([choice], include_usage=include_usage)

    def closing(self, usage: Usage) -> Completion:
        return self._event([], usage)

    def _event(
        self, choices: list[CompletionChoice], usage: Usage | None = None, *, include_usage: bool = True
    ) -> Completion:
        head = self._head
        told = usage if include_usage else UNSET
        return Completion(head.id, "text_completion", head.created, head.model, choices, told)


def _listed(prompt: str | list[Any]) -> list[str | list[int]]:
    """Prompts, one or many: all as text, or all as tokens."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(each) for each in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds not in ({str}, {list}):
        raise invalid("expected a prompt as text, as token ids, or as a list of either, got them mixed", "prompt")
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"expected at most {MAX_PROMPTS} prompts, got {len(prompt)}; send them in parts", "prompt")
    return prompt


def _logprobs(
    entries: Sequence[PositionLogprobs | None], count: int, first: str = "", start: int = 0
) -> CompletionLogprobs:
    """`first` is the text of a token that nothing predicts; `start`, where in the answer the entries begin."""
    tokens = [first if entry is None else chosen(entry).decoded_token or "" for entry in entries]
    offsets = accumulate((len(token) for token in tokens), initial=start)
    return CompletionLogprobs(
        tokens,
        [None if entry is None else chosen(entry).logprob for entry in entries],
        [None if entry is None else dict(likeliest(entry, count)) for entry in entries] if count else None,
        list(offsets)[: len(tokens)],
    )
