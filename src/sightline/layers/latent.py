"""The latent attention (MLA) layer: projections, norms and rotations around the attention that the plan computes.

    x ──down──▶ [ query side | rope key | latent | gates | index key | index weights ]
                     │             │        │        │         └──▶ the indexer, if the layer has one
                     │             │        │        └──▶ a factor for each head of the output, if the layer has gates
                     │             │        └─norm──▶ latent, cached
                     │             └─rotation───────▶ rope key, cached, the same for all heads
                     └─(norm, query_up)──▶ [ index queries | nope parts of all heads | rope parts of all heads ]

The outputs of `down` and `query_up` are in this order, which differs from the stored one, and rope parts are ordered
for the half-split rotation: the loader reorders the rows of the weights. A sparse layer attends to what its indexer
chose, or the last one before it. Does not know pools, pages or backends: the planned batch does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sightline.attention.contract import LatentInputs
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import LatentSpec
from sightline.layers.indexer import IndexBuffers, Indexer
from sightline.layers.linear import Projection, Unnormed
from sightline.layers.norm import RmsNorm
from sightline.layers.operations import LatentRows, Operations
from sightline.layers.rotary import Halves, RotaryTable
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink
from sightline.layers.source import Source


class LatentBuffers:
    """Buffers from the projections to the attention output, and views of them.

    `queries` is [ index queries | nope parts of all heads | rope parts of all heads | rope key ], so that one rotation
    serves all rope parts.
    """

    def __init__(
        self,
        scratch: Scratch,
        num_heads: int,
        nope: int,
        rope: int,
        latent: int,
        value: int,
        query_rank: int,
        num_gates: int,
        index_heads: int,
        index_dim: int,
    ) -> None:
        """`query_rank` is the rank of the query projection; 0 if queries are projected from x directly.

        `index_heads` and `index_dim` are those of the indexer, which needs a query rank; 0 if there is none.
        """
        num_tokens = scratch.num_tokens
        nope_size, q_size, index_size = num_heads * nope, num_heads * (nope + rope), index_heads * index_dim
        side = query_rank or q_size
        parts = [side, rope, latent, num_gates, index_dim, index_heads]
        self.down = scratch.take("latent.down", sum(parts))
        self.low, k_rope, unnormed, self.gates, key, weights = torch.split(self.down, parts, dim=-1)
        queries = self.down[:, : q_size + rope]
        self.q = queries[:, :q_size]
        if query_rank:
            projected = scratch.take("latent.queries", index_size + q_size + rope)
            self.q, queries = projected[:, : index_size + q_size], projected[:, index_size:]
        self.index = IndexBuffers(scratch, self.q[:, :index_size], key, weights) if index_heads else None
        nope_heads = queries[:, :nope_size].view(num_tokens, num_heads, nope)
        # Attention needs each head contiguous. Taken even if unused, so that the largest step reserves it.
        rows = scratch.take_rows("latent.nope", nope_size).view(num_tokens, num_heads, nope)
        self.is_row_major = self.down.is_contiguous()
        self.nope_unordered, self.q_nope = nope_heads, nope_heads if self.is_row_major else rows
        rotated = scratch.take_rows("latent.rotated", (num_heads + 1) * rope).view(num_tokens, num_heads + 1, rope)
        self.q_rope, self.k_rope = rotated[:, :num_heads], rotated[:, num_heads]
        self.latent = scratch.take_rows("latent.latent", latent)
        self.rows = LatentRows(
            unnormed=unnormed,
            latent=self.latent,
            k_rope=k_rope,
            turned=Halves.of(queries[:, nope_size:].view(num_tokens, num_heads + 1, rope)),
            k_rope_room=queries[:, q_size:] if query_rank else None,
            rotated=Halves.of(rotated),
        )
        self.attended = scratch.take_rows("latent.attended", num_heads * value)
        self.attended_heads = self.attended.view(num_tokens, num_heads, value)


@dataclass(frozen=True, eq=False)
class QueryUp:
    """The second half of a low-rank query projection."""

    norm: RmsNorm
    """The norm of the low-rank queries."""
    projection: Projection


@dataclass(frozen=True, eq=False)
class LatentAttention:
    """One layer."""

    layer: int
    """The layer's number in the model."""
    spec: LatentSpec
    down: Projection
    """Projects x to queries (or low-rank queries), rope key, latent and gates."""
    query_up: QueryUp | None
    latent_norm: RmsNorm
    key_up: Tensor
    """[num_q_heads, nope_dim, latent_dim]."""
    value_up: Tensor
    """[num_q_heads, value_dim, latent_dim]."""
    output: Projection
    gated: bool = False
    """True if `down` also gives a gate for each head of the output."""
    indexer: Indexer | None = None
    """None if the layer is not sparse, or takes the choice of a layer before it."""

    @property
    def turns(self) -> bool:
        return self.down.turns

    def buffers(self, scratch: Scratch) -> LatentBuffers:
        spec = self.spec
        rank = 0 if self.query_up is None else self.query_up.projection.in_features
        gates = spec.num_q_heads if self.gated else 0
        index = (0, 0) if self.indexer is None else (self.indexer.spec.num_q_heads, self.indexer.spec.head_dim)
        sizes = (spec.num_q_heads, spec.nope_dim, spec.rope_dim, spec.latent_dim, spec.value_dim, rank, gates)
        return scratch.of(LatentBuffers, *sizes, *index)

    def __call__(
        self, source: Source, sink: Sink, planned: PlannedBatch, rotary: RotaryTable | None, scratch: Scratch
    ) -> None:
        """Gives the result for the source to the sink."""
        assert rotary is not None
        buffers, operations = self.buffers(scratch), scratch.operations
        source.give_product(self.down, buffers.down, operations)
        if self.query_up is not None:
            unnormed = Unnormed(buffers.low, self.query_up.norm, buffers.low)
            self.query_up.projection.of_norm(unnormed, buffers.q, operations)
        if not buffers.is_row_major:
            buffers.q_nope.copy_(buffers.nope_unordered)
        operations.turn_latents(buffers.rows, self.latent_norm, rotary)
        inputs = self._inputs(buffers)
        if self.spec.top_k is not None:
            inputs = replace(inputs, chosen=self._chosen(buffers, planned, rotary, operations))
        planned.attend(self.layer, inputs, buffers.attended_heads)
        if self.gated:
            operations.gate_heads(buffers.gates, buffers.attended_heads)
        sink.take_product(self.output, buffers.attended)

    def _chosen(
        self, buffers: LatentBuffers, planned: PlannedBatch, rotary: RotaryTable, operations: Operations
    ) -> Tensor | None:
        """What the tokens of the step attend to; None if the step is not sparse."""
        if self.indexer is None or buffers.index is None:
            return planned.chosen(self.layer)
        return self.indexer.choose(self.layer, buffers.index, planned, rotary, operations)

    def _inputs(self, buffers: LatentBuffers) -> LatentInputs:
        return LatentInputs(
            q_nope=buffers.q_nope,
            q_rope=buffers.q_rope,
            latent=buffers.latent,
            k_rope=buffers.k_rope,
            key_up=self.key_up,
            value_up=self.value_up,
        )
