"""The Mamba-2 layer: projections, time steps and a gated norm around the recurrence that the plan computes.

    x ──inputs──▶ [ C | B | values | gate | times ]
                        mixed         │      └─softplus, limits──▶ time of each token and head, and its decay
                                      └─norm(output * SiLU(gate)), in groups

C is the query and B the key of a group of heads, and the time of a token is how much of its value is stored. The
outputs of `inputs` are in this order, which differs from the stored one: the loader reorders the rows of the weights.
Does not know states, slots or backends: the planned batch does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.contract import ConvWeights, RecurrentInputs
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import RecurrentSpec
from sightline.layers.linear import Projection
from sightline.layers.norm import GroupNorm
from sightline.layers.recurrent.token_rows import ContiguousTokens
from sightline.layers.rotary import RotaryTable
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink
from sightline.layers.source import Source
from sightline.layers.time_steps import TimeSteps


class MambaBuffers:
    """Buffers from the projection to the output of the recurrence, and views of them."""

    def __init__(self, scratch: Scratch, num_heads: int, channels: int, value_dim: int) -> None:
        size = num_heads * value_dim
        self.inputs = scratch.take("mamba.inputs", channels + size + num_heads)
        self.gate = self.inputs[:, channels : channels + size]
        self.unlimited = self.inputs[:, channels + size :]
        self.mixed = ContiguousTokens(scratch, "mamba.mixed", self.inputs, self.inputs[:, :channels])
        self.times = scratch.take_rows("mamba.times", num_heads, torch.float32)
        self.decays = scratch.take_rows("mamba.decays", num_heads, torch.float32)
        self.attended = scratch.take_rows("mamba.attended", size)
        self.attended_heads = self.attended.view(scratch.num_tokens, num_heads, value_dim)


@dataclass(frozen=True, eq=False)
class Mamba:
    """One layer."""

    layer: int
    """The layer's number in the model."""
    spec: RecurrentSpec
    inputs: Projection
    """Projects x to C, B, values, gate and times."""
    conv: ConvWeights
    steps: TimeSteps
    skip: Tensor
    """[num_heads] fp32: how much of a value is added to its output."""
    norm: GroupNorm
    """The norm of the gated output."""
    output: Projection

    @property
    def turns(self) -> bool:
        return self.inputs.turns

    def buffers(self, scratch: Scratch) -> MambaBuffers:
        return scratch.of(MambaBuffers, self.spec.num_heads, self.spec.channels, self.spec.value_dim)

    def __call__(
        self, source: Source, sink: Sink, planned: PlannedBatch, rotary: RotaryTable | None, scratch: Scratch
    ) -> None:
        """Gives the result for the source to the sink."""
        assert rotary is None
        buffers, operations = self.buffers(scratch), scratch.operations
        source.give_product(self.inputs, buffers.inputs, operations)
        buffers.mixed.fill()
        operations.time_steps(buffers.unlimited, self.steps, buffers.times, buffers.decays)
        inputs = RecurrentInputs(buffers.mixed.rows, buffers.decays, buffers.times, self.conv, self.skip)
        planned.attend(self.layer, inputs, buffers.attended_heads)
        operations.norm_gated(buffers.attended, buffers.gate, self.norm, buffers.attended)
        sink.take_product(self.output, buffers.attended)
