"""What a generating step gives its rows: a sampled token each, and the log probabilities that were asked for.

A row with guesses gets a token behind each of them too, chosen as if all guesses up to there were right. Guesses are
kept up to the first that is not what was chosen:

    known   the quick │ guessed   brown  fox  ran
    chosen        brown             fox jumps  away
                  └────── kept ─────────┘

Of a tree of guesses, one path is kept, from the last known token down.

A choice depends on its place, its seed and the tokens before it alone, so what is kept is what would have been chosen
one by one, also at temperatures above 0.

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
from sightline.runner.sampling.sampler import BestTokens, RowSampling, choose
from sightline.scheduler.sequence import RowResult, ScheduledRow, SequenceState
from sightline.speculative.verification import right_guesses


class SampledTokens(NamedTuple):
    """Sampled tokens, on the host."""

    tokens: list[int]
    finite: list[bool]
    """False if the row's logits held a NaN or an infinity: its token means nothing."""
    scores: Sequence[Sequence[float]] = ()
    """[num_scored]: see `score_tokens`."""


class _ScoredSpan(NamedTuple):
    """The scores of one row: first those of its prompt, then those of its chosen tokens if it asked for them."""

    start: int
    num_prompt: int


_NO_SPAN = _ScoredSpan(0, 0)


@dataclass(frozen=True, eq=False)
class Sampled:
    """The tokens that a step chooses for the rows that complete."""

    rows: Sequence[ScheduledRow]
    lives: Sequence[LiveSequence]
    places: Mapping[SequenceState, int]
    """Where the first choice of each sequence is; those behind its guesses follow."""
    next_tokens: Tensor
    spans: Mapping[int, _ScoredSpan]
    """The scores of each row that has some, by the row's index."""
    scores_shape: tuple[int, int]
    arrival: Arrival
    """`Chosen.packed`; with scores, a vector of it and the bits of the scores."""

    def read(self) -> SampledTokens:
        """Waits for the device."""
        values, count = self.arrival.wait().view(-1), self.next_tokens.shape[0]
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
        known_len = row.seq_len - len(row.drafts)
        path = right_guesses(row, self.read.tokens[place : place + 1 + len(row.drafts)]) if row.drafts else ()
        # The choice behind the last known token, and those behind the guesses that are right.
        kept = (0, *(1 + guess for guess in path))
        finite = [self.read.finite[place + each] for each in kept]
        if not all(finite):
            live.fail_at(known_len + finite.index(False))
        elif live.error is None and (num_best := live.params.logprobs) is not None:
            span = step.spans[index]
            first = span.start + span.num_prompt
            live.keep_logprobs(row, [read_scores(self.read.scores[first + each], num_best) for each in kept])
        tokens = tuple(self.read.tokens[place + each] for each in kept)
        return RowResult(known_len + len(path), tokens, None if row.parents is None else tuple(path))


def sample(
    best: BestTokens, rows: Sequence[ScheduledRow], lives: Sequence[LiveSequence], inputs: Tensor, logits: Tensor
) -> Sampled:
    """Chooses the next token of each row that completes and may have one more, and those behind its guesses.

    `inputs` are the step's tokens [num_tokens] int64, `logits` [num_logits, vocab_size] fp32 those of all rows that
    need some, in order. `best` has the device's kernels. Does not wait for a GPU.
    """
    token_ends = list(accumulate([row.num_tokens for row in rows]))
    completing = [
        index
        for index, row in enumerate(rows)
        if row.completes and row.context_len + row.num_tokens < row.sequence.max_expected
    ]
    sampling: list[RowSampling] = []
    wanted: list[int] = []
    places: dict[SequenceState, int] = {}
    asked: dict[int, int] = {}
    ends = list(accumulate([row.num_logits for row in rows]))
    for index in completing:
        row, live = rows[index], lives[index]
        if live.params.logprobs is not None:
            asked[index] = len(sampling)
        places[row.sequence] = len(sampling)
        wanted += range(ends[index] - 1 - len(row.drafts), ends[index])
        if live.greedy is not None:
            sampling += [live.greedy] * (1 + len(row.drafts))
        else:
            sampling.append(live.sampling(row, token_ends[index] - 1))
            sampling += live.sampling_behind_drafts(row)
    chosen_logits = logits
    if len(wanted) < logits.shape[0]:
        [chosen_rows] = moved([wanted], logits.device)
        chosen_logits = logits.index_select(0, chosen_rows)
    chosen = choose(chosen_logits, sampling, inputs, best)
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

    `asked` has the rows that want their chosen tokens scored, and the place of the first of them in `chosen`.
    """
    spans: dict[int, _ScoredSpan] = {}
    at: list[int] = []
    tokens: list[int] = []
    generated: list[int] = []
    sources: list[int] = []
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
            count = 1 + len(row.drafts)
            generated += range(len(at), len(at) + count)
            sources += range(asked[index], asked[index] + count)
            at += range(end - count, end)
            tokens += [0] * count
            most = max(most, live.params.logprobs or 0)
    where, named, filled, taken = moved([at, tokens, generated, sources], logits.device)
    named = named.index_copy(0, filled, chosen.index_select(0, taken))
    some = logits if len(at) == logits.shape[0] else logits.index_select(0, where)
    return spans, score_tokens(some, named, most)
