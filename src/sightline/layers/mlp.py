"""Gated feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from sightline.layers.linear import Projection
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink


class Activation(Enum):
    """The gate's non-linearity."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"

    def __call__(self, gate: Tensor) -> Tensor:
        return F.silu(gate) if self is Activation.SILU else F.gelu(gate, approximate="tanh")


class MlpBuffers:
    """Gate and up side by side, and what becomes of them."""

    def __init__(self, scratch: Scratch, intermediate: int) -> None:
        self.gate_up = scratch.take("mlp.gate_up", 2 * intermediate)
        self.gate, self.up = self.gate_up.chunk(2, dim=-1)
        self.gated = scratch.take("mlp.gated", intermediate)


@dataclass(frozen=True, eq=False)
class GatedMlp:
    """down(act(gate(x)) * up(x))."""

    gate_up: Projection
    """Gate and up side by side: [2 * intermediate, hidden]."""
    down: Projection
    activation: Activation

    def buffers(self, scratch: Scratch) -> MlpBuffers:
        return scratch.of(MlpBuffers, self.down.in_features)

    def __call__(self, x: Tensor, sink: Sink, scratch: Scratch) -> None:
        """From x [num_tokens, hidden]."""
        buffers = self.buffers(scratch)
        self.gate_up(x, buffers.gate_up)
        torch.mul(self.activation(buffers.gate), buffers.up, out=buffers.gated)
        sink.take_product(self.down, buffers.gated)
