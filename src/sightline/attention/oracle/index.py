"""The oracle of indexers: scores in fp32, sorted query by query. Slow on purpose."""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """The scores [query_len, seq_len] fp32 of keys [seq_len, head_dim] for queries [query_len, heads, head_dim] with
    weights [query_len, heads]."""
    products = torch.einsum("qhd,sd->qhs", q.float(), keys.float())
    return torch.einsum("qh,qhs->qs", weights.float(), products.clamp(min=0.0))


def choose_tokens(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Returns the choice [query_len, top_k] int32 by scores [query_len, seq_len] among visible tokens.

    The highest scores are chosen; of equal ones, those at lower positions. A choice is in the order of positions, with
    -1 behind the last.
    NaN counts as the highest score.
    """
    chosen = torch.full((scores.shape[0], top_k), -1, dtype=torch.int32, device=scores.device)
    ranked = scores.masked_fill(scores.isnan(), torch.inf)
    for query, (row, seen) in enumerate(zip(ranked.tolist(), visible.tolist(), strict=True)):
        candidates = [position for position, sees in enumerate(seen) if sees]
        best = sorted(candidates, key=lambda position: (-row[position], position))[:top_k]
        chosen[query, : len(best)] = torch.tensor(sorted(best), dtype=torch.int32, device=scores.device)
    return chosen


def chosen_mask(chosen: Tensor, seq_len: int) -> Tensor:
    """[query_len, seq_len] bool: True for the positions in `chosen` [query_len, top_k]."""
    mask = torch.zeros(chosen.shape[0], seq_len, dtype=torch.bool, device=chosen.device)
    for query, positions in enumerate(chosen.tolist()):
        mask[query, [position for position in positions if position >= 0]] = True
    return mask


def stored_keys(keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """8-bit keys [n, head_dim] and their scales [n, 1] fp32.

    A scale is the least power of two at which the largest number of a key fits the dtype.
    """
    largest = keys.float().abs().amax(dim=-1, keepdim=True)
    limit = torch.finfo(dtype).max
    scales = torch.exp2(torch.ceil(torch.log2((largest / limit).clamp(min=2.0**-100))))
    return (keys.float() / scales).clamp(-limit, limit).to(dtype), scales
