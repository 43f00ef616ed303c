"""What a generating step gives its rows: a sampled token each, and the log probabilities that were asked for.

All of it is computed on the device when the step is launched, and comes to the host by one copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.core.lengths import moved
from sightline.core.transfer import Arrival
from sightline.engine.live import LiveSequence
from sightline.runner.sampling.logprobs import read_scores, score_tokens
from sightline.runner.sampling.sampler import BestTokens, choose
from sightline.scheduler.sequence import RowResult, ScheduledRow, SequenceState


class SampledTokens(NamedTuple):
    """Sampled tokens, on the host."""

    tokens: list[int]
    finite: list[bool]
    """False if the row's logits held a NaN or an infinity: its token means nothing."""
    scores: Sequence[Sequence[float]] = ()
    """[num_scored]: see `score_tokens`."""


class _ScoredSpan(NamedTuple):
    """The scores of one row: first those of its prompt, then that of its chosen token if it asked for that."""

    start: int
    num_prompt: int


_NO_SPAN = _ScoredSpan(0, 0)


@dataclass(frozen=True, eq=False)
class Sampled:
    """The tokens that a step chooses for the rows that complete."""

    rows: Sequence[ScheduledRow]
    lives: Sequence[LiveSequence]
    places: Mapping[SequenceState, int]
    next_tokens: Tensor
    spans: Mapping[int, _ScoredSpan]
    """The scores of each row that has some, by the row's index."""
    scores_shape: tuple[int, int]
    arrival: Arrival
    """`Chosen.packed`; with scores, a vector of it and the bits of the scores."""

    def read(self) -> SampledTokens:
        """Waits for the device."""
        values, count = self.arrival.wait().view(-1), len(self.places)
        shaped: Sequence[Sequence[float]] = ()
        if self.spans:
            shaped = values[2 * count :].view(torch.float64).view(self.scores_shape).tolist()
            values = values[: 2 * count]
        numbers = values.tolist()
        return SampledTokens(numbers[:count], [flag == 1 for flag in numbers[count:]], shaped)

    def results(self) -> _Results:
        return _Results(self, self.read())


class _Results(NamedTuple):
    step: Sampled
    read: SampledTokens

    def take(self, index: int) -> RowResult:
        step, row, live = self.step, self.step.rows[index], self.step.lives[index]
        if row.scores_prompt:
            # A prompt of which no token follows has no scores.
            span = step.spans.get(index, _NO_SPAN)
            live.keep_prompt_logprobs(row, self.read.scores[span.start : span.start + span.num_prompt])
        place = step.places.get(row.sequence)
        if place is None:
            return RowResult(row.seq_len)
        if not self.read.finite[place]:
            live.fail_at(row.seq_len)
        elif live.error is None and (num_best := live.params.logprobs) is not None:
            span = step.spans[index]
            live.keep_logprobs(row, read_scores(self.read.scores[span.start + span.num_prompt], num_best))
        return RowResult(row.seq_len, (self.read.tokens[place],))


def sample(
    best: BestTokens, rows: Sequence[ScheduledRow], lives: Sequence[LiveSequence], inputs: Tensor, logits: Tensor
) -> Sampled:
    """Chooses the next token of each row that completes and may have one more.

    `inputs` are the step's tokens [num_tokens] int64, `logits` [num_logits, vocab_size] fp32 those of all rows that
    need some, in order. `best` has the device's kernels. Does not wait for a GPU.
    """
    token_ends = list(accumulate([row.num_tokens for row in rows]))
    completing = [
        index
        for index, row in enumerate(rows)
        if row.completes and row.context_len + row.num_tokens < row.sequence.max_expected
    ]
    chosen_logits = logits
    if len(completing) < logits.shape[0]:
        ends = list(accumulate([row.num_logits for row in rows]))
        [wanted] = moved([[ends[index] - 1 for index in completing]], logits.device)
        chosen_logits = logits.index_select(0, wanted)
    sampling = [
        lives[index].greedy or lives[index].sampling(rows[index], token_ends[index] - 1) for index in completing
    ]
    chosen = choose(chosen_logits, sampling, inputs, best)
    places = {rows[index].sequence: place for place, index in enumerate(completing)}
    asked = {index: place for place, index in enumerate(completing) if sampling[place].params.logprobs is not None}
    spans: dict[int, _ScoredSpan] = {}
    scores_shape, packed, tokens = (0, 0), chosen.packed, chosen.tokens
    if asked or any(row.scores_prompt for row in rows):
        spans, scores = _scored(rows, lives, logits, asked, tokens)
        scores_shape = (scores.shape[0], scores.shape[1])
        packed = torch.cat([packed.view(-1), scores.view(-1).view(torch.int64)])
    return Sampled(rows, lives, places, tokens, spans, scores_shape, Arrival(packed))


def _scored(
    rows: Sequence[ScheduledRow],
    lives: Sequence[LiveSequence],
    logits: Tensor,
    asked: Mapping[int, int],
    chosen: Tensor,
) -> tuple[dict[int, _ScoredSpan], Tensor]:
    """The scores that rows asked for, and which are whose.

    `asked` has the rows that want their chosen token scored, and that token's place in `chosen`.
    """
    spans: dict[int, _ScoredSpan] = {}
    at: list[int] = []
    tokens: list[int] = []
    generated: list[int] = []
    most = 0
    ends = accumulate([row.num_logits for row in rows])
    for index, (row, live, end) in enumerate(zip(rows, lives, ends, strict=True)):
        followers = live.prompt_followers(row) if row.scores_prompt else ()
        if not followers and index not in asked:
            continue
        spans[index] = _ScoredSpan(len(at), len(followers))
        at += range(end - row.num_logits, end - row.num_logits + len(followers))
        tokens += followers
        most = max(most, (live.params.prompt_logprobs or 0) if followers else 0)
        if index in asked:
            generated.append(len(at))
            at.append(end - 1)
            tokens.append(0)
            most = max(most, live.params.logprobs or 0)
    where, named, filled, sources = moved([at, tokens, generated, list(asked.values())], logits.device)
    named = named.index_copy(0, filled, chosen.index_select(0, sources))
    some = logits if len(at) == logits.shape[0] else logits.index_select(0, where)
    return spans, score_tokens(some, named, most)
