"""Compressed attention with torch alone: see `attention.compressed` for its parts.

Computes in fp32. The keys of all windows are gathered into a leased scratch once a layer; queries go through in tiles
of bounded size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sightline.attention.backends.torch.rows import COMPRESSED_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.compressed.attend import AttentionTile, plan_tile
from sightline.attention.compressed.inputs import CompressedInputs
from sightline.attention.compressed.layout import row_parts
from sightline.attention.compressed.spec import CompressedSpec
from sightline.attention.compressed.step import StepCompression, plan_compression, row_slots
from sightline.attention.compressed.tiles import TileSizes, query_tiles
from sightline.attention.compressed.windows import WindowKeys, plan_window_keys
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, Lse, StepView


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
class _CompressedPlan(AttentionPlan[CompressedInputs]):
    layers: tuple[_Planes, ...] | None
    """None under `TRANSIENT`."""
    window: WindowKeys
    compression: StepCompression | None
    """None without compression."""
    tiles: tuple[AttentionTile, ...]

    def prepare(self) -> None:
        """Nothing to do: everything was built on the host."""

    def run(self, layer: int, inputs: CompressedInputs, out: Tensor) -> Lse | None:
        planes = None if self.layers is None else self.layers[layer]
        source = None
        if self.compression is not None and inputs.entries is not None:
            sums, entries = (None, None) if planes is None else (planes.sums, planes.entries)
            source = self.compression.run(inputs.entries, sums, entries, self.window.scratch.dtype)
        self.window.fill(inputs.key, None if planes is None else planes.window)
        for tile in self.tiles:
            tile.run(inputs, self.window.scratch, source, out)
        return None


class TorchCompressedBackend(AttentionBackend[CompressedSpec, CompressedInputs]):
    """Serves compressed attention by default where no compiled kernel does."""

    capabilities: ClassVar[tuple[Capability, ...]] = COMPRESSED_ROWS

    def __init__(self, context: BackendContext[CompressedSpec]) -> None:
        self._spec = spec = context.spec
        self._device = context.device
        self._cache = context.cache
        self._layers = _planes_by_layer(context)
        limits, window = context.limits, context.cache.states.plane("window")
        places = limits.max_rows * spec.window + limits.max_step_tokens
        self._scratch = {
            lane: context.workspace.lease(context.group, "window keys", lane, (places, spec.head_dim), window.dtype)
            for lane in limits.lanes
        }

    def plan(self, step: StepView, buffers: PlanBuffers) -> _CompressedPlan:
        del buffers
        spec, rows, states = self._spec, row_parts(step.batch), step.states
        read_slots = None if states is None else row_slots(rows, states.read_slots)
        kept = () if states is None else states.kept_host
        scratch = self._scratch[step.lane]
        window = plan_window_keys(spec.window, rows, kept, read_slots, scratch, step.batch.num_tokens)
        compression = None
        if spec.compression is not None:
            pool = self._cache.pools["entry"]
            compression = plan_compression(spec.compression, spec.head_dim, step, rows, pool, self._device)
        places = None if compression is None else compression.places
        sizes = TileSizes(
            heads=spec.num_q_heads,
            head_dim=spec.head_dim,
            window=spec.window,
            ratio=0 if spec.compression is None else spec.compression.ratio,
            top_k=spec.top_k if step.is_sparse else None,
        )
        tiles = tuple(
            plan_tile(spec, sizes, spans, window.num_ring_keys, places, self._device)
            for spans in query_tiles(rows, sizes)
        )
        return _CompressedPlan(None if states is None else self._layers, window, compression, tiles)


def _planes_by_layer(context: BackendContext[CompressedSpec]) -> tuple[_Planes, ...]:
    states, pools = context.cache.states, context.cache.pools
    windows = states.plane("window").unbind(0)
    if context.spec.compression is None:
        return tuple(_Planes(window, None, None) for window in windows)
    sums, entries = states.plane("sums").unbind(0), pools["entry"].plane("entry").unbind(0)
    return tuple(map(_Planes, windows, sums, entries))
