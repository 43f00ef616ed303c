"""Tokens that are kept of guesses have the distribution of plain sampling: a chi-squared test over 20,000 of them.

The model is a table: the parity of a token decides the logits behind it. What a token should be is computed here, from
the table alone. The test is worth something because it fails if a wrong guess is kept in 2 of 100 cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch

from sightline import SamplingParams
from sightline.core.request import Terms
from sightline.engine.intake import Intake
from sightline.engine.live import LiveSequence, start
from sightline.engine.sampled import sample
from sightline.kernels.greedy import best_tokens
from sightline.models.loading.generation import GenerationDefaults
from sightline.scheduler.sequence import Draft, RowResult, ScheduledRow
from sightline.scheduler.trees import merged

VOCAB = 6
LOGITS = torch.tensor([[2.0, 1.4, 0.9, 0.3, -0.4, -1.2], [-0.9, 0.2, 1.8, -0.3, 1.1, 0.6]])
"""Behind even tokens, and behind odd ones."""
LIKELIEST, LEAST_LIKELY = LOGITS.argmax(-1).tolist(), LOGITS.argmin(-1).tolist()
NUM_SAMPLES = 20_000
NUM_ROWS = 100
PASSES = 1e-3
"""A right distribution gives a smaller p-value once in a thousand runs. Runs do not differ: seeds are fixed."""
Change = Callable[[ScheduledRow, RowResult], RowResult]


@dataclass(frozen=True)
class Kind:
    """Liars of one honesty, and how tokens are chosen."""

    num_branches: int
    honesty: float
    temperature: float
    top_p: float

    def probabilities(self) -> torch.Tensor:
        """[2, VOCAB] float64: how likely each token is behind even and odd ones."""
        found = torch.softmax(LOGITS.double() / self.temperature, dim=-1)
        ordered, order = found.sort(dim=-1, descending=True)
        # A token is kept if those that are likelier do not reach top_p.
        kept = ordered.where(ordered.cumsum(-1) - ordered < self.top_p, 0.0)
        kept = torch.zeros_like(kept).scatter(-1, order, kept)
        return kept / kept.sum(-1, keepdim=True)

    def draft(self, token: int, random: Random) -> Draft:
        """Continuations of up to two tokens: each guesses the likeliest one, or lies with the least likely."""

        def continuation(before: int) -> list[int]:
            tokens = [before]
            for _ in range(random.randint(0, 2)):
                likely = LIKELIEST if random.random() < self.honesty else LEAST_LIKELY
                tokens.append(likely[tokens[-1] % 2])
            return tokens[1:]

        if self.num_branches == 1:
            return Draft(tuple(continuation(token)))
        return merged([continuation(token) for _ in range(self.num_branches)], 4)


KINDS = [
    Kind(num_branches, honesty, temperature, top_p)
    for num_branches, honesty in ((1, 0.2), (1, 0.7), (3, 0.2), (3, 0.7))
    for temperature, top_p in ((1.0, 1.0), (0.7, 1.0), (0.7, 0.9))
]


def lives(kind: Kind) -> list[LiveSequence]:
    intake = Intake(
        vocab_size=VOCAB,
        max_model_len=1 << 20,
        generation=GenerationDefaults(frozenset()),
        tokenizer=None,
        seed=0,
    )
    found = list[LiveSequence]()
    # Of its own for each kind: with equal seeds all kinds would sample the same tokens.
    first = KINDS.index(kind) * NUM_ROWS
    for seed in range(first, first + NUM_ROWS):
        params = SamplingParams(temperature=kind.temperature, top_p=kind.top_p, seed=seed, max_tokens=1 << 16)
        found += start(*intake.request([seed % VOCAB], params, None, Terms(), 0.0), None)
    return found


def generate(kind: Kind, num_tokens: int, change: Change | None) -> list[list[int]]:
    """Samples so many tokens in steps of many rows; with guesses, of which `change` spoils the results."""
    some, random, count = lives(kind), Random(5), 0
    while count < num_tokens:
        rows = []
        for live in some:
            sequence, draft = live.sequence, Draft()
            if change is not None:
                draft = kind.draft(live.sequence.tokens[-1], random)
            size = 1 + len(draft.tokens)
            rows.append(ScheduledRow(sequence, 1, len(sequence.tokens) - 1, size, True, False, *draft))
        inputs = torch.tensor([token for row in rows for token in (row.sequence.tokens[-1], *row.drafts)])
        results = sample(best_tokens, rows, some, inputs, LOGITS[inputs % 2]).results()
        for index, (row, live) in enumerate(zip(rows, some, strict=True)):
            result = results.take(index)
            if change is not None:
                result = change(row, result)
            live.sequence.tokens += result.tokens
            count += len(result.tokens)
    return [live.sequence.tokens for live in some]


def chi_squared(kind: Kind, texts: Sequence[Sequence[int]]) -> tuple[float, int]:
    """The chi-squared statistic of how often each token follows even and odd ones, and its degrees of freedom."""
    counts = torch.zeros(2, VOCAB, dtype=torch.float64)
    for text in texts:
        before, behind = torch.tensor(text[:-1]), torch.tensor(text[1:])
        counts.index_put_((before % 2, behind), torch.ones(len(behind), dtype=torch.float64), accumulate=True)
    expected = kind.probabilities() * counts.sum(-1, keepdim=True)
    possible = expected > 0.0
    if counts[~possible].any():
        return math.inf, 1
    statistic = ((counts - expected).square() / expected)[possible].sum()
    return float(statistic), int(possible.sum()) - 2


def honest(row: ScheduledRow, result: RowResult) -> RowResult:
    del row
    return result


def p_value(kinds: Sequence[Kind], change: Change) -> float:
    """How likely a deviation like that of the samples is by chance. The statistics of all kinds add up."""
    statistic, freedom = 0.0, 0
    for kind in kinds:
        found = chi_squared(kind, generate(kind, NUM_SAMPLES // len(kinds), change))
        statistic, freedom = statistic + found[0], freedom + found[1]
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(min(statistic, 1e6) / 2.0)))


def test_kept_tokens_have_the_distribution_of_plain_sampling() -> None:
    assert p_value(KINDS, honest) > PASSES


def test_kept_tokens_are_those_of_plain_sampling() -> None:
    """Equal seeds give equal tokens, which is more than an equal distribution."""
    for kind in KINDS[::2]:
        plain, guessed = (generate(kind, 500, change) for change in (None, honest))
        for one, other in zip(plain, guessed, strict=True):
            shorter = min(len(one), len(other))
            assert one[:shorter] == other[:shorter]


def test_a_bias_of_two_in_a_hundred_is_seen() -> None:
    random = Random(9)

    def biased(row: ScheduledRow, result: RowResult) -> RowResult:
        """Keeps a guess that is wrong in 2 of 100 cases."""
        path = range(len(result.tokens) - 1) if result.path is None else result.path
        last = path[-1] if path else -1
        wrong = [token for parent, token in zip(row.draft_parents, row.drafts, strict=True) if parent == last]
        if not wrong or random.random() >= 0.02:
            return result
        return RowResult(result.seq_len, (*result.tokens[:-1], wrong[0]), result.path)

    # With top_p, a single token that must not come would do.
    assert p_value([kind for kind in KINDS if kind.top_p == 1.0], biased) < PASSES / 1000
