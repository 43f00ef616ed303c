"""Matrix products with weights."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Projection(ABC):
    """y = x W^T + b, however the weights are kept."""

    in_features: int
    out_features: int

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Writes `out` [rows, out_features] from x [rows, in_features]. `out` may lie in any order in memory."""


class Linear(Projection):
    """With dense weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Weight [out_features, in_features], bias [out_features]."""
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self._transposed = weight.t()

    def __call__(self, x: Tensor, out: Tensor) -> None:
        if self.bias is None:
            torch.mm(x, self._transposed, out=out)
        else:
            torch.addmm(self.bias, x, self._transposed, out=out)
