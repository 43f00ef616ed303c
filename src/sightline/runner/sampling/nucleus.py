"""Finds the tokens that top-p drops, without sorting the vocabulary.

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
_MAX_SPAN = 40.0
"""Tokens that are further below the likeliest, in units of the temperature, share the last bucket."""


def outside_top_p(distance: Tensor, logits: Tensor, top_p: Tensor) -> Tensor:
    """True for the tokens that top-p drops, [num_rows, vocab_size] bool.

    `distance` [num_rows, vocab_size] fp64 is (logit - largest logit) / temperature. Tokens are kept by falling logit,
    equal ones in the order of their ids, until their share reaches `top_p` [num_rows, 1]. The token that reaches it is
    kept, and so is the first.
    """
    weight = distance.exp()
    span = distance.amin(dim=-1, keepdim=True).neg_().clamp_(1e-300, _MAX_SPAN)
    bucket = distance.mul((1 - NUM_BUCKETS) / span).clamp_(max=NUM_BUCKETS - 1).to(torch.int64)
    mass = weight.new_zeros(weight.shape[0], NUM_BUCKETS).scatter_add_(1, bucket, weight)
    up_to = mass.cumsum(dim=-1)
    limit = top_p * up_to[:, -1:]
    before = torch.nn.functional.pad(up_to[:, :-1], (1, 0))
    crossing = (before < limit).sum(dim=-1, keepdim=True) - 1
    outside = bucket > crossing
    rows, tokens = true_positions(bucket == crossing)
    dropped = _beyond(rows, logits[rows, tokens], weight[rows, tokens], limit - before.gather(1, crossing))
    outside[rows[dropped], tokens[dropped]] = True
    return outside


def _beyond(rows: Tensor, logits: Tensor, weight: Tensor, room: Tensor) -> Tensor:
    """True for the tokens of a list [num_listed], sorted by row and id, that do not fit into their row's `room`."""
    counts = torch.bincount(rows, minlength=room.shape[0])
    column = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    # A padded row each: one running sum over all rows would make the rounding depend on the batch.
    shape = (room.shape[0], int(counts.max()))
    values = logits.new_full(shape, -torch.inf).index_put_((rows, column), logits)
    weights = weight.new_zeros(shape).index_put_((rows, column), weight)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    ordered = weights.gather(1, order)
    fits = (ordered.cumsum(dim=-1) - ordered) < room
    return ~torch.empty_like(fits).scatter_(1, order, fits)[rows, column]
