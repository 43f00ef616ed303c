"""Layer norm and RMS norm, as data. Operations compute them, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """(x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias over the last dimension."""

    weight: Tensor
    """[features] fp32."""
    bias: Tensor
    """[features] fp32."""
    epsilon: float


class RmsNorm:
    """x / sqrt(mean(x²) + epsilon) * weight over the last dimension.

    The same as x / hypot(length(x), `least_length`) * `scaled_weight`, with the length of the vector.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        """`weight` is [features] fp32."""
        self.weight = weight
        self.epsilon = epsilon
        num_features = weight.shape[0]
        self.least_length = torch.tensor((num_features * epsilon) ** 0.5, dtype=torch.float32, device=weight.device)
        self.scaled_weight = weight * num_features**0.5

    def times(self, factor: float) -> RmsNorm:
        """The norm whose result is multiplied by `factor`."""
        return RmsNorm(self.weight * factor, self.epsilon)


@dataclass(frozen=True, eq=False)
class GroupNorm:
    """An RMS norm of each group of features on its own."""

    weight: Tensor
    """[num_groups, size] fp32."""
    epsilon: float


class HeadNorms(NamedTuple):
    """The norms of queries and keys, per head."""

    q: RmsNorm
    k: RmsNorm
    """The same as `q` in a layer without keys."""
