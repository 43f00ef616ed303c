"""Gated feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch.nn.functional as F
from torch import Tensor

from sightline.layers.linear import Linear, prefers_feature_major


class Activation(Enum):
    """The gate's non-linearity."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, eq=False)
class GatedMlp:
    """down(act(gate(x)) * up(x))."""

    gate_up: Linear
    """Gate and up side by side: [2 * intermediate, hidden]."""
    down: Linear
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        if prefers_feature_major(x.shape[0]):
            gate, up = self.gate_up.feature_major(x.t()).chunk(2, dim=0)
            return self.down.feature_major(self._activate(gate).mul_(up)).t()
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self._activate(gate).mul_(up))

    def _activate(self, gate: Tensor) -> Tensor:
        return F.silu(gate) if self.activation is Activation.SILU else F.gelu(gate, approximate="tanh")
