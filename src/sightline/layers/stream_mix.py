"""How parts of a network read several residual streams and add to them, as data. Operations compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class StreamRule:
    """What all parts of a network with several residual streams have in common."""

    count: int
    """The number of streams."""
    num_rounds: int
    """How often the mixing of the streams is divided by the sums of its columns; between, by those of its rows."""
    epsilon: float
    """Added to shares of reading, to the mixing, and to the sums that it is divided by."""
    norm_epsilon: float
    """The epsilon of the norm over all streams of a token."""

    @property
    def num_logits(self) -> int:
        """The numbers that a part projects the streams to: shares of reading, of writing, and the mixing."""
        return self.count * (2 + self.count)


@dataclass(frozen=True, eq=False)
class StreamMix:
    """How one part reads and writes the streams. Shares are functions of scale * logit + base."""

    rule: StreamRule
    scale: Tensor
    """fp32: [3], for shares of reading, of writing, and the mixing; [1] for what only reads."""
    base: Tensor
    """[num_logits] fp32; [count] for what only reads."""


class StreamShares(NamedTuple):
    """How a part's result is added to the streams."""

    writing: Tensor
    """[num_tokens, count] fp32: the share of the result in each stream."""
    mixing: Tensor
    """[num_tokens, count, count] fp32: how much of stream j (the first of both) goes to stream k."""
