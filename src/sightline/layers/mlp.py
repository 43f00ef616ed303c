"""Feed-forward layers, gated and plain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sightline.layers.linear import Projection
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink


class Activation(Enum):
    """The non-linearity of a feed-forward."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"

    def __call__(self, x: Tensor) -> Tensor:
        return _ACTIVATIONS[self](x)


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.RELU: F.relu,
}


class MlpBuffers:
    """Buffers for gate and up, side by side, and for their product."""

    def __init__(self, scratch: Scratch, intermediate: int) -> None:
        self.gate_up = scratch.take("mlp.gate_up", 2 * intermediate)
        self.gate, self.up = self.gate_up.chunk(2, dim=-1)
        self.gated = scratch.take("mlp.gated", intermediate)


class PlainMlpBuffers:
    """The buffer between the two products."""

    def __init__(self, scratch: Scratch, intermediate: int) -> None:
        self.inner = scratch.take("mlp.inner", intermediate)


@dataclass(frozen=True, eq=False)
class PlainMlp:
    """down(act(up(x)))."""

    up: Projection
    down: Projection
    activation: Activation

    def buffers(self, scratch: Scratch) -> PlainMlpBuffers:
        return scratch.of(PlainMlpBuffers, self.down.in_features)

    def __call__(self, x: Tensor, sink: Sink, scratch: Scratch) -> None:
        """Gives the result for x [num_tokens, hidden] to the sink."""
        buffers = self.buffers(scratch)
        self.up(x, buffers.inner)
        sink.take_product(self.down, self.activation(buffers.inner))


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
        """Gives the result for x [num_tokens, hidden] to the sink."""
        buffers = self.buffers(scratch)
        self.gate_up(x, buffers.gate_up)
        torch.mul(self.activation(buffers.gate), buffers.up, out=buffers.gated)
        sink.take_product(self.down, buffers.gated)
