"""Attention of tiles to windows and entries, in one softmax with sinks, in fp32.

Does not know where keys come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.compressed.entries import EntryPlaces
from sightline.attention.compressed.inputs import CompressedInputs
from sightline.attention.compressed.spec import CompressedSpec
from sightline.attention.compressed.tiles import (
    QuerySpan,
    QueryTile,
    TileKeys,
    TileSizes,
    dense_entries,
    window_keys,
)


@dataclass(frozen=True, eq=False)
class ReadEntries:
    """The entries that a tile reads: the same for all queries of a span, or those that each chose."""

    places: EntryPlaces
    dense: TileKeys | None
    """None if the step is sparse."""
    rows: Tensor
    """[num_spans * count, 1] int64: the row of each query, for chosen entries."""

    def gather(self, source: Tensor, chosen: Tensor | None, slots: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys [num_spans, num_keys, head_dim] and which are unseen [num_spans, count, num_keys], or per query:
        [num_queries, top_k, head_dim] and [num_queries, 1, top_k]. `chosen` [num_queries, top_k] are the tile's, and
        `slots` where they are, if that is known."""
        if self.dense is not None:
            keys = _gathered(source, self.dense)
            return keys, self.dense.unseen
        assert chosen is not None, "a sparse step has a choice"
        unseen = chosen < 0
        if slots is None:
            numbers = chosen.clamp(min=0).long()
            slots = self.places.find(self.rows.expand_as(numbers), numbers)
        keys = source.index_select(0, slots.flatten()).float().view(*slots.shape, -1)
        return keys.masked_fill_(unseen.unsqueeze(2), 0.0), unseen.unsqueeze(1)


@dataclass(frozen=True, eq=False)
class AttentionTile:
    """A planned tile."""

    spec: CompressedSpec
    tile: QueryTile
    window: TileKeys
    entries: ReadEntries | None
    """None if no query sees any."""

    def run(
        self, inputs: CompressedInputs, window: Tensor, source: Tensor | None, slots: Tensor | None, out: Tensor
    ) -> None:
        """Writes the tile's outputs. `window` [num_places, head_dim] are keys of windows, `source` those of entries;
        `slots` [num_tokens, top_k] int64 say where in it chosen ones are, None if their rows tell."""
        tile, tokens = self.tile, self.tile.tokens
        heads, head_dim = self.spec.num_q_heads, self.spec.head_dim
        q = tokens.of(inputs.q).float().mul(self.spec.scale)
        near = _gathered(window, self.window)
        queries = q.view(tile.num_spans, tile.count * heads, head_dim)
        scores = [self._scores(queries, near, self.window.unseen)]
        far, num_near = None, near.shape[1]
        if self.entries is not None and source is not None:
            chosen = None if inputs.chosen is None else tokens.of(inputs.chosen)
            far, unseen = self.entries.gather(source, chosen, None if slots is None else tokens.of(slots))
            shared = self.entries.dense is not None
            scores.append(self._scores(queries if shared else q.view(-1, heads, head_dim), far, unseen))
        sinks = inputs.sinks.float().view(1, heads, 1).expand(tile.num_spans * tile.count, heads, 1)
        rows = tile.num_spans * tile.count
        joined = torch.cat([*(each.view(rows, heads, -1) for each in scores), sinks], dim=2)
        weights = torch.softmax(joined, dim=2)
        found = torch.bmm(weights[..., :num_near].reshape(tile.num_spans, -1, num_near), near)
        found = found.view(rows, heads, head_dim)
        if far is not None:
            of_entries = weights[..., num_near:-1].reshape(far.shape[0], -1, far.shape[1])
            found = found + torch.bmm(of_entries, far).view(found.shape)
        tokens.put(out, found.to(out.dtype))

    def _scores(self, queries: Tensor, keys: Tensor, unseen: Tensor) -> Tensor:
        """[n, queries, num_keys]: products of queries [n, queries of all heads, head_dim] and keys [n, num_keys,
        head_dim]; -inf where `unseen` [n, queries, num_keys], the same for all heads."""
        scores = torch.bmm(queries, keys.transpose(1, 2))
        by_head = scores.view(unseen.shape[0], unseen.shape[1], -1, unseen.shape[2])
        by_head.masked_fill_(unseen.unsqueeze(2), -torch.inf)
        return scores


def _gathered(source: Tensor, keys: TileKeys) -> Tensor:
    """[num_spans, num_keys, head_dim] fp32."""
    return source.index_select(0, keys.places).float().view(keys.unseen.shape[0], keys.unseen.shape[2], -1)


def plan_tile(
    spec: CompressedSpec,
    sizes: TileSizes,
    spans: tuple[QuerySpan, ...],
    num_ring_keys: int,
    places: EntryPlaces | None,
    device: torch.device,
) -> AttentionTile:
    """Plans a tile; `places` are those of the layer's entries, None if it has none."""
    tile = QueryTile.of(spans, device)
    entries = None if places is None else plan_entries(tile, sizes, spans, places)
    return AttentionTile(spec, tile, window_keys(tile, spec.window, num_ring_keys), entries)


def plan_entries(
    tile: QueryTile, sizes: TileSizes, spans: tuple[QuerySpan, ...], places: EntryPlaces
) -> ReadEntries | None:
    """What the tile reads of its rows' entries; None if no query sees any."""
    most = max(span.num_entries(sizes.ratio) for span in spans)
    if not most:
        return None
    rows = places.rows(tile)
    dense = None
    if sizes.top_k is None:
        numbers, keys = dense_entries(tile, sizes.ratio, most)
        found = places.find(rows.unsqueeze(1).expand_as(numbers), numbers)
        dense = keys._replace(places=found.flatten())
    return ReadEntries(places, dense, rows.repeat_interleave(tile.count).unsqueeze(1))
