"""Tiles: queries of several rows that are computed together, what keys each reads, and which of these it sees.

    rows of a few tokens     side by side, rows with about as many entries in a tile
    long rows                cut into blocks of queries

A tile's keys and scores fit the bound on intermediate results. Does not know what is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.attention.compressed.compressor import MAX_ELEMENTS
from sightline.attention.compressed.layout import NewTokens
from sightline.attention.compressed.windows import key_places
from sightline.attention.recurrent.layout import PlaceList
from sightline.core.lengths import moved

MOST_QUERIES = 128
"""Queries of one row in a tile: beyond, most keys of its window are seen by few of them."""


class QuerySpan(NamedTuple):
    """Consecutive queries of one row."""

    part: NewTokens
    start: int
    """Position of the first one."""
    length: int

    @property
    def first(self) -> int:
        """The first token in the step."""
        return self.part.token(self.start)

    def num_entries(self, ratio: int) -> int:
        """Entries that the last query sees."""
        return (self.start + self.length) // ratio


@dataclass(frozen=True)
class TileSizes:
    """The sizes that decide how many queries fit a tile."""

    heads: int
    head_dim: int
    window: int
    """0 if no query reads a window."""
    ratio: int
    """Tokens per entry; 0 if there are no entries."""
    top_k: int | None
    """Entries that each query reads if the step is sparse; None if all that it sees."""

    def num_entries(self, span: QuerySpan) -> int:
        """Entries that a tile has for the span."""
        if not self.ratio:
            return 0
        return span.num_entries(self.ratio) if self.top_k is None else self.top_k

    def elements(self, queries: int, entries: int) -> int:
        """Elements of the largest intermediate result per span of so many queries."""
        keys = self.window + queries + entries
        own = queries * entries if self.top_k is not None else entries
        return max(queries * self.heads * keys, (self.window + queries + own) * self.head_dim)


def whole_rows(rows: Sequence[NewTokens]) -> list[QuerySpan]:
    """All queries of some rows."""
    return [QuerySpan(row, row.context, row.length) for row in rows]


def query_tiles(queries: Sequence[QuerySpan], sizes: TileSizes) -> Iterator[tuple[QuerySpan, ...]]:
    """Packs queries into tiles of spans with equal numbers of queries. Spans with entries are never beside spans
    without any, unless the step is sparse."""

    def shape(span: QuerySpan) -> tuple[int, int]:
        return span.length, sizes.num_entries(span).bit_length()

    spans = sorted((span for whole in queries for span in _cut(whole, sizes)), key=shape)
    for _, members in itertools.groupby(spans, key=shape):
        tile: list[QuerySpan] = []
        longest = 0
        for span in members:
            longest = max(longest, sizes.num_entries(span))
            if tile and (len(tile) + 1) * sizes.elements(span.length, longest) > MAX_ELEMENTS:
                yield tuple(tile)
                tile, longest = [], sizes.num_entries(span)
            tile.append(span)
        yield tuple(tile)


def _cut(whole: QuerySpan, sizes: TileSizes) -> Iterator[QuerySpan]:
    """Spans of as many queries as fit a tile."""
    entries, stop = sizes.num_entries(whole), whole.start + whole.length
    count = min(MOST_QUERIES, whole.length)
    while count > 1 and sizes.elements(count, entries) > MAX_ELEMENTS:
        count //= 2
    for start in range(whole.start, stop, count):
        yield QuerySpan(whole.part, start, min(count, stop - start))


@dataclass(frozen=True, eq=False)
class QueryTile:
    """The queries of a tile on the device."""

    tokens: PlaceList
    """[num_spans * count]: the queries' tokens in the step."""
    num_spans: int
    count: int
    """Queries of each span."""
    parts: tuple[NewTokens, ...]
    """The row of each span."""
    positions: Tensor
    """[num_spans, count] int64."""

    @staticmethod
    def of(spans: Sequence[QuerySpan], device: torch.device) -> QueryTile:
        count = spans[0].length
        tokens = [token for span in spans for token in range(span.first, span.first + count)]
        [starts] = moved([[span.start for span in spans]], device)
        positions = starts.unsqueeze(1) + torch.arange(count, device=device)
        return QueryTile(PlaceList.at(tokens, device), len(spans), count, tuple(span.part for span in spans), positions)


class TileKeys(NamedTuple):
    """Keys that all queries of a span read."""

    places: Tensor
    """[num_spans * num_keys] int64."""
    unseen: Tensor
    """[num_spans, count, num_keys] bool: True where a query does not see a key."""


def window_keys(tile: QueryTile, window: int, num_ring_keys: int) -> TileKeys:
    """The keys of the tile's windows, at places of the scratch."""
    device = tile.positions.device
    places, contexts, firsts = moved(
        [
            [part.place for part in tile.parts],
            [part.context for part in tile.parts],
            [num_ring_keys + part.first for part in tile.parts],
        ],
        device,
    )
    begin = (tile.positions[:, :1] - window + 1).clamp(min=0)
    keys = begin + torch.arange(window + tile.count - 1, device=device)
    # Behind the last query its own key is repeated.
    last = tile.positions[:, -1:]
    distance = tile.positions.unsqueeze(2) - keys.unsqueeze(1)
    found = key_places(
        torch.minimum(keys, last), places.unsqueeze(1), contexts.unsqueeze(1), firsts.unsqueeze(1), window
    )
    return TileKeys(found.flatten(), (distance < 0) | (distance >= window))


def dense_entries(tile: QueryTile, ratio: int, num_entries: int) -> tuple[Tensor, TileKeys]:
    """The numbers [num_spans, num_entries] int64 of the entries of a tile's rows, and which queries see them.

    The last query of each span sees an entry. Beyond its last one that is repeated, so that all were written. `places`
    are these numbers.
    """
    device = tile.positions.device
    numbers = torch.arange(num_entries, device=device)
    visible = (tile.positions + 1).div(ratio, rounding_mode="floor")
    most = visible[:, -1:]
    unseen = numbers >= visible.unsqueeze(2)
    found = torch.minimum(numbers, most - 1)
    return found, TileKeys(found.flatten(), unseen)
