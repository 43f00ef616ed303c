"""How a token chooses experts: the score of a logit, the groups it may choose from, the weights of the chosen.

    logits ──Score──▶ scores ──+ correction──▶ ranks ──Groups──▶ allowed ──best──▶ chosen
                         └──────────────────── scores of the chosen ──Share, scale──▶ weights

Of equal ranks, that of the lower expert or group is higher, on every device. Where NaN ranks depends on its bits, so a
token with one is not ranked at all. Does not know experts, nor where logits come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

_NOTHING = 1e-20
"""Added to a divisor: scores may be so small that their sum is 0."""


class Score(Enum):
    """How a logit becomes a score."""

    SOFTMAX = "softmax"
    """The probability among all experts."""
    SIGMOID = "sigmoid"
    """Independent of the other experts."""
    SQRT_SOFTPLUS = "sqrt-softplus"
    """sqrt(log(1 + exp(logit))): independent of the other experts, and not bounded."""

    def __call__(self, logits: Tensor) -> Tensor:
        match self:
            case Score.SOFTMAX:
                return logits.softmax(dim=-1)
            case Score.SIGMOID:
                return logits.sigmoid()
            case Score.SQRT_SOFTPLUS:
                return F.softplus(logits).sqrt()


class Share(Enum):
    """How the weights of chosen experts are normalised."""

    OF_ALL = "all"
    """Not at all: the weight is the score. Under softmax the weights add up to less than 1."""
    OF_CHOSEN = "chosen"
    """Among the chosen experts: the weights add up to 1."""


@dataclass(frozen=True)
class Groups:
    """A limit on the groups of neighbouring experts that a token may use."""

    num_groups: int
    groups_per_token: int
    ranked_by: int
    """A group's rank is the sum of the ranks of its best experts; this is their number."""

    def __post_init__(self) -> None:
        if not 1 <= self.groups_per_token <= self.num_groups:
            raise ValueError(f"expected from 1 to {self.num_groups} groups for a token, got {self.groups_per_token}")

    def closed(self, ranks: Tensor) -> Tensor:
        """[num_tokens, num_experts] bool, from ranks of that shape: True for experts of groups that are not chosen."""
        group_size = ranks.shape[1] // self.num_groups
        grouped = ranks.reshape(ranks.shape[0], self.num_groups, group_size)
        of_groups = grouped.topk(self.ranked_by, dim=-1).values.sum(dim=-1)
        chosen = _best(of_groups, self.groups_per_token)
        closed = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, chosen, value=False)
        return closed.repeat_interleave(group_size, dim=1)


@dataclass(frozen=True)
class Routing:
    """How a token chooses the experts with the highest ranks. A rank is a score plus the correction, if any."""

    num_experts: int
    experts_per_token: int
    share: Share
    score: Score = Score.SOFTMAX
    groups: Groups | None = None
    corrected: bool = False
    """True if each expert has a learned number that is added to its score for the choice, but not for the weight."""
    scale: float = 1.0
    """Multiplies the weights."""

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"expected from 1 to {self.num_experts} experts for a token, got {self.experts_per_token}")
        if self.groups is None:
            return
        group_size, rest = divmod(self.num_experts, self.groups.num_groups)
        if rest or group_size < self.groups.ranked_by:
            raise ValueError(
                f"expected {self.num_experts} experts in equal groups of at least {self.groups.ranked_by}, got "
                f"{self.groups.num_groups} groups"
            )
        if self.experts_per_token > self.groups.groups_per_token * group_size:
            raise ValueError(
                f"expected at most the {self.groups.groups_per_token * group_size} experts of a token's groups, "
                f"got {self.experts_per_token}"
            )

    def choose(self, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Experts and their fp32 weights, both [num_tokens, experts_per_token], from [num_tokens, num_experts].

        `correction` is [num_experts] fp32 if the routing is corrected, otherwise None. A token with a score that is NaN
        gets the first experts, and NaN as all weights: its output is NaN, which is noticed before a token is chosen.
        """
        scores = self.score(logits.float())
        ranks = scores if correction is None else scores + correction
        is_broken = ranks.isnan().any(dim=-1, keepdim=True)
        ranks = ranks.masked_fill(is_broken, 0.0)
        closed = None if self.groups is None else self.groups.closed(ranks)
        experts = _best(ranks, self.experts_per_token, closed)
        return experts, self._weights(scores.gather(1, experts).masked_fill_(is_broken, math.nan))

    def weigh(self, logits: Tensor, experts: Tensor) -> Tensor:
        """The fp32 weights [num_tokens, per_token] of experts that were chosen without the logits, of that shape."""
        return self._weights(self.score(logits.float()).gather(1, experts.long()))

    def _weights(self, scores: Tensor) -> Tensor:
        """The weights of chosen experts, from their scores."""
        if self.share is Share.OF_CHOSEN:
            scores = scores / (scores.sum(dim=-1, keepdim=True) + _NOTHING)
        return scores if self.scale == 1.0 else scores * self.scale


def _best(ranks: Tensor, count: int, closed: Tensor | None = None) -> Tensor:
    """The indices of the highest ranks [rows, any] fp32, the lower index first of equal ones: `topk` takes any of them.

    The bits of a float are ordered as an integer if those of a negative number are inverted. Below them, the key has
    the index, so no two keys are equal. Where `closed`, of the same shape, is True, the key is below all others: as a
    rank, -inf would equal that of an expert with an infinite correction.
    """
    bits = ranks.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.long() << 32) - torch.arange(ranks.shape[1], device=ranks.device)
    if closed is not None:
        keys.masked_fill_(closed, torch.iinfo(torch.int64).min)
    return keys.topk(count, dim=-1).indices
