"""Layers of which each rank computes a part: their results are summed, or joined, over the ranks.

The layers themselves do not know of it: they give a summand to a buffer of its own, which becomes the sum before the
sink of the whole layer takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sightline.attention.planner import PlannedBatch
from sightline.distributed.collectives import Collectives
from sightline.layers.embedding import Embedding
from sightline.layers.linear import Projection
from sightline.layers.operations import Operations
from sightline.layers.rotary import RotaryTable
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink, Written
from sightline.layers.source import Source


class PartialAttention(Protocol):
    """An attention layer of some of the heads."""

    @property
    def turns(self) -> bool: ...

    def buffers(self, scratch: Scratch) -> object: ...

    def __call__(
        self, source: Source, sink: Sink, planned: PlannedBatch, rotary: RotaryTable | None, scratch: Scratch
    ) -> None: ...


class PartialMlp(Protocol):
    """A feed-forward of some of the features or experts."""

    def buffers(self, scratch: Scratch) -> object: ...

    def __call__(self, source: Source, sink: Sink, scratch: Scratch) -> None: ...


class SummandBuffers:
    """The result of a rank, then the sum."""

    def __init__(self, scratch: Scratch, hidden_size: int) -> None:
        self.written = Written(scratch.take("ranks.summand", hidden_size))


@dataclass(frozen=True, eq=False)
class SummedAttention:
    """An attention layer whose heads are divided among the ranks."""

    part: PartialAttention
    hidden_size: int
    collectives: Collectives

    @property
    def turns(self) -> bool:
        return self.part.turns

    def buffers(self, scratch: Scratch) -> SummandBuffers:
        self.part.buffers(scratch)
        return scratch.of(SummandBuffers, self.hidden_size)

    def __call__(
        self, source: Source, sink: Sink, planned: PlannedBatch, rotary: RotaryTable | None, scratch: Scratch
    ) -> None:
        """Gives the result for the source to the sink."""
        written = scratch.of(SummandBuffers, self.hidden_size).written
        self.part(source, written, planned, rotary, scratch)
        self.collectives.sum(written.target)
        sink.take(written.target)


@dataclass(frozen=True, eq=False)
class SummedMlp:
    """A feed-forward whose features or experts are divided among the ranks."""

    part: PartialMlp
    hidden_size: int
    collectives: Collectives

    def buffers(self, scratch: Scratch) -> SummandBuffers:
        self.part.buffers(scratch)
        return scratch.of(SummandBuffers, self.hidden_size)

    def __call__(self, source: Source, sink: Sink, scratch: Scratch) -> None:
        """Gives the result for the source to the sink."""
        written = scratch.of(SummandBuffers, self.hidden_size).written
        self.part(source, written, scratch)
        self.collectives.sum(written.target)
        sink.take(written.target)


class SummedEmbedding(Embedding):
    """An embedding of which each rank has the vectors of some tokens."""

    def __init__(self, part: Embedding, tokens: range, collectives: Collectives) -> None:
        """`tokens` are those of this rank."""
        self._part = part
        self._tokens = tokens
        self._collectives = collectives

    def __call__(self, tokens: Tensor, scale: float, out: Tensor, operations: Operations) -> None:
        others = (tokens < self._tokens.start) | (tokens >= self._tokens.stop)
        own = (tokens - self._tokens.start).masked_fill(others, 0)
        self._part(own, scale, out, operations)
        out.masked_fill_(others.unsqueeze(1), 0.0)
        self._collectives.sum(out)


class JoinedProjection(Projection):
    """A projection of which each rank has some of the outputs."""

    turns = False

    def __init__(self, part: Projection, widths: Sequence[int], collectives: Collectives) -> None:
        """`widths` has the number of outputs of each rank."""
        self._part = part
        self._widths = tuple(widths)
        self._collectives = collectives
        self.in_features, self.out_features = part.in_features, sum(widths)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        part = torch.empty((len(x), self._part.out_features), dtype=out.dtype, device=out.device)
        self._part(x, part)
        out.copy_(self._collectives.gather(part, self._widths))

    def add(self, x: Tensor, out: Tensor) -> None:
        result = torch.empty_like(out)
        self(x, result)
        out.add_(result)
