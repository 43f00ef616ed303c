"""The layers of the decoder network, and the buffers that they share.

Does not know definitions, nor how checkpoints store layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.planner import PlannedBatch
from sightline.layers.linear import Unnormed
from sightline.layers.norm import RmsNorm
from sightline.layers.operations import Operations
from sightline.layers.per_layer import PerLayerGate
from sightline.layers.rotary import RotarySpec, RotaryTable, WindowTable
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Added, Written
from sightline.layers.source import Given, Normed, Source
from sightline.layers.streams import ResidualStreams, StreamConnection
from sightline.layers.summed import ExchangedMlp, SummedAttention, SummedMlp
from sightline.models.attention import AttentionLayer
from sightline.models.feed_forward import FeedForwardLayer


class StreamBuffers:
    """The residual stream and the intermediate results of a layer."""

    def __init__(self, scratch: Scratch, hidden_size: int) -> None:
        self.hidden = scratch.take("stream.hidden", hidden_size)
        self.normed = scratch.take("stream.normed", hidden_size)
        self.result = scratch.take("stream.result", hidden_size)
        self.onto_stream, self.alone = Added(self.hidden), Written(self.result)


class TableBuffers:
    """The cosines and sines of one rotary embedding."""

    def __init__(self, scratch: Scratch, number: int, head_dim: int, has_windows: int = 0) -> None:
        sizes = {"cos": head_dim, "sin": head_dim // 2, "minus_sin": head_dim // 2}
        rows = {name: scratch.take_rows(f"rotary.{number}.{name}", size) for name, size in sizes.items()}
        windows = _windows(scratch, number, head_dim // 2) if has_windows else None
        self.table = RotaryTable(**{name: each.unsqueeze(1) for name, each in rows.items()}, windows=windows)


def _windows(scratch: Scratch, number: int, num_pairs: int) -> WindowTable:
    cos, sin = (
        scratch.take_rows(f"rotary.{number}.window_{name}", num_pairs, torch.float32) for name in ("cos", "sin")
    )
    return WindowTable(scratch.take_rows(f"rotary.{number}.places", 1, torch.int64).view(-1), cos, sin)


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One layer. Only sandwich models have norms after a sub-layer."""

    rotary: RotarySpec | None
    attention_norm: RmsNorm
    attention: AttentionLayer | SummedAttention
    attention_out_norm: RmsNorm | None
    mlp_norm: RmsNorm
    """The same as `attention_norm` in a layer with one part."""
    mlp: FeedForwardLayer | SummedMlp | ExchangedMlp
    mlp_out_norm: RmsNorm | None
    per_layer: PerLayerGate | None = None
    scale: Tensor | None = None
    """[1]: multiplies the stream behind the layer."""
    attention_kept: RmsNorm | None = None
    """The norm that replaces the stream before attention adds to it; None if the stream stays as it is."""
    mlp_kept: RmsNorm | None = None
    """The same for the feed-forward."""

    def __call__(
        self, stream: StreamBuffers, planned: PlannedBatch, rotary: RotaryTable | None, scratch: Scratch
    ) -> None:
        """Adds the layer's output to the stream. `rotary` is None if the layer does not rotate."""
        operations = scratch.operations
        hidden, normed, result = stream.hidden, stream.normed, stream.result
        attended = _read(stream, self.attention_norm, self.attention_kept, operations)
        if self.attention_out_norm is None:
            self.attention(attended, stream.onto_stream, planned, rotary, scratch)
            transformed = _read(stream, self.mlp_norm, self.mlp_kept, operations)
        else:
            self.attention(attended, stream.alone, planned, rotary, scratch)
            operations.add_normed_then_norm(result, self.attention_out_norm, hidden, self.mlp_norm, normed)
            transformed = Given(normed)
        if self.mlp_out_norm is None:
            self.mlp(transformed, stream.onto_stream, scratch)
        else:
            self.mlp(transformed, stream.alone, scratch)
            operations.add_normed(result, self.mlp_out_norm, hidden)
        if self.per_layer is not None:
            self.per_layer(hidden, result, scratch)
        if self.scale is not None:
            hidden.mul_(self.scale)


@dataclass(frozen=True, eq=False)
class StreamedLayer:
    """One layer of a network with several residual streams."""

    rotary: RotarySpec | None
    attention_norm: RmsNorm
    attention: AttentionLayer | SummedAttention
    attention_streams: StreamConnection
    mlp_norm: RmsNorm
    mlp: FeedForwardLayer | SummedMlp | ExchangedMlp
    mlp_streams: StreamConnection

    def __call__(
        self, stream: StreamBuffers, planned: PlannedBatch, rotary: RotaryTable | None, scratch: Scratch
    ) -> None:
        """Adds the layer's output to the streams. What a part reads of them is in `stream.hidden` meanwhile."""
        hidden, normed, result = stream.hidden, stream.normed, stream.result
        rooms = scratch.of(ResidualStreams, self.mlp_streams.mix.rule.count, hidden.shape[1])
        self.attention_streams.collapse(rooms, hidden, scratch)
        read = Normed(Unnormed(hidden, self.attention_norm, normed))
        self.attention(read, stream.alone, planned, rotary, scratch)
        self.attention_streams.expand(result, rooms, scratch)
        self.mlp_streams.collapse(rooms, hidden, scratch)
        self.mlp(Normed(Unnormed(hidden, self.mlp_norm, normed)), stream.alone, scratch)
        self.mlp_streams.expand(result, rooms, scratch)


def _read(stream: StreamBuffers, norm: RmsNorm, kept: RmsNorm | None, operations: Operations) -> Source:
    """The norm of the stream, as the input of a part. If there is a norm to be kept, it then replaces the stream."""
    source = Normed(Unnormed(stream.hidden, norm, stream.normed))
    if kept is None:
        return source
    rows = source.rows(operations)
    operations.norm(stream.hidden, kept, stream.hidden)
    return Given(rows)
