"""Normalisation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class RmsNorm:
    """x / rms(x) * weight over the last dimension, computed in fp32."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        """Weight [features] fp32."""
        self.weight = weight
        self.epsilon = epsilon
        self._epsilon = torch.tensor(epsilon, dtype=torch.float32, device=weight.device)
        self._share = 1.0 / weight.shape[0]

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Writes `out`, which may be x itself."""
        if x.dtype != torch.float32:
            out.copy_(F.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon))
            return
        # Four small operations: torch's own norm takes twice their time for one row and ten times for a prompt.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        factor = torch.addcmul(self._epsilon, length, length, value=self._share).rsqrt_()
        torch.mul(x, factor, out=out).mul_(self.weight)
