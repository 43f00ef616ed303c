"""Sums of which a softmax over tokens is made, per channel: triples of maximum, sum of exponentials and weighted sum.

A sum of 0 means no token, whatever the maximum is; so all zeros are the sums of no tokens. Does not know rows or
windows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sightline.attention.compressed.spec import MAXIMUM, SUM, WEIGHTED


def sum_tokens(start: Tensor, values: Tensor, gates: Tensor) -> Tensor:
    """Adds tokens to sums.

    start [n, 3, width] fp32; values and gates [n, num_tokens, width] fp32, a gate of -inf for a token that does not
    count. Returns the sums [n, 3, width] fp32.
    """
    begun = torch.where(start[:, SUM] > 0, start[:, MAXIMUM], -torch.inf)
    largest = torch.maximum(gates.amax(dim=1), begun)
    # Where no gate is above -inf, nothing must be subtracted from it.
    shift = torch.where(largest > -torch.inf, largest, 0.0)
    weights = torch.exp(gates - shift.unsqueeze(1))
    rest = torch.exp(begun - shift)
    total = weights.sum(dim=1).addcmul_(rest, start[:, SUM])
    weighted = weights.mul_(values).sum(dim=1).addcmul_(rest, start[:, WEIGHTED])
    return torch.stack([shift, total, weighted], dim=1)


def mixed_sums(own: Tensor, before: Tensor | None) -> Tensor:
    """[n, head_dim] fp32: the softmax over the tokens of two sums [n, 3, head_dim], times their values."""
    if before is None:
        return own[:, WEIGHTED] / own[:, SUM]
    first, second = (torch.where(each[:, SUM] > 0, each[:, MAXIMUM], -torch.inf) for each in (own, before))
    largest = torch.maximum(first, second)
    shift = torch.where(largest > -torch.inf, largest, 0.0)
    one, two = torch.exp(first - shift), torch.exp(second - shift)
    weighted = (one * own[:, WEIGHTED]).addcmul_(two, before[:, WEIGHTED])
    return weighted / (one * own[:, SUM]).addcmul_(two, before[:, SUM])


def finished_entries(mixed: Tensor, norm: Tensor, norm_eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """[n, head_dim] fp32: mixed entries, normalised, times `norm` [head_dim], with their last channels rotated in pairs
    by `cos` and `sin` [n, rope_dim // 2]. Changes `mixed` [n, head_dim] in place."""
    mixed *= torch.rsqrt(mixed.square().mean(dim=1, keepdim=True) + norm_eps)
    mixed *= norm.float()
    pairs = mixed[:, mixed.shape[1] - 2 * cos.shape[1] :].view(len(mixed), cos.shape[1], 2)
    first, second = pairs.clone().unbind(dim=2)
    pairs[..., 0] = first * cos - second * sin
    pairs[..., 1] = second * cos + first * sin
    return mixed
