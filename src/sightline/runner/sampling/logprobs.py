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


def score_tokens(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """Scores the token of each row and its `most` likeliest; logits [num_rows, vocab_size] fp32, tokens int64.

    Returns [num_rows, 4 + 2 * most] fp64 on the same device, for `read_scores`; fp64 holds ids and fp32 exactly.
    """
    there = tokens.unsqueeze(1)
    value = logits.gather(1, there)
    finite = logits.amax(dim=-1).isfinite() & logits.amin(dim=-1).isfinite()
    rank = (logits >= value).sum(dim=-1)
    best, best_tokens = logits.topk(min(most, logits.shape[1]), dim=-1)
    logprobs = torch.cat([value, best], dim=1).sub(logits.logsumexp(dim=-1, keepdim=True))
    flags = torch.stack([finite, rank], dim=1)
    return torch.cat([part.double() for part in (flags, there, best_tokens, logprobs)], dim=1)


def are_finite(scores: Sequence[float]) -> bool:
    """Whether the logits behind a row of `score_tokens` are finite. If not, its other values mean nothing."""
    return scores[0] == 1.0


def read_scores(scores: Sequence[float], num_best: int) -> TokenLogprobs:
    """The log probabilities in one row of `score_tokens`, of at most the `num_best` likeliest tokens."""
    middle = len(scores) // 2 + 1
    named = tuple(map(int, scores[2:middle][: num_best + 1]))
    return TokenLogprobs(named, tuple(scores[middle:][: num_best + 1]), (int(scores[1]), *range(1, len(named))))
