"""Log probabilities of tokens under the raw logits: before temperature, penalties, bias and truncation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """The log probabilities at one position: of its token, then of the likeliest tokens, which may include it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    """The rank of each, 1 for the likeliest. The first token's rank counts all tokens that are at least as likely."""


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_best: Sequence[int]) -> list[TokenLogprobs]:
    """The log probabilities of each row's token and of its `num_best` likeliest; logits [num_rows, vocab_size] fp32."""
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
