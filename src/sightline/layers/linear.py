"""Matrix products with weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sightline.kernels.block_product import BlockProduct
from sightline.layers.activation import Gate
from sightline.layers.norm import RmsNorm
from sightline.layers.operations import Operations


class GateRoom(NamedTuple):
    """Memory for gate and up and their combination."""

    gate_up: Tensor
    """[rows, 2 * size]: both, side by side. May be left as it is."""
    gate: Tensor
    """The first half."""
    up: Tensor
    gated: Tensor
    """[rows, size]: the result."""


class Unnormed(NamedTuple):
    """Rows whose norm is wanted."""

    x: Tensor
    """[rows, features]."""
    norm: RmsNorm
    room: Tensor
    """Memory for the norm, in the shape of x. May be left as it is."""

    def normed(self, operations: Operations) -> Tensor:
        """Computes the norm."""
        operations.norm(self.x, self.norm, self.room)
        return self.room


class Projection(ABC):
    """y = x W^T + b. Outputs may have any memory layout."""

    in_features: int
    out_features: int
    turns: ClassVar[bool]
    """True if a batch of rows is faster with feature-major activations."""

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Writes `out` [rows, out_features] from x [rows, in_features].

        If the weights have a wider dtype than x, the product is computed in theirs.
        """

    @abstractmethod
    def add(self, x: Tensor, out: Tensor) -> None:
        """Adds the result to `out`."""

    def gated(self, kind: Gate, x: Tensor, room: GateRoom, operations: Operations) -> None:
        """Writes the combination of gate and up, which are the halves of the projection of x, to `room.gated`."""
        self(x, room.gate_up)
        operations.gate(kind, room.gate, room.up, room.gated)

    def of_norm(self, rows: Unnormed, out: Tensor, operations: Operations) -> None:
        """Writes the projection of the norm of the rows."""
        self(rows.normed(operations), out)

    def gated_of_norm(self, kind: Gate, rows: Unnormed, room: GateRoom, operations: Operations) -> None:
        """`gated`, of the norm of the rows."""
        self.gated(kind, rows.normed(operations), room, operations)


class Linear(Projection):
    """A projection with dense weights."""

    turns = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` is [out_features, in_features], `bias` [out_features]."""
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self._transposed = weight.t()

    def __call__(self, x: Tensor, out: Tensor) -> None:
        x = x.to(self.weight.dtype)
        if self.bias is None:
            torch.mm(x, self._transposed, out=out)
        else:
            torch.addmm(self.bias, x, self._transposed, out=out)

    def add(self, x: Tensor, out: Tensor) -> None:
        out.addmm_(x, self._transposed)
        if self.bias is not None:
            out.add_(self.bias)


class BlockLinear(Projection):
    """A projection with weights that stay quantised in blocks."""

    turns = False

    def __init__(self, product: BlockProduct, bias: Tensor | None = None) -> None:
        """`bias` is [out_features]."""
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


class GroupedLinear(Projection):
    """Projections of groups of inputs, each to outputs of its own, without bias."""

    turns = False

    def __init__(self, weight: Tensor) -> None:
        """`weight` is [groups, outputs of a group, inputs of a group]."""
        self.weight = weight
        groups, outputs, inputs = weight.shape
        self.in_features, self.out_features = groups * inputs, groups * outputs
        self._transposed = weight.mT

    def __call__(self, x: Tensor, out: Tensor) -> None:
        groups, outputs, inputs = self.weight.shape
        given = x.view(len(x), groups, inputs).transpose(0, 1)
        room = out.view(len(x), groups, outputs).transpose(0, 1)
        torch.bmm(given, self._transposed, out=room)

    def add(self, x: Tensor, out: Tensor) -> None:
        result = torch.empty_like(out)
        self(x, result)
        out.add_(result)
