"""Where the entries of a step's rows are: in a pool, through the page table, or in the step that has no cache.

Does not know what an entry holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.compressed.layout import CompressionLayout, NewTokens
from sightline.attention.compressed.tiles import QueryTile
from sightline.cache.pools import Pool
from sightline.core.lengths import moved


class EntryPlaces(ABC):
    """Finds the entries of rows."""

    write_slots: Tensor | None
    """[num_entries] int64: where new entries go; None if they are not kept."""

    @abstractmethod
    def rows(self, tile: QueryTile) -> Tensor:
        """[num_spans] int64: the rows of a tile, as `find` takes them."""

    @abstractmethod
    def find(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """The places of entries of rows, by their numbers; `rows` and `numbers` have one shape. May be captured."""

    def source(self, plane: Tensor | None, new: Tensor) -> Tensor:
        """[num_places, head_dim]: what places index. Writes the new entries [num_entries, head_dim] to a layer's plane
        [num_slots, head_dim], if they are kept."""
        if plane is None or self.write_slots is None:
            return new
        plane.index_copy_(0, self.write_slots, new)
        return plane


@dataclass(frozen=True, eq=False)
class PooledEntries(EntryPlaces):
    """Entries in a pool."""

    pool: Pool
    table_rows: Sequence[int]
    """[num_rows of the batch]."""
    write_slots: Tensor | None

    def rows(self, tile: QueryTile) -> Tensor:
        return moved([[self.table_rows[part.row] for part in tile.parts]], tile.positions.device)[0]

    def find(self, rows: Tensor, numbers: Tensor) -> Tensor:
        return self.pool.entry_slots(rows, numbers)


@dataclass(frozen=True, eq=False)
class OwnEntries(EntryPlaces):
    """The entries of a step without a cache: those that its own tokens complete."""

    firsts: Tensor
    """[num_rows with tokens] int64: the first new entry of each."""
    most: int
    """Index of the last new entry."""
    write_slots: Tensor | None = None

    @staticmethod
    def of(layout: CompressionLayout, rows: Sequence[NewTokens], device: torch.device) -> OwnEntries:
        counts = [row.stop // layout.ratio for row in rows]
        firsts = [sum(counts[:place]) for place in range(len(rows))]
        return OwnEntries(moved([firsts], device)[0], max(0, len(layout.entries) - 1))

    def rows(self, tile: QueryTile) -> Tensor:
        return moved([[part.place for part in tile.parts]], tile.positions.device)[0]

    def find(self, rows: Tensor, numbers: Tensor) -> Tensor:
        # A row without entries has the place of another's, which no query sees.
        return (self.firsts[rows] + numbers).clamp(max=self.most)
