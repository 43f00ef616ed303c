"""The race is exact, steady and sorts nothing that it need not: it draws what going through every token draws."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.core.request import EffectiveParams
from sightline.runner.sampling.draw import Choice, draw, truncated_probabilities
from sightline.runner.sampling.noise import noise, noise_keys
from sightline.runner.sampling.nucleus import outside_top_p
from support.case_marks import proofs
from support.distributions import SMALLEST_P_VALUE, p_value
from support.sampling import words_of

VOCAB = 3000
PLAIN = EffectiveParams(1.0, 1.0, 0, 0.0, 5, 16, frozenset(), True)
PEAKED, FLAT = 3.0, 0.3
"""Scales of the logits: a few tokens reach a top-p of 0.9, or most are needed."""
CHANGES: list[dict[str, float]] = [
    {},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 63},
    {"top_k": 64},
    {"top_k": 1023},
    {"top_k": 1024},
    {"top_k": VOCAB - 1},
    {"top_k": VOCAB},
    {"top_k": 2**31 - 1, "top_p": 0.5},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999999},
    {"top_p": 0.9, "temperature": 4.0},
    {"top_p": 0.8, "min_p": 0.3},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.05, "temperature": 0.6},
    {"top_k": 2000, "top_p": 0.99},
]


def random_logits(scale: float, seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def rounded(logits: torch.Tensor) -> torch.Tensor:
    """As bf16 holds them, so that many are equal."""
    return logits.bfloat16().float()


def with_changes(changes: dict[str, float]) -> EffectiveParams:
    return replace(PLAIN, **changes)  # type: ignore[arg-type]


def choices(params: EffectiveParams, count: int, seed: int = 5) -> list[Choice]:
    return [Choice(params, key) for key in noise_keys([seed] * count, range(count)).tolist()]


def race(logits: torch.Tensor, choice: Choice) -> int:
    """The winner among all tokens that sorting everything keeps, each with its noise in full."""
    tokens, probability = truncated_probabilities(logits.double(), [choice.params])
    kept = tokens[0][probability[0] > 0]
    exponential = -torch.log1p(-noise(words_of([choice.key]), kept))
    times = exponential.log() - logits[0, kept].double() / choice.params.temperature
    return int(kept[times.argmin()])


@pytest.mark.parametrize("scale", [PEAKED, *proofs(FLAT)])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_winner_is_the_one_of_a_race_of_every_token(changes: dict[str, float], scale: float) -> None:
    made = choices(with_changes(changes), 60)
    for logits in (random_logits(scale), rounded(random_logits(scale, 1))):
        assert draw(logits.expand(len(made), -1), made) == [race(logits, choice) for choice in made]


@pytest.mark.prove
@pytest.mark.parametrize("scale", [PEAKED, FLAT])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_each_token_comes_as_often_as_its_share_says(changes: dict[str, float], scale: float) -> None:
    """Tokens that are too rare for the test are counted together, by the order of their ids."""
    count, params = 1200, with_changes(changes)
    logits = random_logits(scale)
    tokens, probability = truncated_probabilities(logits.double(), [params])
    share = torch.zeros(VOCAB, dtype=torch.float64).scatter(0, tokens[0], probability[0] / probability.sum())
    drawn = torch.tensor(draw(logits.expand(count, -1), choices(params, count)))
    assert bool((share[drawn] > 0).all()), "a token that was cut off was drawn"
    group = (share.cumsum(0) - share).mul(24).long()
    expected = torch.zeros(24, dtype=torch.float64).scatter_add_(0, group.clamp_(max=23), share) * count
    counts = Counter(group[drawn].tolist())
    likely = {key: float(mean) for key, mean in enumerate(expected) if mean > 8}
    assert sum(likely.values()) > 0.9 * count
    rest = count - sum(likely.values())
    if rest > 8:
        counts[-1] = sum(number for key, number in counts.items() if key not in likely)
        likely[-1] = rest
    assert len(likely) == 1 or p_value(counts, likely) > SMALLEST_P_VALUE


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 30, 500, 2000]),
            st.sampled_from([0.2, 0.9, 1.0]),
            st.sampled_from([0.0, 0.2]),
            st.integers(0, 2**64 - 1),
            st.sampled_from([PEAKED, FLAT]),
        ),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 99),
)
def test_a_row_draws_the_same_alone_and_in_a_batch(rows: list[tuple[int, float, float, int, float]], seed: int) -> None:
    made = [Choice(replace(PLAIN, top_k=top_k, top_p=top_p, min_p=min_p), key) for top_k, top_p, min_p, key, _ in rows]
    logits = rounded(torch.cat([random_logits(scale, seed + place) for place, (*_, scale) in enumerate(rows)]))
    alone = [draw(logits[place : place + 1], [choice])[0] for place, choice in enumerate(made)]
    assert draw(logits, made) == alone


@pytest.mark.parametrize("size", [1, VOCAB, 5 * VOCAB])
def test_how_many_rows_are_worked_on_at_a_time_changes_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(PEAKED, rows=12)
    made = [*choices(PLAIN, 4), *choices(replace(PLAIN, top_p=0.9), 4), *choices(replace(PLAIN, top_k=9), 4)]
    expected = draw(logits, made)
    monkeypatch.setattr("sightline.runner.sampling.draw._BLOCK_SIZE", size)
    assert draw(logits, made) == expected


@pytest.mark.parametrize("reach", [1e-6, 0.5])
@pytest.mark.parametrize("changes", [{}, {"min_p": 0.1}, {"top_p": 0.8}], ids=str)
def test_a_race_in_which_nobody_is_in_time_is_run_by_all(
    changes: dict[str, float], reach: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, made = random_logits(PEAKED, rows=80), choices(with_changes(changes), 80)
    expected = draw(logits, made)
    monkeypatch.setattr("sightline.runner.sampling.draw._REACH", reach)
    assert draw(logits, made) == expected


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"top_k": 2000}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str)
def test_forbidden_tokens_are_never_drawn(changes: dict[str, float]) -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 7], logits[0, 2500] = 1.0, 1.0
    counts = Counter(draw(logits.expand(400, -1), choices(with_changes(changes), 400)))
    assert p_value(counts, {7: 200, 2500: 200}) > SMALLEST_P_VALUE
    assert set(counts) == {7, 2500}


@pytest.mark.parametrize("top_k", [2, 3, 10, 64, 900, 1100])
@pytest.mark.parametrize("num_better", [0, 1])
def test_equals_at_the_border_of_top_k_are_kept_in_the_order_of_their_ids(top_k: int, num_better: int) -> None:
    """All equals but one: whatever a partial sort picks, the first ids are kept and each is drawn."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 1500 : 1500 + num_better] = 1e-3
    made = choices(replace(PLAIN, top_k=top_k), 100)
    drawn = draw(logits.expand(len(made), -1), made)
    assert drawn == [race(logits, choice) for choice in made]
    assert set(drawn) <= {*range(top_k - num_better), *range(1500, 1500 + num_better)}
    assert len(set(drawn)) > min(top_k, 50) * 0.9


