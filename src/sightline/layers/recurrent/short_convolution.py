"""The short convolution layer of LFM2: a convolution over a few tokens between two gates.

    x ──inputs──▶ [ input gate | output gate | values ]
    values * input gate ──convolution──▶ * output gate ──output──▶ result

Does not know states, slots or backends: the planned batch does.
"""

from __future__ import annotations

from dataclasses import dataclass

from sightline.attention.contract import ConvolutionInputs, ConvWeights
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import ConvolutionSpec
from sightline.layers.linear import Projection
from sightline.layers.rotary import RotaryTable
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink
from sightline.layers.source import Source


class ShortConvolutionBuffers:
    """Buffers from the projection to the output of the convolution, and views of them."""

    def __init__(self, scratch: Scratch, channels: int) -> None:
        self.inputs = scratch.take("short_convolution.inputs", 3 * channels)
        self.input_gate, self.output_gate, self.values = self.inputs.chunk(3, dim=-1)
        self.gated = scratch.take_rows("short_convolution.gated", channels)
        self.convolved = scratch.take_rows("short_convolution.convolved", channels)
        self.convolved_heads = self.convolved.unsqueeze(1)


@dataclass(frozen=True, eq=False)
class ShortConvolution:
    """One layer."""

    layer: int
    """The layer's number in the model."""
    spec: ConvolutionSpec
    inputs: Projection
    """Projects x to the gates of input and output, and the values."""
    conv: ConvWeights
    output: Projection

    @property
    def turns(self) -> bool:
        return self.inputs.turns

    def buffers(self, scratch: Scratch) -> ShortConvolutionBuffers:
        return scratch.of(ShortConvolutionBuffers, self.spec.channels)

    def __call__(
        self, source: Source, sink: Sink, planned: PlannedBatch, rotary: RotaryTable | None, scratch: Scratch
    ) -> None:
        """Gives the result for the source to the sink."""
        assert rotary is None
        buffers, operations = self.buffers(scratch), scratch.operations
        source.give_product(self.inputs, buffers.inputs, operations)
        operations.multiply(buffers.input_gate, buffers.values, buffers.gated)
        planned.attend(self.layer, ConvolutionInputs(buffers.gated, self.conv), buffers.convolved_heads)
        operations.multiply(buffers.output_gate, buffers.convolved, buffers.convolved)
        sink.take_product(self.output, buffers.convolved)
