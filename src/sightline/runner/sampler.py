"""From logits to tokens.

A token depends on its row's logits, its parameters, its seed and its place in the output, and on nothing else: the
random number is a function of (seed, place), so neither the batch nor a recomputation changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.core.request import EffectiveParams

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class RowSampling:
    """How one row chooses its next token."""

    params: EffectiveParams
    place: int
    """Tokens that the sequence has generated before this one."""


@dataclass(frozen=True)
class Sampled:
    """The choice for each row."""

    tokens: tuple[int, ...]
    finite: tuple[bool, ...]
    """False where the row's logits held a NaN or an infinity: its token means nothing."""


def sample(logits: Tensor, rows: Sequence[RowSampling]) -> Sampled:
    """One token for each row of logits [num_rows, vocab_size] fp32."""
    finite = logits.isfinite().all(dim=-1).tolist()
    tokens = logits.argmax(dim=-1).tolist()
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0.0 and finite[index]]
    if drawn:
        chosen = _draw(logits[drawn].double(), [rows[index] for index in drawn])
        for index, token in zip(drawn, chosen.tolist(), strict=True):
            tokens[index] = token
    return Sampled(tuple(tokens), tuple(finite))


def truncated_probabilities(logits: Tensor, rows: Sequence[RowSampling]) -> tuple[Tensor, Tensor]:
    """Tokens by falling probability, and their probabilities after temperature, top-k, top-p and min-p, not normalised.

    In this order, as transformers applies them: top-p is a share of what top-k left.
    """
    temperature = _column([row.params.temperature for row in rows])
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    # The largest logit becomes 0 before the division, so that no temperature overflows.
    probability = torch.softmax((ordered - ordered[:, :1]) / temperature, dim=-1)
    rank = torch.arange(logits.shape[-1]).unsqueeze(0)
    top_k = _column([row.params.top_k or logits.shape[-1] for row in rows])
    probability = probability.masked_fill(rank >= top_k, 0.0)
    probability = probability / probability.sum(dim=-1, keepdim=True)
    before = probability.cumsum(dim=-1) - probability
    top_p = _column([row.params.top_p for row in rows])
    outside = (before >= top_p) & (top_p < 1.0) & (rank > 0)
    probability = probability.masked_fill(outside, 0.0)
    floor = _column([row.params.min_p for row in rows]) * probability[:, :1]
    return tokens, probability.masked_fill(probability < floor, 0.0)


def _draw(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    tokens, probability = truncated_probabilities(logits, rows)
    cumulative = probability.cumsum(dim=-1)
    target = _column([uniform(row.params.seed, row.place) for row in rows]) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True)
    last_kept = (probability > 0.0).sum(dim=-1, keepdim=True) - 1
    return tokens.gather(1, torch.minimum(place, last_kept)).squeeze(1)


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) that depends on (seed, place) alone: a counter run through a 64-bit mixer."""
    return (_mix(_mix(seed) + (place + 1) * _GOLDEN) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
