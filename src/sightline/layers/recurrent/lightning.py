"""The lightning attention layer: linear attention whose heads forget at fixed rates, and a gated norm of the output.

    x ──inputs──▶ [ queries | keys | values | gates ]
                        SiLU                   └──▶ gate of the output, which is normalised over all heads together

Does not know states, slots or backends: the planned batch does.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sightline.attention.contract import RecurrentInputs
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import RecurrentSpec
from sightline.layers.activation import Activation
from sightline.layers.linear import Projection
from sightline.layers.norm import RmsNorm
from sightline.layers.recurrent.token_rows import ContiguousTokens
from sightline.layers.rotary import RotaryTable
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink
from sightline.layers.source import Source


class LightningBuffers:
    """Buffers from the projections to the output of the recurrence, and views of them."""

    def __init__(self, scratch: Scratch, num_heads: int, head_dim: int) -> None:
        num_tokens, size = scratch.num_tokens, num_heads * head_dim
        self.inputs = scratch.take("lightning.inputs", 4 * size)
        self.projected, gate = self.inputs[:, : 3 * size], self.inputs[:, 3 * size :]
        self.mixed = ContiguousTokens(scratch, "lightning.mixed", self.inputs, self.projected)
        self.attended = scratch.take_rows("lightning.attended", size)
        self.attended_heads = self.attended.view(num_tokens, num_heads, head_dim)
        self.whole, self.gate = self.attended.unsqueeze(1), gate.unsqueeze(1)
        """Output and gate as one head, [num_tokens, 1, num_heads * head_dim]."""


@dataclass(frozen=True, eq=False)
class LightningAttention:
    """One layer."""

    layer: int
    """The layer's number in the model."""
    spec: RecurrentSpec
    inputs: Projection
    """Projects x to queries, keys, values and gates."""
    decay: Tensor
    """[num_heads] fp32: the logarithm of what each step leaves of a head's state."""
    beta: Tensor
    """[num_heads] fp32, ones: values are stored whole."""
    norm: RmsNorm
    """The norm of the output, over all heads together, before it is gated."""
    output: Projection

    @property
    def turns(self) -> bool:
        return self.inputs.turns

    def buffers(self, scratch: Scratch) -> LightningBuffers:
        return scratch.of(LightningBuffers, self.spec.num_heads, self.spec.key_dim)

    def __call__(
        self, source: Source, sink: Sink, planned: PlannedBatch, rotary: RotaryTable | None, scratch: Scratch
    ) -> None:
        """Gives the result for the source to the sink."""
        assert rotary is None
        buffers, operations = self.buffers(scratch), scratch.operations
        source.give_product(self.inputs, buffers.inputs, operations)
        operations.activate(Activation.SILU, buffers.projected)
        buffers.mixed.fill()
        shape = (scratch.num_tokens, self.spec.num_heads)
        decay, beta = self.decay.expand(shape), self.beta.expand(shape)
        planned.attend(
            self.layer, RecurrentInputs(buffers.mixed.rows, decay, beta, conv=None, skip=None), buffers.attended_heads
        )
        operations.gated_norm(buffers.whole, buffers.gate, self.norm, Activation.SIGMOID, buffers.whole)
        sink.take_product(self.output, buffers.attended)
