"""A step's compression with the places of its entries: what attention and indexers over entries share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.compressed.compressor import Compressor, plan_compressor
from sightline.attention.compressed.entries import EntryPlaces, OwnEntries, PooledEntries
from sightline.attention.compressed.inputs import CompressionInputs
from sightline.attention.compressed.layout import CompressionLayout, NewTokens
from sightline.attention.compressed.spec import Compression
from sightline.attention.contract import StepView
from sightline.cache.pools import Pool
from sightline.core.lengths import moved


@dataclass(frozen=True, eq=False)
class StepCompression:
    """Compresses a step's tokens, and finds entries."""

    compressor: Compressor
    places: EntryPlaces

    def run(self, inputs: CompressionInputs, sums: Tensor | None, entries: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Writes new entries and sums to a layer's planes, which are None if nothing is kept. Returns what `places`
        index: entries of `dtype`."""
        return self.places.source(entries, self.compressor.run(inputs, sums, dtype))


def plan_compression(
    compression: Compression,
    head_dim: int,
    step: StepView,
    rows: Sequence[NewTokens],
    pool: Pool,
    slots: Tensor | None,
    device: torch.device,
) -> StepCompression:
    """Plans a step; `rows` are those that have tokens. `slots` [num_tokens] int64 say where the entries that tokens
    complete go; None under `TRANSIENT`."""
    states, kept = step.states, () if step.states is None else step.states.kept_host
    layout = CompressionLayout.of(compression.ratio, rows, kept)
    read_slots = None if states is None else row_slots(rows, states.read_slots)
    compressor = plan_compressor(compression, head_dim, layout, read_slots, device)
    if slots is None:
        return StepCompression(compressor, OwnEntries.of(layout, rows, device))
    own = slots.index_select(0, compressor.entry_tokens)
    return StepCompression(compressor, PooledEntries(pool, step.batch.rows, own))


def row_slots(rows: Sequence[NewTokens], read_slots: Tensor) -> Tensor:
    """[num_rows with tokens] int64: the states that these rows begin with, out of those of all rows."""
    return read_slots.index_select(0, moved([[row.row for row in rows]], read_slots.device)[0])
