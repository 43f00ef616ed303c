"""Feed-forward layers, gated and plain."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sightline.layers.activation import Activation, Gate
from sightline.layers.linear import GateRoom, Projection
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink
from sightline.layers.source import Source


class MlpBuffers:
    """The room for gate and up."""

    def __init__(self, scratch: Scratch, intermediate: int) -> None:
        gate_up = scratch.take("mlp.gate_up", 2 * intermediate)
        gate, up = gate_up.chunk(2, dim=-1)
        self.room = GateRoom(gate_up, gate, up, scratch.take("mlp.gated", intermediate))


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
        scratch.operations.activate(self.activation, buffers.inner)
        sink.take_product(self.down, buffers.inner)


class RowGateBuffers:
    """A gate for each token."""

    def __init__(self, scratch: Scratch) -> None:
        self.gates = scratch.take("mlp.row_gates", 1)


@dataclass(frozen=True, eq=False)
class SelfGatedMlp:
    """down(act(up(x)) * up(x)). With ReLU, this is the square of the ReLU."""

    up: Projection
    down: Projection
    activation: Activation

    def buffers(self, scratch: Scratch) -> PlainMlpBuffers:
        return scratch.of(PlainMlpBuffers, self.down.in_features)

    def __call__(self, source: Source, sink: Sink, scratch: Scratch) -> None:
        """Gives the result for the source to the sink."""
        inner = self.buffers(scratch).inner
        source.give_product(self.up, inner, scratch.operations)
        scratch.operations.gate(self.activation, inner, inner, inner)
        sink.take_product(self.down, inner)


@dataclass(frozen=True, eq=False)
class GatedMlp:
    """down(act(gate(x)) * up(x)), or another way to combine gate and up."""

    gate_up: Projection
    """Gate and up side by side: [2 * intermediate, hidden]."""
    down: Projection
    activation: Gate
    row_gate: Projection | None = None
    """A projection to one number per token, whose sigmoid scales the token's result; None if there is no such gate."""

    def buffers(self, scratch: Scratch) -> MlpBuffers:
        if self.row_gate is not None:
            scratch.of(RowGateBuffers)
        return scratch.of(MlpBuffers, self.down.in_features)

    def __call__(self, source: Source, sink: Sink, scratch: Scratch) -> None:
        """Gives the result for the source to the sink."""
        room, operations = self.buffers(scratch).room, scratch.operations
        if self.row_gate is None:
            source.give_gated(self.gate_up, self.activation, room, operations)
        else:
            x, gates = source.rows(operations), scratch.of(RowGateBuffers).gates
            self.row_gate(x, gates)
            self.gate_up.gated(self.activation, x, room, operations)
            # The same as to multiply the result, which is a product of these numbers.
            operations.gate_heads(gates, room.gated.unsqueeze(1))
        sink.take_product(self.down, room.gated)
