"""The gated delta rule (Qwen3-Next, Qwen3.5): projections, decays and a gated norm around the recurrence that the plan
computes.

    x ──inputs──▶ [ mixed: queries | keys | values ]  [ gates ]  [ shares ]  [ steps ]
                              │                           │          │           └─decays──▶ decay
                              │                           │          └─sigmoid──▶ beta
                              └─────────────────recurrence with decay and beta──▶ heads
                                                          └─norm of each head, times SiLU of its gate──▶ output

The order of the projected rows differs from the stored one: the loader reorders them. Does not know states or backends:
the planned batch does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.contract import ConvWeights, RecurrentInputs
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import RecurrentSpec
from sightline.layers.activation import Activation
from sightline.layers.decay_rates import DecayRates
from sightline.layers.linear import Projection
from sightline.layers.norm import RmsNorm
from sightline.layers.recurrent.token_rows import ContiguousTokens
from sightline.layers.rotary import RotaryTable
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink
from sightline.layers.source import Source


class GatedDeltaBuffers:
    """Buffers from the projection to the output of the recurrence, and views of them."""

    def __init__(self, scratch: Scratch, channels: int, num_heads: int, value_dim: int) -> None:
        num_tokens, out_size = scratch.num_tokens, num_heads * value_dim
        width = channels + out_size + 2 * num_heads
        self.projected = scratch.take("delta.projected", width)
        self.tokens = ContiguousTokens(scratch, "delta.rows", self.projected, self.projected)
        self.mixed, gates, self.shares, self.steps = torch.split(
            self.tokens.rows, [channels, out_size, num_heads, num_heads], dim=-1
        )
        self.gates = gates.view(num_tokens, num_heads, value_dim)
        self.beta = scratch.take_rows("delta.beta", num_heads, torch.float32)
        self.decay = scratch.take_rows("delta.decay", num_heads, torch.float32)
        self.out = scratch.take_rows("delta.out", out_size)
        self.out_heads = self.out.view(num_tokens, num_heads, value_dim)


@dataclass(frozen=True, eq=False)
class GatedDelta:
    """One layer."""

    layer: int
    """The layer's number in the model."""
    spec: RecurrentSpec
    inputs: Projection
    """Queries, keys and values; a gate for each number of the output; for each head, a number whose sigmoid is the
    share of a value that is stored; and for each head, a number that its decay depends on."""
    conv: ConvWeights
    log_rates: Tensor
    """[num_heads] fp32."""
    step_bias: Tensor
    """[num_heads] fp32."""
    norm: RmsNorm
    """The norm of each head of the output."""
    output: Projection

    @property
    def turns(self) -> bool:
        return self.inputs.turns

    def buffers(self, scratch: Scratch) -> GatedDeltaBuffers:
        spec = self.spec
        return scratch.of(GatedDeltaBuffers, spec.channels, spec.num_heads, spec.value_dim)

    def __call__(
        self, source: Source, sink: Sink, planned: PlannedBatch, rotary: RotaryTable | None, scratch: Scratch
    ) -> None:
        """Gives the result for the source to the sink."""
        assert rotary is None
        buffers, operations = self.buffers(scratch), scratch.operations
        source.give_product(self.inputs, buffers.projected, operations)
        buffers.tokens.fill()
        rates = DecayRates(self.log_rates, self.step_bias)
        operations.delta_gates(buffers.steps, buffers.shares, rates, buffers.decay, buffers.beta)
        inputs = RecurrentInputs(buffers.mixed, buffers.decay, buffers.beta, self.conv, None)
        planned.attend(self.layer, inputs, buffers.out_heads)
        operations.gated_norm(buffers.out_heads, buffers.gates, self.norm, Activation.SILU, buffers.out_heads)
        sink.take_product(self.output, buffers.out)
