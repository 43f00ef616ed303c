"""Matrix products with weights."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sightline.kernels.block_product import BlockProduct


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


class BlockLinear(Projection):
    """With weights that stay quantised in blocks."""

    def __init__(self, product: BlockProduct, bias: Tensor | None = None) -> None:
        """Bias [out_features]."""
        self.product = product
        self.bias = bias
        self.out_features, self.in_features = product.out_features, product.in_features

    def __call__(self, x: Tensor, out: Tensor) -> None:
        if self.bias is None:
            out.copy_(self.product(x))
        else:
            torch.add(self.product(x), self.bias, out=out)
