"""A recurrent layer chunk by chunk: for long rows. All rows and heads at once, in fp32.

Within a chunk, what each token stores depends on the tokens before it only through a triangular system:

    stored_i + beta_i * Σ_j<i (key_i · key_j decayed from j to i) * stored_j = beta_i * (value_i - recalled_i)

where `recalled` is what the state before the chunk gives, decayed. Outputs and the next state are then products of
matrices. Nothing is divided by a decay. The decay from token j to token i is computed directly and is at most 1, so
that decays of any strength neither overflow nor cancel. Does not know slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sightline.attention.recurrent.steps import unit
from sightline.attention.spec import RecurrentSpec

_NOTHING_LEFT = -128.0
"""The log decay at which nothing is left of a state in fp32. Replaces stronger ones: differences of infinite ones are
NaN."""


class ChunkTerms(NamedTuple):
    """The values of several chunks that do not depend on the state. A chunk has `width` tokens."""

    reads: Tensor
    """[chunks, num_heads, width or 2 * width, key_dim]: queries and, with the delta rule, keys, decayed from the
    beginning of the chunk."""
    system: Tensor | None
    """[chunks, num_heads, width, width]: the triangular system of the delta rule, below the diagonal."""
    scores: Tensor
    """[chunks, num_heads, width, width]: query_i · key_j, decayed from j to i; 0 above the diagonal."""
    writes: Tensor
    """[chunks, num_heads, width, key_dim]: keys, decayed to the end of the chunk."""
    left: Tensor
    """[chunks, num_heads, 1 or key_dim, 1]: what is left of the state at the end of the chunk."""
    values: Tensor
    """[chunks, num_heads, width, value_dim]."""
    betas: Tensor
    """[chunks, num_heads, width, 1]."""


class _Decayed(NamedTuple):
    """Products of queries and keys, and what is left of each between two tokens."""

    scores: Tensor
    """[chunks, num_heads, width, width]."""
    similar: Tensor | None
    """[chunks, num_heads, width, width]: key_i · key_j, decayed from j to i, below the diagonal."""
    before: Tensor
    """[chunks, num_heads, width, 1 or key_dim]: left from the beginning of the chunk to each token."""
    behind: Tensor
    """[chunks, num_heads, width, 1 or key_dim]: left from each token to the end of the chunk."""


def chunk_terms(spec: RecurrentSpec, mixed: Tensor, decay: Tensor, beta: Tensor) -> ChunkTerms:
    """The terms of chunks, [chunks, width, channels] fp32. Decay and beta are [chunks, width, num_heads, ...], 0 for
    padding. With decay per channel, the width must be a power of 2."""
    chunks, width = mixed.shape[:2]
    size = spec.num_key_heads * spec.key_dim
    both = mixed[..., : 2 * size].reshape(chunks, width, 2 * spec.num_key_heads, spec.key_dim).transpose(1, 2)
    both = unit(both) if spec.unit_keys else both
    query, key = both.contiguous().tensor_split(2, dim=1)
    value = mixed[..., 2 * size :].reshape(chunks, width, spec.num_heads, spec.value_dim).transpose(1, 2).contiguous()
    betas = beta.transpose(1, 2).unsqueeze(-1)
    products = _by_channel if spec.channel_decay else _by_head
    scores, similar, before, behind = products(spec, query, key, decay.transpose(1, 2).clamp(min=_NOTHING_LEFT))
    reads = mixed.new_empty(chunks, spec.num_heads, 2 * width if spec.delta_rule else width, spec.key_dim)
    _decayed(spec, query, before, reads[:, :, :width])
    if spec.delta_rule:
        _decayed(spec, key, before, reads[:, :, width:])
    return ChunkTerms(
        reads=reads,
        system=None if similar is None else similar.mul_(betas),
        scores=scores,
        writes=_decayed(spec, key, behind, mixed.new_empty(chunks, spec.num_heads, width, spec.key_dim)),
        left=before[:, :, -1].unsqueeze(-1),
        values=value,
        betas=betas,
    )


def _decayed(spec: RecurrentSpec, x: Tensor, left: Tensor, out: Tensor) -> Tensor:
    """Multiplies x [chunks, num_key_heads, width, key_dim], repeated for the heads that share a key head, by `left`
    [chunks, num_heads, width, 1 or key_dim]."""
    grouped = (x.shape[0], spec.num_key_heads, spec.group_size)
    torch.mul(x.unsqueeze(2), left.view(*grouped, *left.shape[2:]), out=out.view(*grouped, *out.shape[2:]))
    return out


def scan_chunk(terms: ChunkTerms, chunks: slice, state: Tensor) -> Tensor:
    """Computes one chunk of every row: updates `state` [rows * num_heads, key_dim, value_dim] in place, and returns
    [rows * num_heads, width, value_dim], to be scaled."""
    values, betas, scores = (each[chunks].flatten(0, 1) for each in (terms.values, terms.betas, terms.scores))
    width = values.shape[1]
    found = torch.bmm(terms.reads[chunks].flatten(0, 1), state)
    if terms.system is None:
        stored = values * betas
    else:
        wanted = (values - found[:, width:]).mul_(betas)
        system = terms.system[chunks].flatten(0, 1)
        stored = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    state.mul_(terms.left[chunks].flatten(0, 1))
    state.baddbmm_(terms.writes[chunks].flatten(0, 1).transpose(1, 2), stored)
    return torch.baddbmm(found[:, :width], scores, stored)


def _by_head(spec: RecurrentSpec, query: Tensor, key: Tensor, decay: Tensor) -> _Decayed:
    """`decay` is [chunks, num_heads, width]: a product of two vectors decays as a whole."""
    chunks, _, width = decay.shape
    # In fp64, because a difference of two large sums must be right to less than a millionth.
    total = decay.cumsum(-1, dtype=torch.float64)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).float()
    later = torch.ones(width, width, dtype=torch.bool, device=decay.device).triu(1)
    between = between.masked_fill_(later, -torch.inf).exp_()
    grouped = between.view(chunks, spec.num_key_heads, spec.group_size, width, width)
    turned = key.transpose(-1, -2)
    scores = (grouped * (query @ turned).unsqueeze(2)).flatten(1, 2)
    similar = (grouped * (key @ turned).unsqueeze(2)).flatten(1, 2) if spec.delta_rule else None
    before = total.float().exp_().unsqueeze(-1)
    behind = (total[..., -1:] - total).float().exp_().unsqueeze(-1)
    return _Decayed(scores, similar, before, behind)


def _by_channel(spec: RecurrentSpec, query: Tensor, key: Tensor, decay: Tensor) -> _Decayed:
    """`decay` is [chunks, num_heads, width, key_dim]: each dimension of a product decays on its own.

    Between a token of the right half of a block and one of its left half, the decay is what is left up to the border
    times what is left behind it. So the products of halves are products of matrices, for blocks of 2, 4, ... tokens.
    """
    chunks, heads, width, dim = decay.shape
    query, key = (_of_heads(spec, each) for each in (query, key))
    rights = torch.stack((query, key), dim=3) if spec.delta_rule else query.unsqueeze(3)
    kinds = rights.shape[3]
    before, behind = decay.exp(), torch.ones_like(decay)
    products = decay.new_zeros(chunks, heads, width, kinds, width)
    products[:, :, :, 0].diagonal(dim1=2, dim2=3).copy_((query * key).sum(-1))
    size = 1
    while size < width:
        blocks = (chunks, heads, width // (2 * size))
        halves = (*blocks, 2, size, dim)
        right_left, left_left = before.view(halves)[:, :, :, 1], behind.view(halves)[:, :, :, 0]
        left = key.view(halves)[:, :, :, 0] * left_left
        right = rights.view(*blocks, 2, size, kinds, dim)[:, :, :, 1] * right_left.unsqueeze(-2)
        found = right.view(*blocks, size * kinds, dim) @ left.transpose(-1, -2)
        inside = products.view(*blocks, 2, size, kinds, blocks[2], 2, size).diagonal(dim1=2, dim2=6)
        inside[:, :, 1, :, :, 0].copy_(found.view(*blocks, size, kinds, size).movedim(2, -1))
        whole_left, whole_right = before.view(halves)[:, :, :, 0, -1:], right_left[:, :, :, -1:].clone()
        right_left *= whole_left
        left_left *= whole_right
        size *= 2
    similar = products[:, :, :, 1] if spec.delta_rule else None
    return _Decayed(products[:, :, :, 0], similar, before, behind)


def _of_heads(spec: RecurrentSpec, x: Tensor) -> Tensor:
    """[chunks, num_heads, width, key_dim]: for each head, the vectors of its key head."""
    return x if spec.group_size == 1 else x.repeat_interleave(spec.group_size, dim=1)
