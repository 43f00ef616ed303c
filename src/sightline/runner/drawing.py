"""Drawing a token from logits: temperature, top-k, top-p, min-p, then one random number.

In this order, as transformers applies them: top-p is a share of what top-k left. Sorting a vocabulary costs more than
all the rest, so a row is sorted no further than its own parameters need, which never depends on the other rows:

    neither top-k nor top-p    no order at all
    top-k, or top-p that       the likeliest few
    the likeliest reach
    everything else            the whole vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.core.request import EffectiveParams

_FEW = (64, 1024)
"""How many of the likeliest tokens are sorted, the first number that is enough."""


@dataclass(frozen=True)
class Choice:
    """What one row's token follows from, beside its logits."""

    params: EffectiveParams
    random: float
    """In [0, 1)."""


def draw(logits: Tensor, rows: Sequence[Choice]) -> list[int]:
    """One token for each row of finite logits [num_rows, vocab_size] fp32; -inf is a token that cannot come."""
    by_count: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_count.setdefault(_num_sorted(row.params, logits.shape[1]), []).append(index)
    whole = by_count.pop(logits.shape[1], [])
    tokens = [0] * len(rows)
    for count, indices in by_count.items():
        group = [rows[index] for index in indices]
        drawn = _draw_unsorted(logits[indices], group) if count == 0 else _draw_of_few(logits[indices], group, count)
        for index, token in zip(indices, drawn, strict=True):
            if token is None:
                whole.append(index)
            else:
                tokens[index] = token
    if whole:
        group = [rows[index] for index in whole]
        named, probability = truncated_probabilities(logits[whole].double(), [row.params for row in group])
        picked = named.gather(1, _pick(probability, group)).squeeze(1).tolist()
        for index, token in zip(whole, picked, strict=True):
            tokens[index] = token
    return tokens


def truncated_probabilities(logits: Tensor, params: Sequence[EffectiveParams]) -> tuple[Tensor, Tensor]:
    """Tokens by falling probability, and their probabilities after temperature, top-k, top-p and min-p, not normalised.

    Logits [num_rows, vocab_size] fp64. Equally likely tokens come in the order of their ids.
    """
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    weight = _top_k_weight(ordered, params)
    probability = weight / weight.sum(dim=-1, keepdim=True)
    return tokens, _top_p_and_min_p(probability, params)


def _num_sorted(params: EffectiveParams, vocab_size: int) -> int:
    """How many of the likeliest tokens to sort for a row; with top-p alone more may turn out to be needed."""
    truncates = 0 < params.top_k < vocab_size
    if not truncates and params.top_p == 1.0:
        return 0
    needed = params.top_k if truncates else _FEW[-1]
    return min(next((count for count in _FEW if count >= needed), vocab_size), vocab_size)


def _draw_unsorted(logits: Tensor, rows: Sequence[Choice]) -> list[int]:
    """For rows without top-k and top-p: min-p needs the likeliest token only."""
    values = logits.double()
    weight = _weight(values, values.amax(dim=-1, keepdim=True), [row.params for row in rows])
    weight = weight.masked_fill_(weight < _column([row.params.min_p for row in rows], logits), 0.0)
    tokens: list[int] = _pick(weight, rows).squeeze(1).tolist()
    return tokens


def _draw_of_few(logits: Tensor, rows: Sequence[Choice], count: int) -> list[int | None]:
    """For rows whose tokens are surely among the `count` likeliest; None for one where top-p reaches beyond them."""
    params = [row.params for row in rows]
    tokens = logits.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered, order = logits.gather(1, tokens).double().sort(dim=-1, descending=True, stable=True)
    weight = _top_k_weight(ordered, params)
    total = weight.sum(dim=-1, keepdim=True)
    open_ended = [index for index, each in enumerate(params) if not 0 < each.top_k <= count]
    if open_ended:
        every = _weight(logits[open_ended].double(), ordered[open_ended, :1], [params[index] for index in open_ended])
        total[open_ended] = every.sum(dim=-1, keepdim=True)
    probability = weight / total
    reached = (probability.sum(dim=-1, keepdim=True) >= _column([each.top_p for each in params], logits)).tolist()
    picked = _pick(_top_p_and_min_p(probability, params), rows)
    named = tokens.gather(1, order.gather(1, picked)).squeeze(1).tolist()
    beyond = {index for index in open_ended if not reached[index][0]}
    return [None if index in beyond else token for index, token in enumerate(named)]


def _weight(values: Tensor, largest: Tensor, params: Sequence[EffectiveParams]) -> Tensor:
    """Not normalised; the likeliest has 1. The largest becomes 0 before the division, so no temperature overflows."""
    return values.sub(largest).div_(_column([each.temperature for each in params], values)).exp_()


def _top_k_weight(ordered: Tensor, params: Sequence[EffectiveParams]) -> Tensor:
    rank = torch.arange(ordered.shape[1], device=ordered.device).unsqueeze(0)
    top_k = _column([each.top_k or ordered.shape[1] for each in params], ordered)
    return _weight(ordered, ordered[:, :1], params).masked_fill_(rank >= top_k, 0.0)


def _top_p_and_min_p(probability: Tensor, params: Sequence[EffectiveParams]) -> Tensor:
    """Of probabilities in falling order. The first is always kept."""
    before = probability.cumsum(dim=-1).sub_(probability)
    top_p = _column([each.top_p for each in params], probability)
    outside = (before >= top_p) & (top_p < 1.0)
    outside[:, 0] = False
    floor = _column([each.min_p for each in params], probability) * probability[:, :1]
    return probability.masked_fill(outside | (probability < floor), 0.0)


def _pick(weight: Tensor, rows: Sequence[Choice]) -> Tensor:
    """[num_rows, 1]: where each row's random share of its whole weight falls, which is never on a weight of 0."""
    cumulative = weight.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = _column([row.random for row in rows], weight) * total
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(cumulative, torch.minimum(target, below), right=True)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)
