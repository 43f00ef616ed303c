"""Sorting no more than a row needs draws what sorting everything draws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.core.request import EffectiveParams
from sightline.runner.drawing import Choice, draw, truncated_probabilities

VOCAB = 3000
DRAWS = 1500
PLAIN = EffectiveParams(1.0, 1.0, 0, 0.0, 5, 16, frozenset(), True)
PEAKED, FLAT = 3.0, 0.3
"""Scales of the logits: the likeliest 1024 tokens reach a top-p of 0.9, or they do not."""


def random_logits(scale: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("scale", [PEAKED, FLAT])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"min_p": 0.1},
        {"top_k": 3},
        {"top_k": 64},
        {"top_k": 65},
        {"top_k": 1024},
        {"top_k": 1025},
        {"top_k": VOCAB},
        {"top_k": 2**31 - 1, "top_p": 0.5},
        {"top_p": 0.1},
        {"top_p": 0.9},
        {"top_p": 0.999999},
        {"top_p": 0.9, "temperature": 4.0},
        {"top_k": 40, "top_p": 0.7, "min_p": 0.05, "temperature": 0.6},
    ],
    ids=str,
)
def test_each_token_gets_its_share_of_the_unit_interval(changes: dict[str, float], scale: float) -> None:
    """A token's numbers are one interval, so that evenly spaced ones hit it as often as its share says, but for one."""
    params = replace(PLAIN, **changes)  # type: ignore[arg-type]
    logits = random_logits(scale)
    tokens, probability = truncated_probabilities(logits.double(), [params])
    share = torch.zeros(VOCAB, dtype=torch.float64).scatter(0, tokens[0], probability[0] / probability.sum())
    drawn = draw(logits.expand(DRAWS, -1), [Choice(params, (place + 0.5) / DRAWS) for place in range(DRAWS)])
    counts = torch.bincount(torch.tensor(drawn), minlength=VOCAB)
    assert float((counts - share * DRAWS).abs().max()) <= 1.0 + 1e-6
    assert not counts[share == 0].any(), "a token that was cut off was drawn"


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 30, 500, 2000]),
            st.sampled_from([0.2, 0.9, 1.0]),
            st.sampled_from([0.0, 0.2]),
            st.floats(0, 1, exclude_max=True),
            st.sampled_from([PEAKED, FLAT]),
        ),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 99),
)
def test_a_row_draws_the_same_alone_and_in_a_batch(
    rows: list[tuple[int, float, float, float, float]], seed: int
) -> None:
    choices = [
        Choice(replace(PLAIN, top_k=top_k, top_p=top_p, min_p=min_p), random) for top_k, top_p, min_p, random, _ in rows
    ]
    # Rounded as bf16 does, so that many logits are equal.
    logits = (
        torch.cat([random_logits(scale, seed + place) for place, (*_, scale) in enumerate(rows)]).bfloat16().float()
    )
    alone = [draw(logits[place : place + 1], [choice])[0] for place, choice in enumerate(choices)]
    assert draw(logits, choices) == alone


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"top_k": 2000}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize("random", [0.0, 0.5, 1.0 - 2.0**-53])
def test_forbidden_tokens_are_never_drawn(changes: dict[str, float], random: float) -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 7], logits[0, 2500] = 1.0, 1.0
    params = replace(PLAIN, **changes)  # type: ignore[arg-type]
    assert draw(logits, [Choice(params, random)]) == [7 if random < 0.5 else 2500]
