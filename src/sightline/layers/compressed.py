"""The compressed attention layer of DeepSeek V4: projections, norms and rotations around the attention of the plan.

    x ──down──▶ [ low-rank query | key | values | gates | index values | index gates | index weights ]
                      │             │       └───┬───┘            └────────┬───┘            │
                      │             │       what becomes entries      the same, of index keys
                      │             └─norm, rotation──▶ key, which is the value too
                      └─norm, query_up──▶ [ index queries | queries ]──norm per head, rotation──▶

    attended ──rotation back──▶ groups of heads ──grouped──▶ few features of each ──output──▶

The last dimensions of heads are rotated, in pairs of neighbours, as checkpoints store them. A value is rotated with its
key, so the rotation of the sum is undone behind attention. A layer without entries has no part behind `key`, and one
without an indexer none behind `gates`. Does not know pools, states or backends: the planned batch does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.compressed.inputs import CompressedIndexInputs, CompressedInputs, CompressionInputs
from sightline.attention.compressed.spec import CompressedIndexSpec, CompressedSpec
from sightline.attention.planner import PlannedBatch
from sightline.layers.latent import QueryUp
from sightline.layers.linear import GroupedLinear, Projection, Unnormed
from sightline.layers.norm import RmsNorm
from sightline.layers.operations import Operations
from sightline.layers.rotary import RotaryTable
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink
from sightline.layers.source import Source


@dataclass(frozen=True, eq=False)
class EntryRows:
    """Values and gates of the tokens of a step, [num_tokens, width] each."""

    values: Tensor
    projected: Tensor
    """The gates without the bias of a token's place."""
    gates: Tensor
    """fp32, in memory of their own."""


class CompressedBuffers:
    """Buffers from the projections to the attention output, and views of them. All are row-major."""

    def __init__(
        self, scratch: Scratch, num_heads: int, head_dim: int, query_rank: int, grouped: int, width: int, *index: int
    ) -> None:
        """`width` is that of the values; 0 without entries. `index` has the heads, the head size and the width of the
        indexer; 0 without one."""
        index_heads, index_dim, index_width = index
        parts = [query_rank, head_dim, width, width, index_width, index_width, index_heads]
        self.down = scratch.take_rows("compressed.down", sum(parts))
        self.low, key, *entry, self.index_weights = torch.split(self.down, parts, dim=-1)
        self.key = key
        self.entries = _entry_rows(scratch, "compressed.gates", *entry[:2])
        self.index_entries = _entry_rows(scratch, "compressed.index_gates", *entry[2:])
        sizes = [index_heads * index_dim, num_heads * head_dim]
        self.queries = scratch.take_rows("compressed.queries", sum(sizes))
        index_q, q = torch.split(self.queries, sizes, dim=-1)
        self.q = q.view(scratch.num_tokens, num_heads, head_dim)
        self.index_q = index_q.view(scratch.num_tokens, index_heads, index_dim) if index_heads else None
        self.attended = scratch.take_rows("compressed.attended", num_heads * head_dim)
        self.attended_heads = self.attended.view(scratch.num_tokens, num_heads, head_dim)
        self.grouped = scratch.take_rows("compressed.grouped", grouped)


def _entry_rows(scratch: Scratch, name: str, values: Tensor, gates: Tensor) -> EntryRows | None:
    width = values.shape[1]
    return EntryRows(values, gates, scratch.take_rows(name, width, torch.float32)) if width else None


@dataclass(frozen=True, eq=False)
class CompressorWeights:
    """What a layer, or its indexer, adds to values and gates before they become entries."""

    bias: Tensor
    """[ratio, width] fp32: added to the gates of a token by its place in the window."""
    norm: RmsNorm
    """The norm of entries."""

    def inputs(self, rows: EntryRows, rotary: RotaryTable, operations: Operations) -> CompressionInputs:
        """What becomes entries. `rotary` has a table for windows."""
        windows = rotary.windows
        assert windows is not None
        operations.add_places(rows.projected, self.bias, windows.places, rows.gates)
        return CompressionInputs(rows.values, rows.gates, self.norm.weight, windows.cos, windows.sin)


@dataclass(frozen=True, eq=False)
class CompressedIndexer:
    """The indexer of one layer, which chooses entries."""

    spec: CompressedIndexSpec
    compressor: CompressorWeights


@dataclass(frozen=True, eq=False)
class CompressedAttention:
    """One layer."""

    turns: ClassVar[bool] = False
    """Buffers are row-major."""
    layer: int
    """The layer's number in the model."""
    spec: CompressedSpec
    down: Projection
    query_up: QueryUp
    """To the indexer's queries, if there is one, then to the queries of all heads."""
    query_norm: RmsNorm
    """Over each head of the queries, without weights."""
    key_norm: RmsNorm
    sinks: Tensor
    """[num_q_heads] fp32."""
    compressor: CompressorWeights | None
    """None if the layer has no entries."""
    indexer: CompressedIndexer | None
    """None if a query attends to all entries that it sees."""
    grouped: GroupedLinear
    output: Projection

    def buffers(self, scratch: Scratch) -> CompressedBuffers:
        spec, index = self.spec, (0, 0, 0)
        width = 0 if spec.compression is None else spec.compression.width(spec.head_dim)
        if self.indexer is not None:
            its = self.indexer.spec
            index = (its.num_q_heads, its.head_dim, its.compression.width(its.head_dim))
        sizes = (spec.num_q_heads, spec.head_dim, self.query_up.projection.in_features, self.grouped.out_features)
        return scratch.of(CompressedBuffers, *sizes, width, *index)

    def __call__(
        self, source: Source, sink: Sink, planned: PlannedBatch, rotary: RotaryTable | None, scratch: Scratch
    ) -> None:
        """Gives the result for the source to the sink."""
        assert rotary is not None
        buffers, operations = self.buffers(scratch), scratch.operations
        source.give_product(self.down, buffers.down, operations)
        operations.turn_tails(buffers.key.unsqueeze(1), self.key_norm, rotary)
        low = Unnormed(buffers.low, self.query_up.norm, buffers.low)
        self.query_up.projection.of_norm(low, buffers.queries, operations)
        operations.turn_tails(buffers.q, self.query_norm, rotary)
        inputs = CompressedInputs(
            q=buffers.q,
            key=buffers.key,
            sinks=self.sinks,
            entries=self._entries(buffers, rotary, operations),
            chosen=self._chosen(buffers, planned, rotary, operations),
        )
        planned.attend(self.layer, inputs, buffers.attended_heads)
        operations.turn_tails(buffers.attended_heads, None, rotary, back=True)
        self.grouped(buffers.attended, buffers.grouped)
        sink.take_product(self.output, buffers.grouped)

    def _entries(
        self, buffers: CompressedBuffers, rotary: RotaryTable, operations: Operations
    ) -> CompressionInputs | None:
        if self.compressor is None or buffers.entries is None:
            return None
        return self.compressor.inputs(buffers.entries, rotary, operations)

    def _chosen(
        self, buffers: CompressedBuffers, planned: PlannedBatch, rotary: RotaryTable, operations: Operations
    ) -> Tensor | None:
        """The entries that the tokens of the step attend to; None if the step is not sparse, or there is no indexer."""
        if self.indexer is None or buffers.index_q is None or buffers.index_entries is None:
            return None
        operations.turn_tails(buffers.index_q, None, rotary)
        entries = self.indexer.compressor.inputs(buffers.index_entries, rotary, operations)
        return planned.choose(self.layer, CompressedIndexInputs(buffers.index_q, buffers.index_weights, entries))
