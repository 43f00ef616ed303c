"""The encoder network: bidirectional attention, learned positions, and norms after each addition.

Owns the forward. A family's module translates its config to an `EncoderDefinition`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import AttentionSpec, SoftmaxSpec
from sightline.core.batch import FULL, RowMask
from sightline.layers.activation import Activation
from sightline.layers.attention import SoftmaxAttention
from sightline.layers.embedding import Embedding
from sightline.layers.mlp import PlainMlp
from sightline.layers.norm import LayerNorm
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Added
from sightline.layers.source import Given
from sightline.models.contract import EmbedderDefinition, Model
from sightline.models.weights import WeightReader


@dataclass(frozen=True)
class EncoderDefinition(EmbedderDefinition):
    """The properties of an encoder."""

    num_segments: int
    """The number of token types. Every token here is of the first."""
    intermediate_size: int
    num_layers: int
    spec: SoftmaxSpec
    activation: Activation
    norm_epsilon: float

    @property
    def mask(self) -> RowMask:
        return FULL

    @property
    def token_weights(self) -> int:
        return self.num_layers * self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size)

    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return (self.spec,) * self.num_layers

    def load_states(self, weights: WeightReader) -> Encoder:
        """Builds the network from tensors with Hugging Face names. The pooler is for another task and is skipped."""
        hidden = self.hidden_size
        encoder = Encoder(
            self,
            weights.embedding("embeddings.word_embeddings", self.num_tokens, hidden),
            self._load_places(weights),
            self._load_norm(weights, "embeddings.LayerNorm"),
            tuple(self._load_layer(weights, index) for index in range(self.num_layers)),
        )
        weights.finish(ignorable=("pooler.dense.weight", "pooler.dense.bias"))
        return encoder

    def _load_places(self, weights: WeightReader) -> Tensor:
        """The position embeddings plus the embedding of the first token type, [num_positions, hidden_size]."""
        positions = weights.take("embeddings.position_embeddings.weight", (self.num_positions, self.hidden_size))
        segments = weights.take("embeddings.token_type_embeddings.weight", (self.num_segments, self.hidden_size))
        return positions + segments[0]

    def _load_layer(self, weights: WeightReader, index: int) -> EncoderLayer:
        prefix, hidden = f"encoder.layer.{index}", self.hidden_size
        qkv = {f"{prefix}.attention.self.{part}": hidden for part in ("query", "key", "value")}
        return EncoderLayer(
            SoftmaxAttention(
                index,
                self.spec,
                weights.projection(qkv, hidden, bias=True),
                weights.projection({f"{prefix}.attention.output.dense": hidden}, hidden, bias=True),
                rotates=False,
            ),
            self._load_norm(weights, f"{prefix}.attention.output.LayerNorm"),
            PlainMlp(
                weights.projection({f"{prefix}.intermediate.dense": self.intermediate_size}, hidden, bias=True),
                weights.projection({f"{prefix}.output.dense": hidden}, self.intermediate_size, bias=True),
                self.activation,
            ),
            self._load_norm(weights, f"{prefix}.output.LayerNorm"),
        )

    def _load_norm(self, weights: WeightReader, name: str) -> LayerNorm:
        shape = (self.hidden_size,)
        weight = weights.take(f"{name}.weight", shape, dtype=torch.float32)
        return LayerNorm(weight, weights.take(f"{name}.bias", shape, dtype=torch.float32), self.norm_epsilon)


class EncoderStream:
    """The residual stream."""

    def __init__(self, scratch: Scratch, hidden_size: int) -> None:
        self.hidden = scratch.take("stream.hidden", hidden_size)
        self.onto = Added(self.hidden)


@dataclass(frozen=True, eq=False)
class EncoderLayer:
    """One layer."""

    attention: SoftmaxAttention
    attention_norm: LayerNorm
    mlp: PlainMlp
    mlp_norm: LayerNorm

    def __call__(self, stream: EncoderStream, planned: PlannedBatch, scratch: Scratch) -> None:
        hidden, operations = stream.hidden, scratch.operations
        self.attention(Given(hidden), stream.onto, planned, None, scratch)
        operations.layer_norm(hidden, self.attention_norm, hidden)
        self.mlp(hidden, stream.onto, scratch)
        operations.layer_norm(hidden, self.mlp_norm, hidden)


@dataclass(frozen=True, eq=False)
class Encoder(Model):
    """The whole network."""

    definition: EncoderDefinition
    embedding: Embedding
    places: Tensor
    """[num_positions, hidden_size]."""
    norm: LayerNorm
    layers: tuple[EncoderLayer, ...]

    @property
    def turns(self) -> bool:
        return self.layers[0].attention.qkv.turns

    def reserve(self, scratch: Scratch) -> None:
        self._stream(scratch)
        for layer in self.layers:
            layer.attention.buffers(scratch)
            layer.mlp.buffers(scratch)

    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        batch, stream, operations = planned.batch, self._stream(scratch), scratch.operations
        self.embedding(batch.tokens, 1.0, stream.hidden, operations)
        operations.add_rows(self.places, batch.positions, stream.hidden)
        operations.layer_norm(stream.hidden, self.norm, stream.hidden)
        for layer in self.layers:
            layer(stream, planned, scratch)
        return stream.hidden.index_select(0, batch.logit_indices).float()

    def _stream(self, scratch: Scratch) -> EncoderStream:
        return scratch.of(EncoderStream, self.definition.hidden_size)
