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
        return F.linear(x, self.weight, self.bias)


def fuse(parts: Sequence[Linear]) -> Linear:
    """One product in place of several with the same input: their outputs side by side."""
    biases = [part.bias for part in parts if part.bias is not None]
    if biases and len(biases) != len(parts):
        raise ValueError(f"expected all or none of {len(parts)} projections to have a bias, got {len(biases)}")
    return Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)
