"""Attention of one row with torch, where a test stands in for somebody's kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal from the end: q [query_len, heads, dim], k and v [seq_len, kv_heads, dim]."""
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(groups, 1))
