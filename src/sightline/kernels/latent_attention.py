"""Latent attention over entries [latent | rope] with torch: queries taken into the latent's space, or entries expanded.

Owns products. Does not know pages, rows or which way is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor


def absorb_queries(q_nope: Tensor, q_rope: Tensor, key_up: Tensor, out: Tensor) -> None:
    """Writes out [num_tokens, heads, latent + rope]: a query that meets entries as they are cached.

    q_nope [num_tokens, heads, nope], q_rope [num_tokens, heads, rope], key_up [heads, nope, latent].
    """
    latent_dim = key_up.shape[2]
    torch.bmm(q_nope.transpose(0, 1), key_up, out=out[..., :latent_dim].transpose(0, 1))
    out[..., latent_dim:] = q_rope


def project_values(latents: Tensor, value_up: Tensor, out: Tensor) -> None:
    """Writes out [num_tokens, heads, value] from what heads found of the latents, [num_tokens, heads, latent]."""
    torch.bmm(latents.transpose(0, 1), value_up.transpose(1, 2), out=out.transpose(0, 1))


def attend_entries(q: Tensor, entries: Tensor, bias: Tensor | None, *, scale: float, latent_dim: int) -> Tensor:
    """One entry a token for all heads: q [rows, query_len, heads, d], entries [rows, num_keys, d].

    bias [rows, 1, query_len, num_keys] is 0 where visible and -inf where not; every query sees a key. Returns what the
    heads found of the latents, [rows, query_len, heads, latent]. The heads of a query stand as queries, so that each
    entry is read once for all of them.
    """
    weights = torch.softmax(_scores(q, entries, bias, scale), dim=-1)
    return _found(weights, q, entries, latent_dim)


def attend_entries_with_lse(
    q: Tensor, entries: Tensor, bias: Tensor | None, *, scale: float, latent_dim: int
) -> tuple[Tensor, Tensor]:
    """As `attend_entries`, and the natural log-sum-exp [rows, query_len, heads], fp32.

    A query that sees nothing gives 0 and -inf.
    """
    scores = _scores(q, entries, bias, scale)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    weights = scores.sub_(lse.masked_fill(lse.isneginf(), 0.0)).exp_()
    return _found(weights, q, entries, latent_dim), lse.view(q.shape[:3])


def _scores(q: Tensor, entries: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """[rows, query_len * heads, num_keys] fp32."""
    rows, query_len, heads, _ = q.shape
    # Scores that are rounded to half precision would lose more than everything after them.
    folded = q.float().mul(scale).reshape(rows, query_len * heads, -1)
    scores = torch.bmm(folded, entries.float().transpose(1, 2))
    if bias is not None:
        scores.view(rows, query_len, heads, -1).add_(bias.transpose(1, 2))
    return scores


def _found(weights: Tensor, q: Tensor, entries: Tensor, latent_dim: int) -> Tensor:
    """[rows, query_len, heads, latent]."""
    return torch.bmm(weights.to(entries.dtype), entries[..., :latent_dim]).view(*q.shape[:3], latent_dim)


def expand_entries(entries: Tensor, key_up: Tensor, value_up: Tensor, keys: Tensor, values: Tensor) -> None:
    """Writes every head's keys [num_keys, heads, nope + rope] and values [num_keys, heads, value] of the entries."""
    latent_dim = key_up.shape[2]
    expand_latents(entries[:, :latent_dim], entries[:, latent_dim:], key_up, value_up, keys, values)


def expand_latents(
    latents: Tensor, ropes: Tensor, key_up: Tensor, value_up: Tensor, keys: Tensor, values: Tensor
) -> None:
    """As `expand_entries`, of latents [num_keys, latent] and rope keys [num_keys, rope]: two products and a copy.

    `values` is contiguous, so that one product makes those of all heads, without a copy where `value_up` is too.
    """
    heads, nope_dim, _ = key_up.shape
    value_rows = heads * value_up.shape[1]
    shared = latents.unsqueeze(0).expand(heads, -1, -1)
    torch.bmm(shared, key_up.transpose(1, 2), out=keys[..., :nope_dim].transpose(0, 1))
    keys[..., nope_dim:] = ropes.unsqueeze(1)
    torch.mm(latents, value_up.flatten(0, 1).T, out=values.view(-1, value_rows))
