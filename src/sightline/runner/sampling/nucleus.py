"""What top-p drops: the definition, and the tokens that it drops without sorting the vocabulary.

Weights are rounded to integers, whose sums do not depend on their order. Every way of finding the cut, on any device,
therefore finds the same one.

Tokens are put into buckets by their distance to the likeliest. The cut falls into one bucket, and only its tokens are
sorted:

    bucket    0    1    2  ...  crossing  ...   last
              kept kept kept     sorted         dropped
"""

from __future__ import annotations

import torch
from torch import Tensor

from sightline.runner.sampling.positions import true_positions

NUM_BUCKETS = 4096
"""The number of buckets per row."""
_UNITS = 2.0**44
"""The mass of the likeliest token. The sum over a vocabulary of up to 2^18 tokens fits in 62 bits."""
_MAX_SPAN = 40.0
"""Tokens that are further below the likeliest, in units of the temperature, share the last bucket."""


def masses(distance: Tensor) -> Tensor:
    """The weights exp(distance) as integers, int64; `distance` fp64 is (logit - largest logit) / temperature."""
    return distance.exp().mul_(_UNITS).round_().to(torch.int64)


def share_limit(top_p: Tensor, total: Tensor) -> Tensor:
    """The mass up to which top-p keeps tokens, at least 1; `top_p` fp64 and `total` int64 have the same shape.

    A token is kept if the masses of those before it sum to less.
    """
    return torch.minimum((top_p * total).ceil_().to(torch.int64).clamp_(min=1), total)


def outside_top_p(distance: Tensor, logits: Tensor, top_p: Tensor) -> Tensor:
    """True for the tokens that top-p drops, [num_rows, vocab_size] bool.

    `distance` [num_rows, vocab_size] fp64 is (logit - largest logit) / temperature. Tokens are kept by falling logit,
    equal ones in the order of their ids, until their share reaches `top_p` [num_rows, 1] fp64. The token that reaches
    it is kept.
    """
    mass = masses(distance)
    span = distance.amin(dim=-1, keepdim=True).neg_().clamp_(1e-300, _MAX_SPAN)
    bucket = distance.mul((1 - NUM_BUCKETS) / span).clamp_(max=NUM_BUCKETS - 1).to(torch.int64)
    up_to = mass.new_zeros(mass.shape[0], NUM_BUCKETS).scatter_add_(1, bucket, mass).cumsum(dim=-1)
    limit = share_limit(top_p, up_to[:, -1:])
    before = torch.nn.functional.pad(up_to[:, :-1], (1, 0))
    crossing = (before < limit).sum(dim=-1, keepdim=True) - 1
    outside = bucket > crossing
    rows, tokens = true_positions(bucket == crossing)
    dropped = _beyond(rows, logits[rows, tokens], mass[rows, tokens], limit - before.gather(1, crossing))
    outside[rows[dropped], tokens[dropped]] = True
    return outside


def _beyond(rows: Tensor, logits: Tensor, mass: Tensor, room: Tensor) -> Tensor:
    """True for the tokens of a list [num_listed], sorted by row and id, that do not fit into their row's `room`."""
    counts = torch.bincount(rows, minlength=room.shape[0])
    column = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    shape = (room.shape[0], int(counts.max()))
    values = logits.new_full(shape, -torch.inf).index_put_((rows, column), logits)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    ordered = mass.new_zeros(shape).index_put_((rows, column), mass).gather(1, order)
    fits = (ordered.cumsum(dim=-1) - ordered) < room
    return ~torch.empty_like(fits).scatter_(1, order, fits)[rows, column]
