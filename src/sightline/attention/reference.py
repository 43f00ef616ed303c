"""The oracle: attention for one row in fp32, one head at a time, written to be read.

Every backend is compared with this. It knows a row's keys and values as dense tensors and nothing of pages, and what
is left of an entry that went through a cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sightline.attention.spec import AttentionSpec, LatentSpec, SoftmaxSpec
from sightline.cache.spec import SCALED_DTYPES
from sightline.core.batch import MaskKind, RowMask


def visible_keys(spec: AttentionSpec, mask: RowMask, context_len: int, positions: Tensor) -> Tensor:
    """[query_len, seq_len] bool: True where query i sees key j. `positions` [query_len] are the new tokens' own."""
    query_len = positions.shape[0]
    context_positions = torch.arange(context_len)
    key_positions = torch.cat([context_positions, positions.cpu()])
    visible = torch.ones(query_len, context_len + query_len, dtype=torch.bool)
    for query in range(query_len):
        if mask.kind is MaskKind.CAUSAL:
            visible[query, context_len + query + 1 :] = False
        elif mask.tree is not None:
            visible[query, context_len:] = mask.tree[query]
    if spec.window is not None:
        distance = (positions.cpu()[:, None] - key_positions[None, :]).abs()
        visible &= distance < spec.window
    return visible


def stored_entries(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Entries as a cache of that dtype holds them: divided by the scale in fp32, saturated, rounded to the nearest.

    Only scaled dtypes have a scale other than 1. What is beyond their range becomes their largest number: a cast alone
    may make NaN of it.
    """
    if dtype not in SCALED_DTYPES:
        return values.to(dtype)
    largest = torch.finfo(dtype).max
    return (values.float() / scale).clamp(-largest, largest).to(dtype)


def loaded_entries(stored: Tensor, scale: float) -> Tensor:
    """Entries as they are read from a cache; of scaled dtypes in fp32."""
    return stored.float() * scale if stored.dtype in SCALED_DTYPES else stored


def attend_row(
    spec: SoftmaxSpec, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of one row: q [query_len, q_heads, d], k and v [seq_len, kv_heads, d], visible [query_len, seq_len].

    Returns the output [query_len, q_heads, d] and the natural log-sum-exp [query_len, q_heads], fp32.
    """
    out = torch.zeros(q.shape[0], spec.num_q_heads, spec.head_dim, device=q.device)
    lse = torch.full((q.shape[0], spec.num_q_heads), -torch.inf, device=q.device)
    for query in range(q.shape[0]):
        seen = visible[query].nonzero().squeeze(1).to(q.device)
        for head in range(spec.num_q_heads):
            keys = k[seen, head // spec.group_size].float()
            values = v[seen, head // spec.group_size].float()
            scores = keys @ q[query, head].float() * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            logits = scores if sinks is None else torch.cat([scores, sinks[head].float().view(1)])
            if logits.numel() == 0:
                continue
            lse[query, head] = torch.logsumexp(logits, dim=0)
            out[query, head] = torch.exp(scores - lse[query, head]) @ values
    return out, lse


def attend_latent_row(
    spec: LatentSpec,
    q_nope: Tensor,
    q_rope: Tensor,
    entries: Tensor,
    key_up: Tensor,
    value_up: Tensor,
    visible: Tensor,
) -> tuple[Tensor, Tensor]:
    """Latent attention of one row: every head's keys and values are made from the entries, and then it is softmax.

    q_nope [query_len, heads, nope], q_rope [query_len, heads, rope], entries [seq_len, latent | rope], key_up
    [heads, nope, latent], value_up [heads, value, latent], visible [query_len, seq_len]. Returns the output
    [query_len, heads, value] and the natural log-sum-exp [query_len, heads], fp32.
    """
    out = torch.zeros(q_nope.shape[0], spec.num_q_heads, spec.value_dim, device=q_nope.device)
    lse = torch.full((q_nope.shape[0], spec.num_q_heads), -torch.inf, device=q_nope.device)
    latents, ropes = entries[:, : spec.latent_dim].float(), entries[:, spec.latent_dim :].float()
    for head in range(spec.num_q_heads):
        keys = torch.cat([latents @ key_up[head].float().T, ropes], dim=-1)
        values = latents @ value_up[head].float().T
        for query in range(q_nope.shape[0]):
            seen = visible[query].nonzero().squeeze(1).to(q_nope.device)
            if seen.numel() == 0:
                continue
            q = torch.cat([q_nope[query, head], q_rope[query, head]]).float()
            scores = keys[seen] @ q * spec.scale
            lse[query, head] = torch.logsumexp(scores, dim=0)
            out[query, head] = torch.exp(scores - lse[query, head]) @ values[seen]
    return out, lse
