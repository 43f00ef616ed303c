"""Where a sub-layer's result goes: onto the stream, or into a buffer of its own.

A layer whose result is normalised before it is added needs it alone; every other one adds as it multiplies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from sightline.layers.linear import Projection


@dataclass(frozen=True, eq=False)
class Sink(ABC):
    """Takes a result [num_tokens, hidden_size] once; what `onto` gives takes more of it."""

    target: Tensor

    @abstractmethod
    def take_product(self, projection: Projection, x: Tensor) -> None:
        """Takes the projection of x."""

    @abstractmethod
    def take(self, result: Tensor) -> None:
        """Takes the result as it is."""

    def onto(self) -> Added:
        """The sink for the next part of a result of which this one took a part."""
        return Added(self.target)


class Added(Sink):
    """To what the target holds."""

    def take_product(self, projection: Projection, x: Tensor) -> None:
        projection.add(x, self.target)

    def take(self, result: Tensor) -> None:
        self.target.add_(result)


class Written(Sink):
    """Over what the target holds."""

    def take_product(self, projection: Projection, x: Tensor) -> None:
        projection(x, self.target)

    def take(self, result: Tensor) -> None:
        self.target.copy_(result)
