"""Softmax attention with torch alone: one kernel call per tile of rows.

Uses the fused kernel where it fits and plain matrix products otherwise (softcap, sinks, LSE, trees). Rows with short
contexts are gathered and served together, whatever their lengths. A long context whose pages are adjacent in the pool
is read in place, which costs a call but saves copying it. A cache of 8-bit floats is always gathered, because it must
be converted; so are new tokens, so that a row sees the rounded values that the cache keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.torch.rows import ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    Lse,
    SoftmaxInputs,
    SoftmaxQueries,
    StepView,
)
from sightline.attention.shared.dense_tiles import DenseTile, Sources, TilePlanner
from sightline.attention.shared.entry_planes import EntryPlane, entry_planes
from sightline.attention.shared.key_sources import FromStep, Gathered, GatherScratch, InPlace, KeySource, LayerEntries
from sightline.attention.shared.tiles import MAX_BIAS_ELEMENTS, row_spans
from sightline.attention.spec import SoftmaxSpec
from sightline.core.batch import MaskKind
from sightline.kernels.softmax_attention import composed_attention, fused_attention

MIN_GATHERED_KEYS = 4096
"""Keys that a tile may gather even if sequences are shorter: enough rows to be worth a call."""

MIN_KEYS_IN_PLACE = 1024
"""Rows with at least this many keys are worth their own call if that saves gathering. A row alone has one anyway.

At 16 rows of 256 keys, separate calls cost half as much again as gathering; at 512 keys they break even.
"""

MIN_UNMASKED_KEYS = 16
"""Tiles with fewer keys get a mask even if they need none.

Without one, torch's fused kernel takes the NaN scores of fewer keys than a vector register holds for hidden keys, and
returns zeros: a row whose queries or keys are NaN would go on as if nothing had happened.
"""


@dataclass(frozen=True, eq=False)
class _Reads:
    """How a planned step reads the cache."""

    spec: SoftmaxSpec
    keys: tuple[EntryPlane, ...]
    """Per layer: [num_slots, num_kv_heads, head_dim]."""
    values: tuple[EntryPlane, ...]
    """Per layer: [num_slots, num_kv_heads, head_dim]."""
    tiles: tuple[DenseTile[KeySource], ...]
    fused: bool
    """True if the fused kernel serves every tile in which each query sees a key."""
    needs_lse: bool

    def attend(self, inputs: SoftmaxQueries, entries: LayerEntries, out: Tensor) -> Lse | None:
        lse = None
        if self.needs_lse:
            lse = inputs.q.new_full(inputs.q.shape[:2], -torch.inf, dtype=torch.float32)
        for tile in self.tiles:
            q = tile.tokens.of(inputs.q)
            k, v = tile.source.read(entries)
            # In the fused kernel, a query that sees no key would give NaN.
            if self.fused and tile.kind in (MaskKind.CAUSAL, MaskKind.FULL):
                tile.tokens.put(out, fused_attention(q, k, v, tile.bias, scale=self.spec.scale, causal=tile.causal))
                continue
            result, tile_lse = composed_attention(
                q, k, v, tile.bias, scale=self.spec.scale, softcap=self.spec.softcap, sinks=inputs.sinks
            )
            tile.tokens.put(out, result)
            if lse is not None:
                tile.tokens.put(lse, tile_lse)
        return lse


@dataclass(frozen=True, eq=False)
class _TorchPlan(AttentionPlan[SoftmaxInputs]):
    reads: _Reads
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`, when no tile reads a pool."""

    def prepare(self) -> None:
        """Nothing to do: everything was built on the host."""

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Lse | None:
        entries = LayerEntries(layer, self.reads.keys[layer], self.reads.values[layer], inputs)
        if self.write_slots is not None:
            entries.keys.write(self.write_slots, inputs.k)
            entries.values.write(self.write_slots, inputs.v)
        return self.reads.attend(inputs, entries, out)


@dataclass(frozen=True, eq=False)
class _BorrowedPlan(AttentionPlan[SoftmaxQueries]):
    reads: _Reads

    def prepare(self) -> None:
        """Nothing to do: everything was built on the host."""

    def run(self, layer: int, inputs: SoftmaxQueries, out: Tensor) -> Lse | None:
        entries = LayerEntries(layer, self.reads.keys[layer], self.reads.values[layer], None)
        return self.reads.attend(inputs, entries, out)


class TorchBackend(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
    """The default backend on a CPU."""

    capabilities: ClassVar[tuple[Capability, ...]] = ROWS

    def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
        self._spec = context.spec
        self._pool = pool = context.cache.pools["kv"]
        self._keys = entry_planes(pool, "k")
        self._values = entry_planes(pool, "v")
        longest = context.limits.max_seq_len
        if context.spec.window is not None:
            longest = min(longest, context.spec.window + context.limits.max_step_tokens)
        max_keys = max(longest, MIN_GATHERED_KEYS)
        shape = (max_keys, context.spec.num_kv_heads, context.spec.head_dim)
        scratch = {
            lane: GatherScratch(
                *(context.workspace.lease(context.group, name, lane, shape, context.dtype) for name in ("k", "v"))
            )
            for lane in context.limits.lanes
        }
        sources = Sources[KeySource](
            in_place=lambda run: InPlace(run, pool.plane("k"), pool.plane("v")),
            from_step=FromStep,
            gathered=lambda slots, lane: Gathered(slots, scratch[lane]),
        )
        self._tiles = TilePlanner(
            pool, context.spec, context.dtype, max_keys, MIN_KEYS_IN_PLACE, MAX_BIAS_ELEMENTS, sources
        )

    def plan(self, step: StepView, buffers: PlanBuffers) -> AttentionPlan[SoftmaxInputs]:
        # Whether the step needs a softcap, sinks or LSE, which the fused kernel lacks.
        fused = self._spec.softcap is None and not self._spec.sinks and not step.needs_lse
        spans = row_spans(step.batch, self._spec.window)
        tiles = self._tiles.plan(
            spans, step, buffers, knows_causal=fused, min_unmasked_keys=MIN_UNMASKED_KEYS if fused else 0
        )
        reads = _Reads(self._spec, self._keys, self._values, tuple(tiles), fused, step.needs_lse)
        return _BorrowedPlan(reads) if step.is_borrowed else _TorchPlan(reads, step.write_slots(self._pool))
