"""Indexers over compressed keys with torch alone: the keys of a row are gathered, and queries are scored in tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.torch.rows import COMPRESSED_INDEX_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.compressed.inputs import CompressedIndexInputs
from sightline.attention.compressed.layout import row_parts
from sightline.attention.compressed.spec import CompressedIndexSpec
from sightline.attention.compressed.step import StepCompression, plan_compression
from sightline.attention.compressed.tiles import QueryTile, TileKeys, TileSizes, dense_entries, query_tiles, whole_rows
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, Lse, StepView
from sightline.kernels.choice import choose_highest


@dataclass(frozen=True, eq=False)
class _IndexTile:
    tile: QueryTile
    keys: TileKeys | None
    """None if no query sees an entry."""

    def run(self, inputs: CompressedIndexInputs, source: Tensor, out: Tensor) -> None:
        """Writes what the tile's queries choose; `source` [num_places, head_dim] are keys."""
        tile, tokens = self.tile, self.tile.tokens
        chosen = torch.full((tile.num_spans * tile.count, out.shape[1]), -1, dtype=torch.int32, device=out.device)
        if self.keys is not None:
            choose_highest(self._scores(inputs, self.keys, source), chosen)
        tokens.put(out, chosen)

    def _scores(self, inputs: CompressedIndexInputs, keys: TileKeys, source: Tensor) -> Tensor:
        """[num_queries, num_keys] fp32: -inf for keys that a query does not see."""
        tile, tokens = self.tile, self.tile.tokens
        q, weights = tokens.of(inputs.q).float(), tokens.of(inputs.weights).float()
        found = source.index_select(0, keys.places).float().view(tile.num_spans, -1, q.shape[2])
        products = torch.bmm(q.reshape(tile.num_spans, -1, q.shape[2]), found.transpose(1, 2)).relu_()
        scores = torch.bmm(weights.unsqueeze(1), products.view(*weights.shape, -1)).squeeze(1)
        return scores.masked_fill_(keys.unseen.view(scores.shape), -torch.inf)


@dataclass(frozen=True, eq=False)
class _CompressedIndexPlan(AttentionPlan[CompressedIndexInputs]):
    sums: tuple[Tensor, ...] | None
    """Per layer: [num_slots, num_sums, 3, head_dim] fp32; None under `TRANSIENT`."""
    entries: tuple[Tensor, ...]
    """Per layer: [num_slots, head_dim]."""
    compression: StepCompression
    tiles: tuple[_IndexTile, ...]
    """Empty if the step is not sparse."""

    def prepare(self) -> None:
        """Nothing to do: everything was built on the host."""

    def run(self, layer: int, inputs: CompressedIndexInputs, out: Tensor) -> Lse | None:
        sums, entries = (None, None) if self.sums is None else (self.sums[layer], self.entries[layer])
        source = self.compression.run(inputs.entries, sums, entries, self.entries[layer].dtype)
        for tile in self.tiles:
            tile.run(inputs, source, out)
        return None


class TorchCompressedIndexBackend(AttentionBackend[CompressedIndexSpec, CompressedIndexInputs]):
    """Serves indexers over compressed keys by default where no compiled kernel does."""

    capabilities: ClassVar[tuple[Capability, ...]] = COMPRESSED_INDEX_ROWS

    def __init__(self, context: BackendContext[CompressedIndexSpec]) -> None:
        self._spec = context.spec
        self._device = context.device
        self._pool = context.cache.pools["index"]
        self._entries = self._pool.plane("key").unbind(0)
        self._sums = context.cache.states.plane("sums").unbind(0)

    def plan(self, step: StepView, buffers: PlanBuffers) -> _CompressedIndexPlan:
        del buffers
        spec, rows = self._spec, row_parts(step.batch)
        slots = step.write_slots(self._pool)
        compression = plan_compression(spec.compression, spec.head_dim, step, rows, self._pool, slots, self._device)
        tiles: list[_IndexTile] = []
        if step.is_sparse:
            sizes = TileSizes(spec.num_q_heads, spec.head_dim, window=0, ratio=spec.compression.ratio, top_k=None)
            for spans in query_tiles(whole_rows(rows), sizes):
                most = max(span.num_entries(sizes.ratio) for span in spans)
                tiles.append(self._tile(QueryTile.of(spans, self._device), most, compression))
        sums = None if step.states is None else self._sums
        return _CompressedIndexPlan(sums, self._entries, compression, tuple(tiles))

    def _tile(self, tile: QueryTile, most: int, compression: StepCompression) -> _IndexTile:
        if not most:
            return _IndexTile(tile, None)
        numbers, keys = dense_entries(tile, self._spec.compression.ratio, most)
        rows = compression.places.rows(tile).unsqueeze(1).expand_as(numbers)
        return _IndexTile(tile, keys._replace(places=compression.places.find(rows, numbers).flatten()))
