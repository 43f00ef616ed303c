"""Where a sub-layer's input comes from: rows as they are, or the norm of the residual stream.

A norm is computed only when it is needed, because a projection may have a kernel that computes it on the way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from sightline.layers.activation import Gate
from sightline.layers.linear import GateRoom, Projection, Unnormed
from sightline.layers.operations import Operations


class Source(ABC):
    """The input [num_tokens, hidden_size] of a sub-layer, which asks for one of these once."""

    @abstractmethod
    def rows(self, operations: Operations) -> Tensor:
        """The input itself."""

    @abstractmethod
    def give_product(self, projection: Projection, out: Tensor, operations: Operations) -> None:
        """Writes the projection of the input to `out`."""

    @abstractmethod
    def give_gated(self, projection: Projection, kind: Gate, room: GateRoom, operations: Operations) -> None:
        """Writes the combination of gate and up, which are the halves of the projection, to `room.gated`."""


@dataclass(frozen=True, eq=False)
class Given(Source):
    """Rows as they are."""

    x: Tensor

    def rows(self, operations: Operations) -> Tensor:
        del operations
        return self.x

    def give_product(self, projection: Projection, out: Tensor, operations: Operations) -> None:
        del operations
        projection(self.x, out)

    def give_gated(self, projection: Projection, kind: Gate, room: GateRoom, operations: Operations) -> None:
        projection.gated(kind, self.x, room, operations)


@dataclass(frozen=True, eq=False)
class Normed(Source):
    """The norm of some rows."""

    unnormed: Unnormed

    def rows(self, operations: Operations) -> Tensor:
        return self.unnormed.normed(operations)

    def give_product(self, projection: Projection, out: Tensor, operations: Operations) -> None:
        projection.of_norm(self.unnormed, out, operations)

    def give_gated(self, projection: Projection, kind: Gate, room: GateRoom, operations: Operations) -> None:
        projection.gated_of_norm(kind, self.unnormed, room, operations)