def test_equals_at_the_border_of_top_p_are_kept_in_the_order_of_their_ids() -> None:
    logits = torch.zeros(1, VOCAB)
    drawn = draw(logits.expand(400, -1), choices(replace(PLAIN, top_p=0.01), 400))
    assert set(drawn) == set(range(30))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([1e-6, 0.01, 0.3, 1.0, 4.0, 30.0]),
    top_p=st.one_of(st.sampled_from([5e-324, 0.5, 0.9, 1.0 - 2.0**-53]), st.floats(0.01, 0.999)),
    equals=st.booleans(),
    forbidden=st.sampled_from([0.0, 0.5, 0.999]),
)
def test_what_top_p_keeps_is_what_it_keeps_of_a_sorted_row(
    seed: int, scale: float, top_p: float, equals: bool, forbidden: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 700, generator=generator) * scale
    logits = rounded(logits) if equals else logits
    logits[:, 1:].masked_fill_(torch.rand(3, 699, generator=generator) < forbidden, -torch.inf)
    distance = logits.double() - logits.amax(dim=-1, keepdim=True)
    kept = ~outside_top_p(distance, logits, torch.full((3, 1), top_p, dtype=torch.float64))
    ordered, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
    share = ordered.softmax(dim=-1)
    before = share.cumsum(dim=-1) - share
    # Where rounding of the sums decides, either is right.
    surely_kept = torch.zeros_like(kept).scatter_(1, tokens, before < top_p - 1e-12)
    perhaps_kept = torch.zeros_like(kept).scatter_(1, tokens, before < top_p + 1e-12)
    surely_kept[torch.arange(3), tokens[:, 0]] = True
    come = logits.isfinite()
    assert bool((kept & come >= surely_kept & come).all())
    assert bool((kept & come <= perhaps_kept).all())


def changed_draws(by: float, params: EffectiveParams, count: int = 800) -> int:
    """Of rows of noisy logits, how many draw another token if all logits are moved a little."""
    generator = torch.Generator().manual_seed(1)
    logits = random_logits(FLAT, rows=count)
    moved = logits + by * torch.randn(logits.shape, generator=generator)
    made = choices(params, count)
    return sum(one != other for one, other in zip(draw(logits, made), draw(moved, made), strict=True))


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.5}], ids=str)
def test_rounding_of_the_logits_changes_hardly_a_draw(changes: dict[str, float]) -> None:
    """Two tokens' scores lie within d of each other about once in 1 / d draws, however large the vocabulary is."""
    params = with_changes(changes)
    assert changed_draws(1e-6, params) == 0
    assert changed_draws(1e-3, params) <= 6


@settings(max_examples=60, deadline=None)
@given(
    token=st.integers(0, VOCAB - 1),
    by=st.floats(-5.0, 5.0),
    key=st.integers(0, 2**64 - 1),
    changes=st.sampled_from([{}, {"temperature": 0.5}]),
)
def test_a_change_of_one_logit_moves_a_draw_only_from_or_to_its_token(
    token: int, by: float, key: int, changes: dict[str, float]
) -> None:
    logits, choice = random_logits(1.0), Choice(with_changes(changes), key)
    [before] = draw(logits, [choice])
    logits[0, token] += by
    [after] = draw(logits, [choice])
    assert after == before or (before == token and by < 0) or (after == token and by > 0)


@settings(max_examples=60, deadline=None)
@given(key=st.integers(0, 2**64 - 1), changes=st.sampled_from(CHANGES))
def test_truncation_changes_a_draw_only_where_it_cuts_off_the_winner(key: int, changes: dict[str, float]) -> None:
    logits = random_logits(1.0)
    params = with_changes(changes)
    [free] = draw(logits, [Choice(replace(PLAIN, temperature=params.temperature), key)])
    tokens, probability = truncated_probabilities(logits.double(), [params])
    kept = set(tokens[0][probability[0] > 0].tolist())
    assert (draw(logits, [Choice(params, key)]) == [free]) == (free in kept)


def test_scores_are_logarithms_of_running_times() -> None:
    """Two tokens, of weights 3 and 1: the likelier wins three times out of four."""
    logits = torch.tensor([[math.log(3.0), 0.0]]).expand(8000, -1)
    counts = Counter(draw(logits, choices(PLAIN, 8000)))
    assert p_value(counts, {0: 6000, 1: 2000}) > SMALLEST_P_VALUE
