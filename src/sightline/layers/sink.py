"""Where a sub-layer's result goes: added to the stream, or written to a buffer of its own.

A result that is normalised before it is added needs its own buffer. Otherwise the last product adds it directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sightline.layers.linear import Projection


@dataclass(frozen=True, eq=False)
class Sink(ABC):
    """Takes a result [num_tokens, hidden_size] once. The sink that `onto` returns takes further parts of it."""

    target: Tensor
    adds: ClassVar[bool]
    """True if a result is added to the target, False if it replaces its contents."""

    @abstractmethod
    def take_product(self, projection: Projection, x: Tensor) -> None:
        """Takes the projection of x."""

    @abstractmethod
    def take(self, result: Tensor) -> None:
        """Takes the result."""

    def onto(self) -> Added:
        """A sink that adds a further part to a result of which this one took the first."""
        return Added(self.target)


class Added(Sink):
    """Adds the result to the target."""

    adds = True

    def take_product(self, projection: Projection, x: Tensor) -> None:
        projection.add(x, self.target)

    def take(self, result: Tensor) -> None:
        self.target.add_(result)


class Written(Sink):
    """Overwrites the target with the result."""

    adds = False

    def take_product(self, projection: Projection, x: Tensor) -> None:
        projection(x, self.target)

    def take(self, result: Tensor) -> None:
        self.target.copy_(result)
