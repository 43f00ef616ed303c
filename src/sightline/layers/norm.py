"""Normalisation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, eq=False)
class RmsNorm:
    """x / rms(x) * weight over the last dimension, computed in fp32."""

    weight: Tensor
    """[features] fp32."""
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(x.dtype)
