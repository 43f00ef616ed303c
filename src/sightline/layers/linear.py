"""Matrix products with weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Linear:
    """y = x W^T + b."""

    weight: Tensor
    """[out_features, in_features]."""
    bias: Tensor | None = None
    """[out_features]."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] to [rows, out_features], contiguous."""
        if prefers_feature_major(x.shape[0]):
            return self.feature_major(x.t()).t().contiguous()
        return F.linear(x, self.weight, self.bias)

    def feature_major(self, x: Tensor) -> Tensor:
        """The same product the other way round: [in_features, rows] to [out_features, rows]."""
        if self.bias is None:
            return torch.mm(self.weight, x)
        return torch.addmm(self.bias.unsqueeze(1), self.weight, x)


def prefers_feature_major(num_rows: int) -> bool:
    """True where W x is faster than x W^T: a batch of decoding rows, but neither one of a few nor a prefill.

    Measured for a feed-forward's shapes: at 16 rows 1.3 to 1.9 times as fast, at 8 and 48 about equal to 1.2 times,
    slower at 2 to 4 and at 64 (docs/benchmarks.md).
    """
    return 6 <= num_rows <= 48


def fuse(parts: Sequence[Linear]) -> Linear:
    """One product in place of several with the same input: their outputs side by side."""
    biases = [part.bias for part in parts if part.bias is not None]
    if biases and len(biases) != len(parts):
        raise ValueError(f"expected all or none of {len(parts)} projections to have a bias, got {len(biases)}")
    return Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)
