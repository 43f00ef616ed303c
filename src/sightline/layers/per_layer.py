"""Per-layer inputs: a second, smaller embedding of each token, of which every layer adds its own part to the stream.

    tokens ─▶ embedding ──────────────────┐
    stream before the first layer ─▶ norm(projection) ─▶ (sum) / √2 ─▶ part of layer i
    stream behind layer i ─▶ act(gate) * part of layer i ─▶ projection ─▶ norm ─▶ added to the stream

Knows no definitions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sightline.layers.activation import Activation
from sightline.layers.embedding import Embedding
from sightline.layers.linear import Projection
from sightline.layers.norm import RmsNorm
from sightline.layers.scratch import Scratch

_MIXED = 2.0**-0.5
"""Keeps the variance of the sum of both parts."""


class PerLayerBuffers:
    """The parts of all layers, and what one layer computes with its own."""

    def __init__(self, scratch: Scratch, num_layers: int, size: int) -> None:
        self.parts = scratch.take_rows("per_layer.parts", num_layers * size)
        self.looked_up = scratch.take_rows("per_layer.looked_up", num_layers * size)
        self.gate = scratch.take_rows("per_layer.gate", size)
        self.gated = scratch.take_rows("per_layer.gated", size)


@dataclass(frozen=True, eq=False)
class PerLayerInputs:
    """Computes the parts of all layers, once a step."""

    num_layers: int
    size: int
    embedding: Embedding
    """[vocab_size, num_layers * size]."""
    embedding_scale: float
    projection: Projection
    projection_scale: float
    norm: RmsNorm
    """Over the part of one layer."""

    def buffers(self, scratch: Scratch) -> PerLayerBuffers:
        return scratch.of(PerLayerBuffers, self.num_layers, self.size)

    def __call__(self, tokens: Tensor, hidden: Tensor, scratch: Scratch) -> None:
        """Fills the buffers for tokens [num_tokens] int64 whose embeddings are `hidden` [num_tokens, hidden_size]."""
        buffers, operations = self.buffers(scratch), scratch.operations
        self.projection(hidden, buffers.parts)
        buffers.parts.mul_(self.projection_scale)
        rows = buffers.parts.view(-1, self.size)
        operations.norm(rows, self.norm, rows)
        self.embedding(tokens, self.embedding_scale, buffers.looked_up, operations)
        buffers.parts.add_(buffers.looked_up).mul_(_MIXED)


@dataclass(frozen=True, eq=False)
class PerLayerGate:
    """Adds one layer's part to the stream."""

    layer: int
    inputs: PerLayerInputs
    gate: Projection
    activation: Activation
    projection: Projection
    out_norm: RmsNorm

    def __call__(self, hidden: Tensor, room: Tensor, scratch: Scratch) -> None:
        """Adds to `hidden` [num_tokens, hidden_size]; `room` of the same shape is overwritten."""
        buffers, size = self.inputs.buffers(scratch), self.inputs.size
        part = buffers.parts[:, self.layer * size : (self.layer + 1) * size]
        self.gate(hidden, buffers.gate)
        scratch.operations.gate(self.activation, buffers.gate, part, buffers.gated)
        self.projection(buffers.gated, room)
        scratch.operations.add_normed(room, self.out_norm, hidden)
