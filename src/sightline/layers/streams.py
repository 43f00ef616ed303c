"""Several residual streams: what they hold, how each part of a layer is connected to them, and how they end.

    streams ──collapse──▶ input ──norm, part──▶ result ──expand──▶ streams        (twice a layer)
    streams ──join──▶ the state behind the last layer

The shares come from a projection of all streams of a token. Does not know parts of layers, nor definitions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.kernels.row_slices import row_slices
from sightline.layers.linear import Projection
from sightline.layers.scratch import Scratch
from sightline.layers.stream_mix import StreamMix, StreamShares


class ResidualStreams:
    """The streams of a step's tokens, and the shares of the part that reads them."""

    def __init__(self, scratch: Scratch, count: int, size: int) -> None:
        num_tokens, fp32 = scratch.num_tokens, torch.float32
        self.flat = scratch.take_rows("streams.all", count * size)
        """[num_tokens, count * size]: the streams of a token side by side."""
        self.streams = self.flat.view(num_tokens, count, size)
        self.logits = scratch.take_rows("streams.logits", count * (2 + count), fp32)
        self.head_logits = scratch.take_rows("streams.head_logits", count, fp32)
        self.shares = StreamShares(
            scratch.take_rows("streams.writing", count, fp32),
            scratch.take_rows("streams.mixing", count * count, fp32).view(num_tokens, count, count),
        )

    def fill(self, hidden: Tensor, scratch: Scratch) -> None:
        """Makes every stream the hidden states [num_tokens, size]."""
        for stream in self.streams.unbind(1):
            scratch.operations.copy(hidden, stream)


@dataclass(frozen=True, eq=False)
class StreamConnection:
    """How one part of a layer is connected to the streams."""

    logits: Projection
    """[num_logits, count * size], fp32."""
    mix: StreamMix

    def collapse(self, rooms: ResidualStreams, out: Tensor, scratch: Scratch) -> None:
        """Writes the part's input [num_tokens, size], which is not normalised, and keeps the shares for `expand`."""
        for rows in row_slices(len(rooms.flat)):
            self.logits(rooms.flat[rows], rooms.logits[rows])
        scratch.operations.collapse_streams(rooms.streams, rooms.logits, self.mix, rooms.shares, out)

    def expand(self, result: Tensor, rooms: ResidualStreams, scratch: Scratch) -> None:
        """Adds the part's result [num_tokens, size] to the streams, which are mixed."""
        scratch.operations.expand_streams(result, rooms.shares, rooms.streams)


@dataclass(frozen=True, eq=False)
class StreamHead:
    """The end of the streams."""

    logits: Projection
    """[count, count * size], fp32."""
    mix: StreamMix

    def rooms(self, scratch: Scratch) -> ResidualStreams:
        """The streams of a step."""
        count = self.mix.rule.count
        return scratch.of(ResidualStreams, count, self.logits.in_features // count)

    def join(self, out: Tensor, scratch: Scratch) -> None:
        """Writes the state behind the last layer, [num_tokens, size]."""
        rooms = self.rooms(scratch)
        for rows in row_slices(len(rooms.flat)):
            self.logits(rooms.flat[rows], rooms.head_logits[rows])
        scratch.operations.join_streams(rooms.streams, rooms.head_logits, self.mix, out)
