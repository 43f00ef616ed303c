"""A recurrent layer token by token: for decoding, and for rows of a few tokens. All rows and heads at once, in fp32.

A token reads the state twice: for what its key recalls and for what its query finds. Both are found in one product with
the state as it was, because the new state is that state, decayed, and one outer product:

    state'  = exp(decay) * state + key ⊗ stored
    found   = exp(decay) * (query @ state) + (query · key) * stored
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.attention.spec import UNIT_EPSILON, RecurrentSpec


class StepTerms(NamedTuple):
    """The values of several tokens that do not depend on the state. The first dimension has the heads of all rows."""

    vectors: Tensor
    """[heads, tokens, 2, key_dim]: the query and the key."""
    reads: Tensor
    """[heads, tokens, 1 or 2, key_dim]: the query and, with the delta rule, the key; decayed if the decay is per
    channel."""
    overlaps: Tensor
    """[heads, tokens, 1, 1]: query · key."""
    values: Tensor
    """[heads, tokens, 1, value_dim]."""
    betas: Tensor
    """[heads, tokens, 1, 1]."""
    left: Tensor
    """[heads, tokens, 1 or key_dim, 1]: what is left of the state."""


def step_terms(spec: RecurrentSpec, mixed: Tensor, decay: Tensor, beta: Tensor) -> StepTerms:
    """The terms of tokens, [rows, tokens, channels] fp32, whose decay and beta are [rows, tokens, num_heads, ...]."""
    rows, length = mixed.shape[:2]
    heads, size = rows * spec.num_heads, spec.num_key_heads * spec.key_dim
    both = mixed[..., : 2 * size].reshape(rows, length, 2, spec.num_key_heads, spec.key_dim)
    if spec.unit_keys:
        both = unit(both)
    both = both.permute(0, 3, 1, 2, 4).unsqueeze(2).expand(-1, -1, spec.group_size, -1, -1, -1)
    vectors = both.reshape(heads, length, 2, spec.key_dim)
    values = mixed[..., 2 * size :].reshape(rows, length, spec.num_heads, spec.value_dim).transpose(1, 2)
    left = decay.transpose(1, 2).reshape(heads, length, -1, 1).exp()
    reads = vectors if spec.delta_rule else vectors[:, :, :1]
    return StepTerms(
        vectors=vectors,
        reads=reads * left.transpose(2, 3) if spec.channel_decay else reads,
        overlaps=(vectors[:, :, :1] * vectors[:, :, 1:]).sum(-1, keepdim=True),
        values=values.reshape(heads, length, 1, spec.value_dim),
        betas=beta.transpose(1, 2).reshape(heads, length, 1, 1),
        left=left,
    )


def unit(x: Tensor) -> Tensor:
    """Divides vectors, the last dimension, by their lengths."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_EPSILON)


def step(
    spec: RecurrentSpec, terms: StepTerms, token: int, sources: Sequence[Tensor], targets: Sequence[Tensor]
) -> Tensor:
    """Computes one token of every row: reads the states in `sources`, writes those behind the token to `targets`, and
    returns [heads, 1, value_dim], to be scaled.

    Each source holds as many states as any other, [heads of its rows, key_dim, value_dim]; its target may be itself.
    """
    reads, left = terms.reads[:, token], terms.left[:, token]
    size = reads.shape[0] // len(sources)
    found = reads.new_empty(*reads.shape[:2], spec.value_dim)
    for source, read, place in zip(sources, _divided(reads, size), _divided(found, size), strict=True):
        torch.bmm(read, source, out=place)
    if not spec.channel_decay:
        found *= left
    stored = terms.values[:, token]
    if spec.delta_rule:
        stored = stored - found[:, 1:]
    stored = stored * terms.betas[:, token]
    keys = terms.vectors[:, token, 1].unsqueeze(-1)
    changes = (_divided(each, size) for each in (left, keys, stored))
    for source, target, decay, key, value in zip(sources, targets, *changes, strict=True):
        torch.mul(source, decay, out=target).addcmul_(key, value)
    return torch.addcmul(found[:, :1], terms.overlaps[:, token], stored)


def _divided(values: Tensor, size: int) -> Sequence[Tensor]:
    """Views of `size` heads each."""
    return (values,) if size == values.shape[0] else torch.split(values, size)
