"""Text completions, OpenAI's older interface: prompts in, their continuations out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct

from sightline.core.request import SamplingParams
from sightline.server.api.answers import Completion, CompletionChoice, CompletionLogprobs
from sightline.server.api.fields import also_unused
from sightline.server.api.schema import MAX_PROMPTS, CompletionRequest
from sightline.server.api.scores import (
    completion_logprobs,
    prompt_logprobs,
    usage,
)
from sightline.server.desks.forms.form import ServedModel
from sightline.server.desks.forms.generation import GenerationForm, ReadPrompt
from sightline.server.desks.protocol import Continuation, Generated, Head, Order
from sightline.server.http.errors import invalid
from sightline.server.process.protocol import PositionScores


class EchoedPrompt(Struct, frozen=True, array_like=True):
    """The text of a prompt that its continuations begin with."""

    text: str
    first_token: str
    offsets: list[int]
    """The offset of each token, if log probabilities are reported."""


class CompletionTicket(Struct, frozen=True):
    """What the answer to prompts depends on."""

    num_logprobs: int | None
    tells_prompt_scores: bool
    echoed: list[EchoedPrompt] | None
    """By prompt; None if prompts are not echoed."""


class CompletionForm(GenerationForm[CompletionRequest, CompletionTicket]):
    """Bodies and answers of text completions."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model, CompletionRequest, CompletionTicket, Generated)

    def take(self, number: int, request: CompletionRequest, unused: tuple[str, ...]) -> Order:
        are_tokens = not any(isinstance(each, str) for each in listed_texts(request.prompt))
        if are_tokens and request.add_special_tokens is not None:
            unused = also_unused(unused, ["add_special_tokens"])
        return super().take(number, request, unused)

    def num_prompts(self, request: CompletionRequest) -> int:
        return len(listed_texts(request.prompt))

    def num_prompt_bytes(self, request: CompletionRequest) -> int:
        return max(len(each.encode()) if isinstance(each, str) else len(each) for each in listed_texts(request.prompt))

    def prompts(self, request: CompletionRequest, params: SamplingParams) -> list[ReadPrompt]:
        text, prompts, adds_special = self._model.text, [], request.add_special_tokens is not False
        for each in listed_texts(request.prompt):
            encoded = text.encode(each, add_special_tokens=adds_special) if isinstance(each, str) else each
            tokens = self.kept_tokens(encoded, params, "prompt")
            if request.echo:
                offsets = text.offsets(tokens) if request.logprobs is not None else ()
                prompts.append(ReadPrompt(tokens, text.decode(tokens), text.decode(tokens[:1]), offsets))
            else:
                prompts.append(ReadPrompt(tokens))
        return prompts

    def sampling(self, request: CompletionRequest) -> dict[str, Any]:
        if request.echo and request.stream and request.logprobs is not None:
            raise invalid("echo with logprobs is not supported with stream", "echo")
        scored = request.logprobs if request.echo else None
        if request.echo and request.max_tokens == 0:
            # Nothing is generated; the prompt that is given back is computed all the same.
            scored = scored or 0
        return {
            "logprobs": request.logprobs,
            "prompt_logprobs": request.prompt_logprobs if scored is None else max(scored, request.prompt_logprobs or 0),
        }

    def ticket(self, request: CompletionRequest, prompts: Sequence[ReadPrompt]) -> CompletionTicket:
        echoed = [EchoedPrompt(each.echoed, each.first_token, list(each.offsets)) for each in prompts]
        return CompletionTicket(request.logprobs, request.prompt_logprobs is not None, echoed if request.echo else None)

    def answer(self, ticket: CompletionTicket, head: Head, outcome: Generated) -> Completion:
        choices = []
        for place in range(len(outcome.continuations) // outcome.n):
            packed = outcome.prompt_logprobs.get(place)
            # Convert once for all continuations of a prompt: both can be many.
            positions = self.prompt_positions(packed) if packed else []
            prompt_scores = prompt_logprobs(positions) if packed and ticket.tells_prompt_scores else UNSET
            prompt = EchoedPrompt("", "", []) if ticket.echoed is None else ticket.echoed[place]
            first = place * outcome.n
            for index, each in enumerate(outcome.continuations[first : first + outcome.n], first):
                logprobs = _logprobs(ticket, prompt, [] if ticket.echoed is None else positions, each)
                choices.append(
                    CompletionChoice(
                        index, prompt.text + each.text, each.finish_reason, logprobs, each.stop_reason, prompt_scores
                    )
                )
        return Completion(head.id, "text_completion", head.created, head.model, choices, usage(outcome))


def _logprobs(
    ticket: CompletionTicket, prompt: EchoedPrompt, positions: Sequence[PositionScores | None], each: Continuation
) -> CompletionLogprobs | None:
    if ticket.num_logprobs is None:
        return None
    tokens = each.scored_tokens()
    offsets = [*prompt.offsets, *(len(prompt.text) + token.offset for token in tokens)]
    scores = [*positions, *(token.scores for token in tokens)]
    return completion_logprobs(scores, ticket.num_logprobs, offsets, prompt.first_token)


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
