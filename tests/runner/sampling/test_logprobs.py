"""Log probabilities are those of the raw logits, whatever sampling does to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.core.request import EffectiveParams
from sightline.core.token_lists import LogitBias
from sightline.runner.sampling.adjust import TokenAdjustment
from sightline.runner.sampling.logprobs import are_finite, read_scores, score_tokens
from sightline.runner.sampling.sampler import RowSampling
from support.sampling import sample

PLAIN = EffectiveParams(1.0, 1.0, 0, 0.0, 5, 16, frozenset(), True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 29), st.integers(0, 20)), max_size=6), st.integers(0, 99))
def test_they_are_the_log_softmax_with_its_ranks(rows: list[tuple[int, int]], seed: int) -> None:
    logits = torch.randn(len(rows), 30, generator=torch.Generator().manual_seed(seed)) * 4
    most = max((count for _, count in rows), default=0)
    scores = score_tokens(logits, torch.tensor([token for token, _ in rows], dtype=torch.int64), most).tolist()
    entries = [read_scores(each, count) for each, (_, count) in zip(scores, rows, strict=True)]
    expected = logits.log_softmax(-1)
    order = logits.argsort(dim=-1, descending=True)
    assert len(entries) == len(rows)
    for row, ((token, count), entry) in enumerate(zip(rows, entries, strict=True)):
        assert entry.tokens == (token, *order[row, :count].tolist())
        assert entry.ranks == (order[row].tolist().index(token) + 1, *range(1, count + 1))
        assert entry.logprobs == pytest.approx([float(expected[row, named]) for named in entry.tokens], abs=1e-5)


def test_more_than_the_vocabulary_is_the_vocabulary_and_equals_share_the_last_rank() -> None:
    [scores] = score_tokens(torch.zeros(1, 4), torch.tensor([2]), 20)
    entry = read_scores(scores.tolist(), 20)
    assert sorted(entry.tokens[1:]) == [0, 1, 2, 3]
    assert entry.ranks == (4, 1, 2, 3, 4)


def test_nothing_that_sampling_changes_changes_them_and_only_rows_that_ask_have_them() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    shaped = replace(
        PLAIN, temperature=0.3, top_k=2, repetition_penalty=2.0, logit_bias=LogitBias([(4, 9.0)]), logprobs=3, seed=9
    )
    rows = [
        RowSampling(replace(PLAIN, logprobs=0), 0),
        RowSampling(PLAIN, 0),
        RowSampling(shaped, 0, TokenAdjustment(shaped, [4, 5])),
    ]
    sampled = sample(logits, rows)
    assert {row: len(entry.tokens) for row, entry in sampled.logprobs.items()} == {0: 1, 2: 4}
    expected = logits.log_softmax(-1)
    for row in (0, 2):
        entry = sampled.logprobs[row]
        assert entry.tokens[0] == sampled.tokens[row]
        assert entry.logprobs == pytest.approx([float(expected[row, token]) for token in entry.tokens], abs=1e-5)


def test_a_row_that_is_not_finite_has_none() -> None:
    logits = torch.zeros(2, 5)
    logits[0, 1] = torch.nan
    sampled = sample(logits, [RowSampling(replace(PLAIN, logprobs=1), 0)] * 2)
    assert sampled.logprobs.keys() == {1}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_scores_tell_which_rows_are_not_finite(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 4] = bad
    assert [are_finite(each) for each in score_tokens(logits, torch.tensor([0, 1, 2]), 2).tolist()] == [
        True,
        False,
        True,
    ]
