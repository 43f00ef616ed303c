"""Layers of which each rank computes a part: their results are summed, or joined, over the ranks.

SummedAttention, SummedMlp    heads, or features, of one replica
ExchangedMlp                  experts of all replicas, each of which sends its rows to all
SummedEmbedding, JoinedProjection    tokens of the vocabulary

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
from sightline.distributed.collectives import Collectives, Links
from sightline.layers.embedding import Embedding
from sightline.layers.linear import Projection
from sightline.layers.operations import Operations
from sightline.layers.rotary import RotaryTable
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink, Written
from sightline.layers.source import Given, Source
from sightline.layers.step_tokens import TokenBuffers


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


class ExchangedRows:
    """Rows of a step that replicas exchange, one after another in memory."""

    def __init__(self, scratch: Scratch, hidden_size: int) -> None:
        self.inputs = scratch.take_rows("ranks.rows", hidden_size)
        self.results = scratch.take_rows("ranks.results", hidden_size)


@dataclass(frozen=True, eq=False)
class ExchangedMlp:
    """A feed-forward whose experts are divided among the ranks of all replicas.

    Every rank computes its experts for the rows of all replicas, and each replica gets the sums for its own. All
    replicas run a step of one size, padding included, at the same time.
    """

    part: PartialMlp
    hidden_size: int
    links: Links
    reads_tokens: bool
    """True if the experts of a row depend on its token."""

    def buffers(self, scratch: Scratch) -> ExchangedRows:
        self.part.buffers(scratch.of_replicas)
        scratch.of_replicas.of(ExchangedRows, self.hidden_size)
        return scratch.of(ExchangedRows, self.hidden_size)

    def __call__(self, source: Source, sink: Sink, scratch: Scratch) -> None:
        """Gives the result for the source to the sink."""
        everyones, across = scratch.of_replicas, self.links.across
        own, all_rows = (each.of(ExchangedRows, self.hidden_size) for each in (scratch, everyones))
        own.inputs.copy_(source.rows(scratch.operations))
        across.stack(own.inputs, all_rows.inputs)
        if self.reads_tokens:
            across.stack(scratch.of(TokenBuffers).tokens, everyones.of(TokenBuffers).tokens)
        self.part(Given(all_rows.inputs), Written(all_rows.results), everyones)
        across.sum_of_part(all_rows.results, own.results)
        self.links.within.sum(own.results)
        sink.take(own.results)


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
        out.copy_(self._collectives.gather(part, self._widths, dim=1))

    def add(self, x: Tensor, out: Tensor) -> None:
        result = torch.empty_like(out)
        self(x, result)
        out.add_(result)
