"""Matrix products with weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from sightline.kernels.block_product import BlockProduct


class Projection(ABC):
    """y = x W^T + b, however the weights are kept. Outputs may lie in any order in memory."""

    in_features: int
    out_features: int
    turns: ClassVar[bool]
    """Whether a batch of rows is faster feature by feature, which is then how activations lie in memory."""

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Writes `out` [rows, out_features] from x [rows, in_features]."""

    @abstractmethod
    def add(self, x: Tensor, out: Tensor) -> None:
        """As `__call__`, added to what `out` holds."""


class Linear(Projection):
    """With dense weights."""

    turns = True

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

    def add(self, x: Tensor, out: Tensor) -> None:
        out.addmm_(x, self._transposed)
        if self.bias is not None:
            out.add_(self.bias)


class BlockLinear(Projection):
    """With weights that stay quantised in blocks."""

    turns = False

    def __init__(self, product: BlockProduct, bias: Tensor | None = None) -> None:
        """Bias [out_features]."""
        self.product = product
        self.bias = bias
        self.out_features, self.in_features = product.out_features, product.in_features

    def __call__(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self.product(x))
        if self.bias is not None:
            out.add_(self.bias)

    def add(self, x: Tensor, out: Tensor) -> None:
        out.add_(self.product(x))
        if self.bias is not None:
            out.add_(self.bias)
