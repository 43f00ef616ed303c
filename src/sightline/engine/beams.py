"""Beam search by ordinary requests: each beam is a prompt, continued by one token with log probabilities.

    prompt ─ one token, the likeliest 2w ─▶ w beams ─ one token each ─▶ … ─▶ the best w of all that ended or are left

A beam shares the pages of its beginning through the prefix cache. Knows neither steps nor threads: the caller runs the
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import TypeAlias

from sightline.core.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from sightline.core.request import FinishReason, RequestOutput, SamplingParams
from sightline.text.tokenizers.tokenizer import Tokenizer

Continue: TypeAlias = Callable[[Sequence[Sequence[int]], SamplingParams], Sequence[RequestOutput]]
"""Continues each of some prompts, in order."""


@dataclass(frozen=True)
class _Beam:
    tokens: tuple[int, ...]
    logprob: float
    end_token: int | None = None


@dataclass
class _Search:
    """The search for one prompt."""

    running: list[_Beam]
    num_left: int
    """Tokens that may still be generated."""
    ended: list[_Beam] = field(default_factory=list)
    error: str | None = None

    @property
    def is_over(self) -> bool:
        return self.num_left == 0 or not self.running


class BeamSearch:
    """Searches for several prompts at a time."""

    def __init__(
        self,
        params: BeamSearchParams,
        end_tokens: frozenset[int],
        max_model_len: int,
        tokenizer: Tokenizer | None,
        continued: Continue,
    ) -> None:
        """`end_tokens` are the model's; `continued` runs requests."""
        self._params = params
        self._end_tokens = frozenset() if params.ignore_eos else end_tokens
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._continued = continued
        self._one_token = SamplingParams(
            temperature=0.0, max_tokens=1, min_tokens=0, logprobs=2 * params.beam_width, detokenize=False
        )

    def run(self, prompts: Sequence[Sequence[int]]) -> list[BeamSearchOutput]:
        """A result for each prompt, in order."""
        searches = [self._begin(tuple(prompt)) for prompt in prompts]
        while active := [search for search in searches if not search.is_over]:
            beams = [beam.tokens for search in active for beam in search.running]
            outputs = iter(self._continued(beams, self._one_token))
            for search in active:
                self._advance(search, [next(outputs) for _ in search.running])
        return [self._result(search) for search in searches]

    def _begin(self, prompt: tuple[int, ...]) -> _Search:
        # A prompt without room has one token left all the same: its request is refused, with the reason.
        room = max(1, self._max_model_len - len(prompt))
        return _Search([_Beam(prompt, 0.0)], min(self._params.max_tokens, room))

    def _advance(self, search: _Search, outputs: Sequence[RequestOutput]) -> None:
        """Replaces the running beams by the best of their continuations."""
        search.error = next((output.error for output in outputs if output.error is not None), None)
        grown: list[_Beam] = []
        for beam, output in zip(search.running, outputs, strict=True):
            for position in output.outputs[0].logprobs or ():
                for token, entry in position.items():
                    logprob = beam.logprob + entry.logprob
                    if token in self._end_tokens:
                        search.ended.append(_Beam(beam.tokens, logprob, token))
                    else:
                        grown.append(_Beam((*beam.tokens, token), logprob))
        search.num_left -= 1
        search.running = [] if search.error is not None else self._best(grown)

    def _best(self, beams: Sequence[_Beam]) -> list[_Beam]:
        return nlargest(self._params.beam_width, beams, key=self._score)

    def _score(self, beam: _Beam) -> float:
        return float(beam.logprob / len(beam.tokens) ** self._params.length_penalty)

    def _result(self, search: _Search) -> BeamSearchOutput:
        if search.error is not None:
            return BeamSearchOutput((), search.error)
        return BeamSearchOutput(tuple(map(self._sequence, self._best([*search.ended, *search.running]))))

    def _sequence(self, beam: _Beam) -> BeamSearchSequence:
        reason = FinishReason.LENGTH if beam.end_token is None else FinishReason.STOP
        text = None if self._tokenizer is None else self._tokenizer.decode(beam.tokens)
        return BeamSearchSequence(beam.tokens, text, beam.logprob, reason.value, beam.end_token)
