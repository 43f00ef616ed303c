"""What a generating step gives its rows: a sampled token each, and the log probabilities that were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from sightline.engine.live import LiveSequence
from sightline.runner.sampling.logprobs import TokenLogprobs, token_logprobs
from sightline.runner.sampling.sampler import Chosen, RowSampling, choose
from sightline.scheduler.sequence import RowResult, ScheduledRow, SequenceState


class SampledTokens(NamedTuple):
    """Sampled tokens, on the host."""

    tokens: list[int]
    finite: list[bool]
    """False if the row's logits held a NaN or an infinity: its token means nothing."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """The tokens that a step chooses for the rows that complete, on the device."""

    rows: Sequence[ScheduledRow]
    lives: Sequence[LiveSequence]
    logits: Tensor
    """[num_logits, vocab_size] fp32, of all rows that need some, in order."""
    places: Mapping[SequenceState, int]
    chosen_logits: Tensor
    """[num_chosen, vocab_size] fp32."""
    sampling: tuple[RowSampling, ...]
    """[num_chosen]."""
    chosen: Chosen

    @property
    def next_tokens(self) -> Tensor:
        return self.chosen.tokens

    def read(self) -> SampledTokens:
        """Waits for the device."""
        return SampledTokens(self.chosen.tokens.tolist(), self.chosen.finite.tolist())

    def results(self) -> _Results:
        return _Results(self, self.read(), list(accumulate(row.num_logits for row in self.rows)))

    def logprobs(self, place: int, token: int) -> TokenLogprobs | None:
        """Log probabilities of a chosen token from the raw logits, if its row asked for them."""
        num_best = self.sampling[place].params.logprobs
        if num_best is None:
            return None
        [entry] = token_logprobs(self.chosen_logits[place : place + 1], [token], [num_best])
        return entry


class _Results(NamedTuple):
    step: Sampled
    read: SampledTokens
    ends: list[int]
    """[num_rows]: end of each row's logits."""

    def take(self, index: int) -> RowResult:
        step, row, live = self.step, self.step.rows[index], self.step.lives[index]
        if row.scores_prompt:
            live.keep_prompt_logprobs(row, step.logits[self.ends[index] - row.num_logits : self.ends[index]])
        place = step.places.get(row.sequence)
        if place is None:
            return RowResult(row.seq_len)
        token = self.read.tokens[place]
        if not self.read.finite[place]:
            live.fail_at(row.seq_len)
        elif live.error is None:
            live.keep_logprobs(row, step.logprobs(place, token))
        return RowResult(row.seq_len, (token,))


def sample(rows: Sequence[ScheduledRow], lives: Sequence[LiveSequence], logits: Tensor) -> Sampled:
    """Chooses the next token of each row that completes."""
    completing = [
        (row, live, end)
        for row, live, end in zip(rows, lives, accumulate([row.num_logits for row in rows]), strict=True)
        if row.completes
    ]
    chosen_logits = logits
    if len(completing) < logits.shape[0]:
        chosen_logits = logits[[end - 1 for _, _, end in completing]]
    sampling = tuple([live.sampling(row) for row, live, _ in completing])
    places = {row.sequence: place for place, (row, _, _) in enumerate(completing)}
    return Sampled(rows, lives, logits, places, chosen_logits, sampling, choose(chosen_logits, sampling))
