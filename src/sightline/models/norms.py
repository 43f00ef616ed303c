"""Loading of RMS norms."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sightline.layers.norm import RmsNorm
from sightline.models.weights import WeightReader


@dataclass(frozen=True)
class NormDefinition:
    """The settings that the norms of a model share."""

    epsilon: float
    offset: float = 0.0
    """Added to every stored weight."""

    def load(self, weights: WeightReader, name: str, features: int) -> RmsNorm:
        """Loads the norm over `features` that is stored as `name`.weight."""
        weight = weights.take(f"{name}.weight", (features,), dtype=torch.float32)
        return RmsNorm(weight + self.offset, self.epsilon)

    def of_divided(self, divisor: float) -> NormDefinition:
        """The norm that gives the same for rows that are divided by `divisor`."""
        return replace(self, epsilon=self.epsilon / divisor**2)
