"""Dense softmax attention over already gathered keys and values, with torch.

`fused_attention` calls `scaled_dot_product_attention`. `composed_attention` uses plain products and supports what the
fused one does not: softcap, sinks, log-sum-exp. Both take

    q [rows, query_len, q_heads, head_dim]     k, v [rows, kv_heads, kv_len, head_dim]
    bias [rows, 1, query_len, kv_len] or None, 0 where visible and -inf where not

and grouped queries: query head h reads key head h // (q_heads / kv_heads).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, scale: float, causal: bool) -> Tensor:
    """Returns [rows, query_len, q_heads, head_dim]. `causal` needs equal lengths and no bias."""
    rows, query_len, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if query_len == 1:
        # The query heads of a key head become query positions, so that each key is read once.
        group = q_heads // kv_heads
        folded = q.view(rows, kv_heads, group, head_dim)
        shared = None if bias is None else bias.expand(-1, -1, group, -1)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=shared, scale=scale)
        return out.reshape(rows, 1, q_heads, v.shape[3])
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def composed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns the output like `fused_attention`, and the natural log-sum-exp [rows, query_len, q_heads].

    Scores are fp32. `sinks` [q_heads] are logits that take weight and add no value; the log-sum-exp includes them. For
    a query that sees nothing the results are 0 and -inf.
    """
    rows, query_len, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = q_heads // kv_heads
    queries = q.float().view(rows, query_len, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    keys = k.float().transpose(2, 3).unsqueeze(2)
    scores = torch.matmul(queries, keys).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores = scores.add_(bias.unsqueeze(2))
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(1, kv_heads, group, 1))
    weights = scores.sub_(torch.where(lse.isneginf(), 0.0, lse).unsqueeze(-1)).exp_()
    values = v.float().unsqueeze(2)
    out = torch.matmul(weights, values).permute(0, 3, 1, 2, 4).reshape(rows, query_len, q_heads, v.shape[3])
    return out.to(q.dtype), lse.permute(0, 3, 1, 2).reshape(rows, query_len, q_heads)
