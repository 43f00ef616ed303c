"""Text completions, OpenAI's older interface: prompts in, their continuations out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from sightline.core.request import PositionLogprobs
from sightline.server.api.answers import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs, Usage
from sightline.server.api.generation import (
    Chunks,
    Completer,
    Continuation,
    GenerationOutcome,
    Head,
    Prompt,
    chosen,
    likeliest,
    told_prompt_logprobs,
)
from sightline.server.api.schema import MAX_PROMPTS, CompletionRequest
from sightline.server.desk import TextOffsets
from sightline.server.http.errors import invalid
from sightline.server.http.routing import Call
from sightline.server.process.protocol import Delta


class TextCompleter(Completer[CompletionRequest]):
    """The handler for text completions."""

    id_prefix = "cmpl-"

    def num_prompts(self, request: CompletionRequest) -> int:
        return len(listed_texts(request.prompt))

    def num_prompt_bytes(self, request: CompletionRequest) -> int:
        return max(len(each.encode()) if isinstance(each, str) else len(each) for each in listed_texts(request.prompt))

    async def prompts(self, call: Call[CompletionRequest]) -> list[Prompt]:
        desk, caller, prompts = self._service.desk, call.caller, []
        for each in listed_texts(call.body.prompt):
            tokens = await desk.encode(caller, each) if isinstance(each, str) else each
            self._service.check_tokens(tokens, "prompt")
            if call.body.echo:
                first = await desk.decode(caller, tokens[:1])
                text = await desk.decode(caller, tokens)
                scored = call.body.logprobs is not None
                prompts.append(Prompt(tokens, text, first, await desk.offsets(caller, tokens) if scored else ()))
            else:
                prompts.append(Prompt(tokens))
        return prompts

    def sampling(self, request: CompletionRequest) -> dict[str, Any]:
        if request.suffix:
            raise invalid("suffix is not supported", "suffix")
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise invalid("best_of is not supported unless it equals n", "best_of")
        if request.echo and request.stream and request.logprobs is not None:
            raise invalid("echo with logprobs is not supported with stream", "echo")
        scored = request.logprobs if request.echo else None
        return {
            "logprobs": request.logprobs,
            "prompt_logprobs": request.prompt_logprobs if scored is None else max(scored, request.prompt_logprobs or 0),
        }

    def whole(
        self, request: CompletionRequest, head: Head, prompts: Sequence[Prompt], outcome: GenerationOutcome
    ) -> Completion:
        choices = []
        for place, prompt in enumerate(prompts):
            scored = outcome.prompt_logprobs.get(place)
            # Convert once for all continuations of a prompt: both can be many.
            told = UNSET if request.prompt_logprobs is None or scored is None else told_prompt_logprobs(scored)
            first = place * outcome.n
            for index, each in enumerate(outcome.continuations[first : first + outcome.n], first):
                choices.append(self._choice(request, index, prompt, each, scored, told))
        return Completion(head.id, "text_completion", head.created, head.model, choices, outcome.usage())

    def chunks(
        self, request: CompletionRequest, head: Head, prompts: Sequence[Prompt], *, includes_usage: bool
    ) -> CompletionChunks:
        echoed = [each.echoed for each in prompts for _ in range(request.n or 1)] if request.echo else []
        return CompletionChunks(
            head, request.logprobs, echoed, lambda: self._offsets(request), includes_usage=includes_usage
        )

    def _offsets(self, request: CompletionRequest, start: int = 0) -> TextOffsets:
        skip = request.skip_special_tokens is not False
        return TextOffsets(self._service.desk.detokenizer(skip_special_tokens=skip), start)

    def _choice(
        self,
        request: CompletionRequest,
        index: int,
        prompt: Prompt,
        each: Continuation,
        scored: Sequence[PositionLogprobs | None] | None,
        told: PromptLogprobs | UnsetType,
    ) -> CompletionChoice:
        logprobs = None
        if request.logprobs is not None:
            entries = [*(scored or ()), *each.logprobs] if request.echo else each.logprobs
            offsets = self._offsets(request, len(prompt.echoed)).take(each.logprobs)
            if request.echo:
                offsets = [*prompt.offsets, *offsets]
            logprobs = _logprobs(entries, request.logprobs, offsets, prompt.first_token)
        return CompletionChoice(
            index,
            prompt.echoed + each.text,
            each.finish_reason,
            logprobs,
            each.stop_reason,
            told,
        )


class CompletionChunks(Chunks):
    """The events of streamed text completions."""

    def __init__(
        self,
        head: Head,
        num_logprobs: int | None,
        echoed: Sequence[str],
        offsets: Callable[[], TextOffsets],
        *,
        includes_usage: bool,
    ) -> None:
        """`echoed` has the text that each continuation begins with, or is empty."""
        super().__init__(head, includes_usage=includes_usage)
        self._num_logprobs = num_logprobs
        self._echoed = echoed
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(offsets)
        """Offsets so far, by continuation."""

    def opening(self) -> Sequence[Completion]:
        return [self._event([CompletionChoice(index, text)]) for index, text in enumerate(self._echoed)]

    def chunk(self, index: int, delta: Delta) -> Completion | None:
        if not delta.text and delta.finish_reason is None and not delta.logprobs:
            return None
        logprobs = None
        if self._num_logprobs is not None and delta.logprobs is not None:
            logprobs = _logprobs(delta.logprobs, self._num_logprobs, self._offsets[index].take(delta.logprobs))
        choice = CompletionChoice(
            index,
            delta.text,
            delta.finish_reason,
            logprobs,
            UNSET if delta.finish_reason is None else delta.stop_reason,
        )
        return self._event([choice])

    def closing(self, usage: Usage) -> Completion:
        return self._event([], usage)

    def _event(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        head = self._head
        told = usage if self.includes_usage else UNSET
        return Completion(head.id, "text_completion", head.created, head.model, choices, told)


def listed_texts(prompt: str | list[Any], param: str = "prompt") -> list[str | list[int]]:
    """The texts of a field, which holds one or many, as text or as tokens; `param` is the field's name."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(each) for each in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds not in ({str}, {list}):
        raise invalid(f"expected {param} as text, as token ids, or as a list of either, got a mixture", param)
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"expected at most {MAX_PROMPTS} texts, got {len(prompt)}; send them in parts", param)
    return prompt


def _logprobs(
    entries: Sequence[PositionLogprobs | None], count: int, offsets: list[int], first: str = ""
) -> CompletionLogprobs:
    """Log probabilities in the older shape; `first` is the text of a prompt's first token, which has none."""
    return CompletionLogprobs(
        [first if entry is None else chosen(entry).decoded_token or "" for entry in entries],
        [None if entry is None else chosen(entry).logprob for entry in entries],
        [None if entry is None else _by_text(likeliest(entry, count)) for entry in entries] if count else None,
        offsets,
    )


def _by_text(ranked: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Log probabilities by text. Tokens with the same text, such as parts of characters, appear once: the likeliest."""
    told: dict[str, float] = {}
    for text, logprob in ranked:
        told.setdefault(text, logprob)
    return told
