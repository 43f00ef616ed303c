"""The oracle: attention for one row in fp32, with every score in memory, written to be read.

Every backend is compared with this. Takes a row's keys and values as dense tensors, and models the rounding of a cache.
Does not know pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sightline.attention.spec import AttentionSpec, LatentSpec, SoftmaxSpec
from sightline.cache.spec import SCALED_DTYPES
from sightline.core.batch import MaskKind, RowMask


def visible_keys(
    spec: AttentionSpec, mask: RowMask, context_len: int, positions: Tensor, queries: Sequence[int] | None = None
) -> Tensor:
    """[num_queries, seq_len] bool: True if query i sees key j. `positions` [query_len] are those of the new tokens;
    `queries` selects new tokens, None for all."""
    query_len = positions.shape[0]
    asked = range(query_len) if queries is None else queries
    context_positions = torch.arange(context_len)
    key_positions = torch.cat([context_positions, positions.cpu()])
    visible = torch.ones(len(asked), context_len + query_len, dtype=torch.bool)
    for place, query in enumerate(asked):
        if mask.kind is MaskKind.CAUSAL:
            visible[place, context_len + query + 1 :] = False
        elif mask.tree is not None:
            visible[place, context_len:] = mask.tree[query]
        elif mask.kind is MaskKind.CONTEXT:
            visible[place, context_len:] = False
    if spec.window is not None:
        distance = (positions.cpu()[list(asked), None] - key_positions[None, :]).abs()
        visible &= distance < spec.window
    return visible


def stored_entries(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Entries as a cache of that dtype stores them: divided by the scale in fp32, saturated, rounded to nearest.

    Only scaled dtypes have a scale other than 1. Values out of range are clamped, because a cast alone may give NaN.
    """
    if dtype not in SCALED_DTYPES:
        return values.to(dtype)
    largest = torch.finfo(dtype).max
    return (values.float() / scale).clamp(-largest, largest).to(dtype)


def loaded_entries(stored: Tensor, scale: float) -> Tensor:
    """Entries as read from a cache; fp32 for scaled dtypes."""
    return stored.float() * scale if stored.dtype in SCALED_DTYPES else stored


def attend_row(
    spec: SoftmaxSpec, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of one row: q [query_len, q_heads, d], k and v [seq_len, kv_heads, d], visible [query_len, seq_len].

    Returns the output [query_len, q_heads, d] and the natural log-sum-exp [query_len, q_heads], fp32.
    """
    # Each group of query heads shares one key-value head.
    groups = q.float().reshape(q.shape[0], spec.num_kv_heads, spec.group_size, spec.head_dim)
    scores = torch.einsum("qkgd,skd->qkgs", groups, k.float()).flatten(1, 2) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    return _gather(scores, v.float().repeat_interleave(spec.group_size, dim=1), visible, sinks)


def attend_latent_row(
    spec: LatentSpec,
    q_nope: Tensor,
    q_rope: Tensor,
    entries: Tensor,
    key_up: Tensor,
    value_up: Tensor,
    visible: Tensor,
) -> tuple[Tensor, Tensor]:
    """Latent attention of one row: expands every head's keys and values from the entries, then applies softmax.

    q_nope [query_len, heads, nope], q_rope [query_len, heads, rope], entries [seq_len, latent | rope], key_up [heads,
    nope, latent], value_up [heads, value, latent], visible [query_len, seq_len]. Returns the output [query_len, heads,
    value] and the natural log-sum-exp [query_len, heads], fp32.
    """
    latents, ropes = entries[:, : spec.latent_dim].float(), entries[:, spec.latent_dim :].float()
    keys = torch.einsum("sl,hnl->shn", latents, key_up.float())
    values = torch.einsum("sl,hvl->shv", latents, value_up.float())
    scores = torch.einsum("qhn,shn->qhs", q_nope.float(), keys) + torch.einsum("qhr,sr->qhs", q_rope.float(), ropes)
    return _gather(scores * spec.scale, values, visible, None)


def _gather(scores: Tensor, values: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax of scores [query_len, heads, seq_len] over visible keys, applied to values [seq_len, heads, ...].

    Invisible keys are ignored, even if NaN. A sink adds to the denominator and contributes no value. A query that sees
    no key gives 0, with an LSE of -inf.
    """
    visible = visible.to(scores.device)
    logits = scores.masked_fill(~visible[:, None, :], -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.float().view(1, -1, 1).expand(*logits.shape[:2], 1)], dim=-1)
    lse = torch.logsumexp(logits, dim=-1)
    out = scores.new_zeros(*scores.shape[:2], values.shape[-1])
    for query, seen in enumerate(visible):
        weights = torch.exp(scores[query][:, seen] - lse[query, :, None])
        out[query] = torch.einsum("hs,shd->hd", weights, values[seen])
    return out, lse
