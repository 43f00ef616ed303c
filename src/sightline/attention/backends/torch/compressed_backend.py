"""Compressed attention with torch alone: see `attention.compressed` for its parts.

Computes in fp32. The keys of all windows are gathered into a leased scratch once a layer; queries go through in tiles
of bounded size. With entries in host memory they go turn by turn, as the group's coordinator has entries on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.torch.rows import COMPRESSED_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.compressed.attend import AttentionTile, plan_tile
from sightline.attention.compressed.inputs import CompressedInputs
from sightline.attention.compressed.layout import NewTokens, row_parts
from sightline.attention.compressed.spec import CompressedSpec
from sightline.attention.compressed.step import StepCompression, plan_compression, row_slots
from sightline.attention.compressed.tiles import QuerySpan, TileSizes, query_tiles, whole_rows
from sightline.attention.compressed.windows import WindowKeys, plan_window_keys
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    EntryPlan,
    EntryTurn,
    Lse,
    StepView,
)
from sightline.attention.sparse.chosen import fetch_slots


@dataclass(frozen=True, eq=False)
class _Planes:
    """The tensors that a layer keeps."""

    window: Tensor
    """[num_slots, window, head_dim]."""
    sums: Tensor | None
    """[num_slots, num_sums, 3, head_dim] fp32; None without compression."""
    entries: Tensor | None
    """[num_slots, head_dim]; None without compression."""


@dataclass(frozen=True, eq=False)
class _HotEntries:
    """Entries in host memory: where those are on the device that a step reads and writes."""

    plan: EntryPlan
    slots: Tensor
    """[num_tokens, top_k] int64: where chosen entries are. Every turn fills the rows of its tokens."""

    def read_by(self, turn: EntryTurn, layer: int, chosen: Tensor | None) -> Tensor:
        """Fetches what a turn reads; returns the slots."""
        assert chosen is not None, "a sparse step has a choice"
        fetch_slots(turn, layer, chosen, self.slots)
        return self.slots


@dataclass(frozen=True, eq=False)
class _CompressedPlan(AttentionPlan[CompressedInputs]):
    layers: tuple[_Planes, ...] | None
    """None under `TRANSIENT`."""
    window: WindowKeys
    compression: StepCompression | None
    """None without compression."""
    tiles: tuple[tuple[EntryTurn | None, tuple[AttentionTile, ...]], ...]
    """The tiles of each turn; None: they find all entries themselves."""
    hot: _HotEntries | None
    """None if entries are on the device."""

    def prepare(self) -> None:
        if self.hot is not None:
            self.hot.plan.prepare()

    def run(self, layer: int, inputs: CompressedInputs, out: Tensor) -> Lse | None:
        planes = None if self.layers is None else self.layers[layer]
        source = self._compress(layer, inputs, planes)
        self.window.fill(inputs.key, None if planes is None else planes.window)
        for turn, tiles in self.tiles:
            slots = None
            if turn is not None and self.hot is not None:
                slots = self.hot.read_by(turn, layer, inputs.chosen)
            for tile in tiles:
                tile.run(inputs, self.window.scratch, source, slots, out)
        return None

    def _compress(self, layer: int, inputs: CompressedInputs, planes: _Planes | None) -> Tensor | None:
        """Keeps new entries; returns the plane that tiles read, None without compression."""
        if self.compression is None or inputs.entries is None:
            return None
        sums, entries = (None, None) if planes is None else (planes.sums, planes.entries)
        if self.hot is None:
            return self.compression.run(inputs.entries, sums, entries, self.window.scratch.dtype)
        plane = self.hot.plan.plane(layer)
        self.compression.run(inputs.entries, sums, plane, self.window.scratch.dtype)
        self.hot.plan.keep(layer)
        # The pool in host memory has every entry, for steps that are not sparse.
        return plane if self.hot.plan.turns else entries


class TorchCompressedBackend(AttentionBackend[CompressedSpec, CompressedInputs]):
    """Serves compressed attention by default where no compiled kernel does."""

    capabilities: ClassVar[tuple[Capability, ...]] = COMPRESSED_ROWS

    def __init__(self, context: BackendContext[CompressedSpec]) -> None:
        self._spec = spec = context.spec
        self._device = context.device
        self._cache, self._coordinator = context.cache, context.coordinator
        self._layers = _planes_by_layer(context)
        limits, window = context.limits, context.cache.states.plane("window")
        places = limits.max_rows * spec.window + limits.max_step_tokens
        self._scratch = {
            lane: context.workspace.lease(context.group, "window keys", lane, (places, spec.head_dim), window.dtype)
            for lane in limits.lanes
        }
        num_slots = limits.max_step_tokens if context.cache.is_on_host else 0
        self._slots = {
            lane: context.workspace.lease(
                context.group, "chosen slots", lane, (num_slots, spec.top_k or 0), torch.int64
            )
            for lane in limits.lanes
        }

    def plan(self, step: StepView, buffers: PlanBuffers) -> _CompressedPlan:
        spec, rows, states = self._spec, row_parts(step.batch), step.states
        read_slots = None if states is None else row_slots(rows, states.read_slots)
        kept = () if states is None else states.kept_host
        scratch = self._scratch[step.lane]
        window = plan_window_keys(spec.window, rows, kept, read_slots, scratch, step.batch.num_tokens)
        compression, hot = None, self._plan_hot(step, buffers)
        if spec.compression is not None:
            pool = self._cache.pools["entry"]
            slots = step.write_slots(pool) if hot is None else hot.plan.new_slots
            compression = plan_compression(spec.compression, spec.head_dim, step, rows, pool, slots, self._device)
        places = None if compression is None else compression.places
        sizes = TileSizes(
            heads=spec.num_q_heads,
            head_dim=spec.head_dim,
            window=spec.window,
            ratio=0 if spec.compression is None else spec.compression.ratio,
            top_k=spec.top_k if step.is_sparse else None,
        )
        turns: list[tuple[EntryTurn | None, list[QuerySpan]]] = []
        if hot is not None:
            turns += [(turn, _queries(rows, turn)) for turn in hot.plan.turns]
        tiles = tuple(
            (
                turn,
                tuple(
                    plan_tile(spec, sizes, spans, window.num_ring_keys, places, self._device)
                    for spans in query_tiles(queries, sizes)
                ),
            )
            for turn, queries in turns or [(None, whole_rows(rows))]
        )
        return _CompressedPlan(None if states is None else self._layers, window, compression, tiles, hot)

    def _plan_hot(self, step: StepView, buffers: PlanBuffers) -> _HotEntries | None:
        if not self._cache.is_on_host or step.is_transient:
            return None
        return _HotEntries(self._coordinator.plan(step, buffers), self._slots[step.lane][: step.batch.num_tokens])


def _queries(rows: tuple[NewTokens, ...], turn: EntryTurn) -> list[QuerySpan]:
    """The queries of a turn."""
    by_row = {row.row: row for row in rows}
    return [
        QuerySpan(row, row.context + span.first_token - row.first, span.query_len)
        for span in turn.spans()
        for row in [by_row[span.row]]
    ]


def _planes_by_layer(context: BackendContext[CompressedSpec]) -> tuple[_Planes, ...]:
    states, pools = context.cache.states, context.cache.pools
    windows = states.plane("window").unbind(0)
    if context.spec.compression is None:
        return tuple(_Planes(window, None, None) for window in windows)
    sums, entries = states.plane("sums").unbind(0), pools["entry"].plane("entry").unbind(0)
    return tuple(map(_Planes, windows, sums, entries))
