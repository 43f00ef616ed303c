"""A token follows from its row's logits, parameters, seed and place, with the probabilities that those define."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sightline.core.request import MAX_SEED, EffectiveParams
from sightline.core.token_lists import LogitBias
from sightline.runner.sampling.adjust import TokenAdjustment
from sightline.runner.sampling.draw import truncated_probabilities
from sightline.runner.sampling.sampler import RowSampling
from support.distributions import SMALLEST_P_VALUE, p_value
from support.sampling import sample

DRAWS = 6000
PLAIN = EffectiveParams(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    seed=1234,
    max_tokens=16,
    stop_token_ids=frozenset(),
    skip_special_tokens=True,
)
GREEDY = replace(PLAIN, temperature=0.0)
LOGITS = [1.3, -0.4, 2.2, 0.0, 1.9, -1.2, 0.7, 2.1, -1.1, 0.2, 1.0, -0.2]
SETTINGS: dict[str, EffectiveParams] = {
    "plain": PLAIN,
    "hot": replace(PLAIN, temperature=2.5),
    "cold": replace(PLAIN, temperature=0.6),
    "top_k": replace(PLAIN, top_k=5),
    "top_p": replace(PLAIN, top_p=0.7),
    "min_p": replace(PLAIN, min_p=0.2),
    "top_p of what top_k left": replace(PLAIN, top_k=4, top_p=0.6),
    "all": replace(PLAIN, temperature=1.7, top_k=8, top_p=0.9, min_p=0.25),
}
PROMPT, OUTPUT = (2, 4, 4, 6, 8), (4, 7, 7, 7, 10)
"""What the sequence holds where a penalty looks."""
ADJUSTED: dict[str, EffectiveParams] = {
    "repetition": replace(PLAIN, repetition_penalty=1.6),
    "repetition below one": replace(PLAIN, repetition_penalty=0.7),
    "presence": replace(PLAIN, presence_penalty=1.2),
    "frequency": replace(PLAIN, frequency_penalty=0.6),
    "negative frequency": replace(PLAIN, frequency_penalty=-0.3),
    "bias": replace(PLAIN, logit_bias=LogitBias([(1, 2.0), (2, -1.5), (5, 3.0)])),
    "min_tokens": replace(PLAIN, min_tokens=9, eos_token_ids=frozenset({2}), stop_token_ids=frozenset({0})),
    "penalties": replace(PLAIN, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.4),
    "everything": replace(
        PLAIN,
        temperature=1.3,
        top_k=9,
        top_p=0.95,
        min_p=0.1,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias=LogitBias([(3, 1.5), (7, 1.0)]),
        min_tokens=9,
        eos_token_ids=frozenset({4}),
    ),
}


def adjusted_logits(logits: Sequence[float], params: EffectiveParams) -> list[float]:
    """Bias, penalties and forbidden ends, token by token."""
    bias, times = dict(params.logit_bias), Counter(OUTPUT)
    changed = []
    for token, logit in enumerate(logits):
        value = logit + bias.get(token, 0.0)
        if token in PROMPT or token in OUTPUT:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.presence_penalty * (times[token] > 0) + params.frequency_penalty * times[token]
        ends = token in params.eos_token_ids | params.stop_token_ids
        changed.append(-math.inf if ends and len(OUTPUT) < params.min_tokens else value)
    return changed


def reference(logits: Sequence[float], params: EffectiveParams) -> dict[int, float]:
    """The probability of each token that can be chosen: one truncation after the other, each on what is left."""
    weights = {token: math.exp(logit / params.temperature) for token, logit in enumerate(logits)}
    ranked = sorted(weights, key=lambda token: -weights[token])
    if params.top_k:
        ranked = ranked[: params.top_k]
    total = sum(weights[token] for token in ranked)
    kept: list[int] = []
    mass = 0.0
    for token in ranked:
        if kept and mass / total >= params.top_p:
            break
        kept.append(token)
        mass += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p * weights[kept[0]]]
    mass = sum(weights[token] for token in kept)
    return {token: weights[token] / mass for token in kept}


def draw(logits: Sequence[float], params: EffectiveParams, count: int) -> Counter[int]:
    rows = [RowSampling(params, place) for place in range(count)]
    return Counter(sample(torch.tensor(logits).expand(count, -1), rows).tokens)


def test_greedy_takes_the_largest_logit_whatever_else_is_set() -> None:
    logits = torch.tensor([LOGITS, LOGITS[::-1], [0.0] * 11 + [1e-6]])
    hostile = replace(GREEDY, top_k=1, top_p=0.1, min_p=1.0)
    assert sample(logits, [RowSampling(hostile, place) for place in range(3)]).tokens == (2, 9, 11)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, 12), []).tokens == ()


@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS.keys())
def test_tokens_come_as_often_as_their_probabilities_say(params: EffectiveParams) -> None:
    expected = {token: share * DRAWS for token, share in reference(LOGITS, params).items()}
    counts = draw(LOGITS, params, DRAWS)
    assert counts.keys() <= expected.keys(), "a token that was cut off was drawn"
    assert p_value(counts, expected) > SMALLEST_P_VALUE


@pytest.mark.parametrize("params", ADJUSTED.values(), ids=ADJUSTED.keys())
def test_adjusted_tokens_come_as_often_as_their_probabilities_say(params: EffectiveParams) -> None:
    shares = reference(adjusted_logits(LOGITS, params), params)
    expected = {token: share * DRAWS for token, share in shares.items() if share > 0}
    adjustment = TokenAdjustment(params, PROMPT)
    adjustment.count(OUTPUT)
    rows = [RowSampling(replace(params, seed=seed), len(OUTPUT), adjustment) for seed in range(DRAWS)]
    counts = Counter(sample(torch.tensor(LOGITS).repeat(DRAWS, 1), rows).tokens)
    assert counts.keys() <= expected.keys(), "a token that was cut off was drawn"
    assert p_value(counts, expected) > SMALLEST_P_VALUE
    unchanged = {token: share * DRAWS for token, share in reference(LOGITS, params).items()}
    assert counts.keys() - unchanged.keys() or p_value(counts, unchanged) < SMALLEST_P_VALUE, "it changes nothing"


def test_the_settings_under_test_differ_and_the_measure_tells_them_apart() -> None:
    supports = {name: tuple(sorted(reference(LOGITS, params))) for name, params in SETTINGS.items()}
    truncating = [support for name, support in supports.items() if name not in ("plain", "hot", "cold")]
    assert len(set(truncating)) == len(truncating)
    counts = draw(LOGITS, PLAIN, DRAWS)
    warmer = reference(LOGITS, replace(PLAIN, temperature=1.15))
    assert p_value(counts, {token: share * DRAWS for token, share in warmer.items()}) < SMALLEST_P_VALUE


def test_other_seeds_draw_from_the_same_distribution() -> None:
    rows = [RowSampling(replace(PLAIN, seed=seed), 7) for seed in range(DRAWS)]
    counts = Counter(sample(torch.tensor(LOGITS).expand(DRAWS, -1), rows).tokens)
    expected = {token: share * DRAWS for token, share in reference(LOGITS, PLAIN).items()}
    assert p_value(counts, expected) > SMALLEST_P_VALUE


def kept_tokens(logits: Tensor, params: EffectiveParams) -> list[set[int]]:
    tokens, probability = truncated_probabilities(logits, [params] * logits.shape[0])
    return [set(row[kept > 0].tolist()) for row, kept in zip(tokens, probability, strict=True)]


def transformers_scores(logits: Tensor, params: EffectiveParams) -> Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    scores: Tensor = warpers(torch.zeros(logits.shape[0], 1, dtype=torch.int64), logits)
    return scores


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.5, 0.7, 1.0, 1.8]),
    top_k=st.sampled_from([0, 1, 3, 20, 200]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_what_is_kept_is_what_transformers_keeps(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(4, 80, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    params = replace(PLAIN, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = transformers_scores(logits, params)
    assert kept_tokens(logits, params) == [set(row.isfinite().nonzero().squeeze(1).tolist()) for row in scores]
    tokens, probability = truncated_probabilities(logits, [params] * 4)
    normalised = torch.zeros_like(logits).scatter(1, tokens, probability / probability.sum(dim=-1, keepdim=True))
    torch.testing.assert_close(normalised, scores.softmax(dim=-1))


def test_a_top_p_of_one_keeps_every_token() -> None:
    logits = torch.linspace(0.0, -60.0, 80, dtype=torch.float64).unsqueeze(0)
    assert kept_tokens(logits, PLAIN) == [set(range(80))]


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    logits = torch.tensor([LOGITS], dtype=torch.float64).expand(8, -1)
    tokens, probability = truncated_probabilities(logits, list(SETTINGS.values()))
    for row, params in enumerate(SETTINGS.values()):
        kept = {
            int(token): float(share / probability[row].sum())
            for token, share in zip(tokens[row], probability[row], strict=True)
            if share > 0
        }
        assert kept == pytest.approx(reference(LOGITS, params), rel=1e-6)


def test_the_most_likely_token_survives_every_truncation() -> None:
    params = replace(PLAIN, top_k=1, top_p=5e-324, min_p=1.0)
    assert draw(LOGITS, params, 50) == {2: 50}
    assert draw(LOGITS, replace(PLAIN, top_p=5e-324), 50) == {2: 50}


def test_a_vocabulary_smaller_than_top_k_is_kept_whole() -> None:
    assert draw(LOGITS, replace(PLAIN, top_k=2**31 - 1), 300) == draw(LOGITS, PLAIN, 300)


row_samplings = st.builds(
    lambda params, seed, place: RowSampling(replace(params, seed=seed), place),
    st.sampled_from([GREEDY, *SETTINGS.values()]),
    st.integers(0, MAX_SEED),
    st.integers(0, 100_000),
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(row_samplings, min_size=1, max_size=8), seed=st.integers(0, 99), data=st.data())
def test_a_rows_token_is_the_same_alone_and_in_any_batch_in_any_order(
    rows: list[RowSampling], seed: int, data: st.DataObject
) -> None:
    logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(seed))
    alone = [sample(logits[index : index + 1], [row]).tokens[0] for index, row in enumerate(rows)]
    order = data.draw(st.permutations(range(len(rows))))
    assert list(sample(logits[order], [rows[index] for index in order]).tokens) == [alone[index] for index in order]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from([PLAIN, GREEDY, *ADJUSTED.values()]), st.integers(0, 99)), min_size=2),
    seed=st.integers(0, 99),
)
def test_an_adjusted_rows_token_is_the_same_alone_and_in_a_batch(
    rows: list[tuple[EffectiveParams, int]], seed: int
) -> None:
    logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(seed))
    made = []
    for params, row_seed in rows:
        adjustment = TokenAdjustment(params, PROMPT) if params.adjusts_logits else None
        if adjustment is not None:
            adjustment.count(OUTPUT)
        made.append(RowSampling(replace(params, seed=row_seed), len(OUTPUT), adjustment))
    alone = tuple(sample(logits[index : index + 1], [row]).tokens[0] for index, row in enumerate(made))
    assert sample(logits, made).tokens == alone


def test_another_seed_or_another_place_draws_anew() -> None:
    flat = [0.0] * 1000
    by_place = draw(flat, PLAIN, 100)
    by_seed = Counter(
        sample(torch.tensor([flat]), [RowSampling(replace(PLAIN, seed=seed), 0)]).tokens[0] for seed in range(100)
    )
    assert len(by_place) > 80
    assert len(by_seed) > 80


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [GREEDY, PLAIN], ids=["greedy", "drawn"])
def test_a_row_that_is_not_finite_is_flagged_and_changes_no_other(bad: float, params: EffectiveParams) -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(3))
    rows = [RowSampling(params, place) for place in range(5)]
    expected = sample(logits, rows)
    assert expected.finite == (True,) * 5
    logits[1, 17] = logits[3, 0] = bad
    got = sample(logits, rows)
    assert got.finite == (True, False, True, False, True)
    assert [got.tokens[row] for row in (0, 2, 4)] == [expected.tokens[row] for row in (0, 2, 4)]


def test_a_batch_of_nothing_but_broken_rows_is_flagged() -> None:
    assert sample(torch.full((2, 5), torch.nan), [RowSampling(PLAIN, 0)] * 2).finite == (False, False)


@pytest.mark.parametrize("logits", [[3e38, -3e38, 0.0], [1e-40, 0.0, -1e-40], [-3e38, -3e38, -3e38]])
def test_extreme_but_finite_logits_draw_a_token(logits: list[float]) -> None:
    assert draw(logits, PLAIN, 20).keys() <= {0, 1, 2}
    assert draw(logits, replace(PLAIN, temperature=1e-4), 20).keys() <= {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-307, 5e-324])
def test_the_smallest_temperatures_are_greedy_and_disturb_no_other_row(temperature: float) -> None:
    rows = [RowSampling(replace(PLAIN, temperature=temperature), 0), RowSampling(PLAIN, 1)]
    logits = torch.tensor([[1.0, 50.0, 10.0], [2.0, 1.0, 0.0]])
    assert sample(logits, rows).tokens == (1, sample(logits[1:], rows[1:]).tokens[0])
