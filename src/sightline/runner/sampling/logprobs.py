"""How likely the model itself held tokens to be.

Of the raw logits, before temperature, penalties, bias and truncation: what the model says, not what was asked of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one position: the token that is there, then the likeliest, which may name it again."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    """1 for the likeliest. The first token's counts all that are at least as likely."""


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_best: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of logits [num_rows, vocab_size] fp32, its token and its `num_best` likeliest."""
    if not tokens:
        return []
    there = torch.tensor(tokens, dtype=torch.int64, device=logits.device).unsqueeze(1)
    total = logits.logsumexp(dim=-1, keepdim=True)
    value = logits.gather(1, there)
    rank = (logits >= value).sum(dim=-1, dtype=torch.int32).tolist()
    best, best_tokens = logits.topk(min(max(num_best), logits.shape[1]), dim=-1)
    logprobs = torch.cat([value, best], dim=1).sub(total).tolist()
    named = torch.cat([there, best_tokens], dim=1).tolist()
    return [
        TokenLogprobs(
            tuple(named[row][: count + 1]), tuple(logprobs[row][: count + 1]), (rank[row], *range(1, count + 1))
        )
        for row, count in enumerate(min(count, logits.shape[1]) for count in num_best)
    ]
