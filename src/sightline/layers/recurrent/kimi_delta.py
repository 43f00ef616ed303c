"""The Kimi delta attention (KDA) layer: projections, decays and an output gate around the delta rule of the plan.

    x ──inputs──▶ [ queries | keys | values | shares | decays | gates ]
                        mixed                  │        │        └─(gate_up)───────▶ gate of the output
                                               │        └─(decay_up)──▶ decay per channel
                                               └─sigmoid──▶ share of a value that is stored, per head

Decays and gates come from x directly, or by way of a few features and a second product. Does not know states, slots or
backends: the planned batch does.
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


class KimiDeltaBuffers:
    """Buffers from the projections to the output of the recurrence, and views of them."""

    def __init__(self, scratch: Scratch, num_heads: int, head_dim: int, rank: int) -> None:
        """`rank` is the number of features that decays and gates come from; 0 if they come from x directly."""
        num_tokens, size = scratch.num_tokens, num_heads * head_dim
        side = rank or size
        self.inputs = scratch.take("kimi_delta.inputs", 3 * size + num_heads + 2 * side)
        projected, self.shares, self.decay_side, self.gate_side = torch.split(
            self.inputs, [3 * size, num_heads, side, side], dim=-1
        )
        self.mixed = ContiguousTokens(scratch, "kimi_delta.mixed", self.inputs, projected)
        self.wide_decay, self.wide_gate = self.decay_side, self.gate_side
        if rank:
            self.wide_decay = scratch.take("kimi_delta.wide_decay", size)
            self.wide_gate = scratch.take("kimi_delta.wide_gate", size)
        heads = (num_tokens, num_heads, head_dim)
        self.decay_heads, self.gate_heads = self.wide_decay.view(heads), self.wide_gate.view(heads)
        self.beta = scratch.take_rows("kimi_delta.beta", num_heads, torch.float32)
        self.decay = scratch.take_rows("kimi_delta.decay", size, torch.float32).view(heads)
        self.attended = scratch.take_rows("kimi_delta.attended", size)
        self.attended_heads = self.attended.view(heads)


@dataclass(frozen=True, eq=False)
class SecondProducts:
    """The second halves of the low-rank projections to decays and gates."""

    decay: Projection
    gate: Projection


@dataclass(frozen=True, eq=False)
class KimiDelta:
    """One layer."""

    layer: int
    """The layer's number in the model."""
    spec: RecurrentSpec
    inputs: Projection
    """Projects x to queries, keys, values, shares, and to decays and gates or their low-rank form."""
    second: SecondProducts | None
    """None if decays and gates come from x directly."""
    conv: ConvWeights
    log_rates: Tensor
    """[num_heads] fp32: logarithms of the rates of decay."""
    decay_bias: Tensor
    """[num_heads, key_dim] fp32."""
    decay_bound: float | None
    """The least decay, which is negative, if decays are bounded."""
    norm: RmsNorm
    """The norm of each head of the output, before it is gated."""
    output: Projection

    @property
    def turns(self) -> bool:
        return self.inputs.turns

    def buffers(self, scratch: Scratch) -> KimiDeltaBuffers:
        rank = 0 if self.second is None else self.second.decay.in_features
        return scratch.of(KimiDeltaBuffers, self.spec.num_heads, self.spec.key_dim, rank)

    def __call__(
        self, source: Source, sink: Sink, planned: PlannedBatch, rotary: RotaryTable | None, scratch: Scratch
    ) -> None:
        """Gives the result for the source to the sink."""
        assert rotary is None
        buffers, operations = self.buffers(scratch), scratch.operations
        source.give_product(self.inputs, buffers.inputs, operations)
        buffers.mixed.fill()
        if self.second is not None:
            self.second.decay(buffers.decay_side, buffers.wide_decay)
            self.second.gate(buffers.gate_side, buffers.wide_gate)
        rates = DecayRates(self.log_rates, self.decay_bias, self.decay_bound)
        operations.delta_gates(buffers.decay_heads, buffers.shares, rates, buffers.decay, buffers.beta)
        inputs = RecurrentInputs(buffers.mixed.rows, buffers.decay, buffers.beta, self.conv, skip=None)
        attended = buffers.attended_heads
        planned.attend(self.layer, inputs, attended)
        operations.gated_norm(attended, buffers.gate_heads, self.norm, Activation.SIGMOID, attended)
        sink.take_product(self.output, buffers.attended)
