"""Latent attention over entries [latent | rope] with torch: with absorbed queries, or with expanded entries.

Does not know pages, rows, nor which of the two is used when.
"""

from __future__ import annotations

import torch
from torch import Tensor


def absorb_queries(q_nope: Tensor, q_rope: Tensor, key_up: Tensor, out: Tensor) -> None:
    """Writes queries in the latent space, out [num_tokens, heads, latent + rope], which match cached entries.

    q_nope [num_tokens, heads, nope], q_rope [num_tokens, heads, rope], key_up [heads, nope, latent].
    """
    latent_dim = key_up.shape[2]
    torch.bmm(q_nope.transpose(0, 1), key_up, out=out[..., :latent_dim].transpose(0, 1))
    out[..., latent_dim:] = q_rope


def project_values(latents: Tensor, value_up: Tensor, out: Tensor) -> None:
    """Writes out [num_tokens, heads, value] from the weighted latents of each head, [num_tokens, heads, latent]."""
    torch.bmm(latents.transpose(0, 1), value_up.transpose(1, 2), out=out.transpose(0, 1))


def attend_entries(q: Tensor, entries: Tensor, bias: Tensor | None, *, scale: float, latent_dim: int) -> Tensor:
    """Attention of q [rows, query_len, heads, d] to entries [rows, num_keys, d] that all heads share.

    bias [rows, 1, query_len, num_keys] is 0 where visible and -inf where not; every query sees a key. Returns the
    weighted latents, [rows, query_len, heads, latent]. Heads are treated as queries, so that each entry is read once.
    """
    weights = torch.softmax(_scores(q, entries, bias, scale), dim=-1)
    return _found(weights, q, entries, latent_dim)


def attend_entries_with_lse(
    q: Tensor, entries: Tensor, bias: Tensor | None, *, scale: float, latent_dim: int
) -> tuple[Tensor, Tensor]:
    """Like `attend_entries`, and also returns the natural log-sum-exp [rows, query_len, heads] fp32.

    For a query that sees nothing they are 0 and -inf.
    """
    scores = _scores(q, entries, bias, scale)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    weights = scores.sub_(lse.masked_fill(lse.isneginf(), 0.0)).exp_()
    return _found(weights, q, entries, latent_dim), lse.view(q.shape[:3])


def _scores(q: Tensor, entries: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The scores [rows, query_len * heads, num_keys] fp32."""
    rows, query_len, heads, _ = q.shape
    # In fp32: rounding scores to half precision would lose more accuracy than everything after them.
    folded = q.float().mul(scale).reshape(rows, query_len * heads, -1)
    scores = torch.bmm(folded, entries.float().transpose(1, 2))
    if bias is not None:
        scores.view(rows, query_len, heads, -1).add_(bias.transpose(1, 2))
    return scores


def _found(weights: Tensor, q: Tensor, entries: Tensor, latent_dim: int) -> Tensor:
    """The weighted latents [rows, query_len, heads, latent]."""
    return torch.bmm(weights.to(entries.dtype), entries[..., :latent_dim]).view(*q.shape[:3], latent_dim)


def expand_entries(entries: Tensor, key_up: Tensor, value_up: Tensor, keys: Tensor, values: Tensor) -> None:
    """Expands entries to every head's keys [num_keys, heads, nope + rope] and values [num_keys, heads, value]."""
    latent_dim = key_up.shape[2]
    expand_latents(entries[:, :latent_dim], entries[:, latent_dim:], key_up, value_up, keys, values)


def expand_latents(
    latents: Tensor, ropes: Tensor, key_up: Tensor, value_up: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Like `expand_entries`, for latents [num_keys, latent] and rope keys [num_keys, rope].

    `values` must be contiguous: one product computes those of all heads. If `value_up` is contiguous, it is not copied.
    """
    heads, nope_dim, _ = key_up.shape
    value_rows = heads * value_up.shape[1]
    shared = latents.unsqueeze(0).expand(heads, -1, -1)
    torch.bmm(shared, key_up.transpose(1, 2), out=keys[..., :nope_dim].transpose(0, 1))
    keys[..., nope_dim:] = ropes.unsqueeze(1)
    torch.mm(latents, value_up.flatten(0, 1).T, out=values.view(-1, value_rows))
