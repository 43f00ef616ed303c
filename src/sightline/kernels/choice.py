"""The choice of the highest scores with torch. Does not know who scores what."""

from __future__ import annotations

import torch
from torch import Tensor


def choose_highest(scores: Tensor, out: Tensor) -> None:
    """Writes the places of the highest of `scores` [n, num_keys] fp32 to `out` [n, top_k] int32, in increasing order.

    Of equal scores those at lower places are chosen. A place whose score is -inf is never chosen; -1 stands behind the
    last one. NaN counts as the highest score.
    """
    top_k = out.shape[1]
    width = min(top_k, scores.shape[1])
    scores = torch.where(scores.isnan(), torch.inf, scores)
    least = scores.topk(width, dim=1).values[:, -1:]
    above, at_least = scores > least, (scores == least) & (scores > -torch.inf)
    left = width - above.sum(dim=1, keepdim=True)
    taken = above | (at_least & (at_least.cumsum(dim=1) <= left))
    place = torch.where(taken, taken.cumsum(dim=1) - 1, top_k)
    # One more column takes what is not chosen.
    found = torch.full((scores.shape[0], top_k + 1), -1, dtype=torch.int32, device=scores.device)
    positions = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    found.scatter_(1, place, positions.expand_as(place))
    out.copy_(found[:, :top_k])
