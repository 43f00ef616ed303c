"""Layer norm and RMS norm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class LayerNorm:
    """(x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias over the last dimension, computed in fp32."""

    def __init__(self, weight: Tensor, bias: Tensor, epsilon: float) -> None:
        """`weight` and `bias` are [features] fp32."""
        self.weight = weight
        self.bias = bias
        self.epsilon = epsilon

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Writes `out`, which may be x itself."""
        out.copy_(F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.epsilon))


class RmsNorm:
    """x / sqrt(mean(x²) + epsilon) * weight over the last dimension, computed in fp32."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        """`weight` is [features] fp32."""
        self.weight = weight
        self.epsilon = epsilon
        num_features = weight.shape[0]
        self._least_length = torch.tensor((num_features * epsilon) ** 0.5, dtype=torch.float32, device=weight.device)
        self._scaled_weight = weight * num_features**0.5

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Writes `out`, which may be x itself."""
        if x.dtype != torch.float32:
            out.copy_(F.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon))
            return
        # The vector's length instead of its mean square takes four small operations: torch's own norm takes twice as
        # long for one row and ten times as long for a prompt.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        torch.div(x, length.hypot_(self._least_length), out=out).mul_(self._scaled_weight)
