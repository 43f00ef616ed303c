"""Gated feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch.nn.functional as F
from torch import Tensor

from sightline.layers.linear import Linear


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
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        activated = F.silu(gate) if self.activation is Activation.SILU else F.gelu(gate, approximate="tanh")
        return self.down(activated * up)
