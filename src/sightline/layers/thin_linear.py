"""Products with dense weights on a GPU: those of few rows by kernels of our own, others by the vendor's library.

Needs Triton.
"""

from __future__ import annotations

from torch import Tensor

from sightline.kernels.triton.row_product import InputNorm, fits_row_product, row_gated_product, row_product
from sightline.kernels.triton.thin_product import (
    exact_product,
    fits_exact_product,
    fits_thin_product,
    thin_gated_product,
    thin_product,
)
from sightline.layers.activation import Gate
from sightline.layers.linear import GateRoom, Linear, Unnormed
from sightline.layers.operations import Operations
from sightline.layers.triton_operations import gate_rule


class ThinLinear(Linear):
    """A projection with dense weights that reads them at the rate of memory if it has few rows."""

    turns = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, overlaps: bool) -> None:
        """`overlaps` is as in `TritonOperations`."""
        super().__init__(weight, bias)
        self._overlaps = overlaps

    def __call__(self, x: Tensor, out: Tensor) -> None:
        if fits_row_product(x, self.weight):
            row_product(x, self.weight, self.bias, out, adds=False, overlaps=self._overlaps)
        elif fits_thin_product(x, self.weight):
            thin_product(x, self.weight, self.bias, out, adds=False, overlaps=self._overlaps)
        elif fits_exact_product(x, self.weight):
            exact_product(x, self.weight, self.bias, out, overlaps=self._overlaps)
        else:
            super().__call__(x, out)

    def add(self, x: Tensor, out: Tensor) -> None:
        if fits_row_product(x, self.weight):
            row_product(x, self.weight, self.bias, out, adds=True, overlaps=self._overlaps)
        elif fits_thin_product(x, self.weight):
            thin_product(x, self.weight, self.bias, out, adds=True, overlaps=self._overlaps)
        else:
            super().add(x, out)

    def gated(self, kind: Gate, x: Tensor, room: GateRoom, operations: Operations) -> None:
        if fits_row_product(x, self.weight):
            row_gated_product(x, self.weight, self.bias, gate_rule(kind), room.gated, overlaps=self._overlaps)
        elif fits_thin_product(x, self.weight):
            thin_gated_product(x, self.weight, self.bias, gate_rule(kind), room.gated, overlaps=self._overlaps)
        else:
            super().gated(kind, x, room, operations)

    def of_norm(self, rows: Unnormed, out: Tensor, operations: Operations) -> None:
        if fits_row_product(rows.x, self.weight):
            norm = InputNorm(rows.norm.weight, rows.norm.epsilon)
            row_product(rows.x, self.weight, self.bias, out, adds=False, overlaps=self._overlaps, norm=norm)
        else:
            super().of_norm(rows, out, operations)

    def gated_of_norm(self, kind: Gate, rows: Unnormed, room: GateRoom, operations: Operations) -> None:
        if fits_row_product(rows.x, self.weight):
            norm, rule = InputNorm(rows.norm.weight, rows.norm.epsilon), gate_rule(kind)
            row_gated_product(rows.x, self.weight, self.bias, rule, room.gated, overlaps=self._overlaps, norm=norm)
        else:
            super().gated_of_norm(kind, rows, room, operations)
