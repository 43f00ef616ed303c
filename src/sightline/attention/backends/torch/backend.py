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

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import ANY, Capability, HostLengths
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    CachePolicy,
    Lse,
    SoftmaxInputs,
    StepView,
)
from sightline.attention.shared.entry_planes import EntryPlane, entry_planes, is_scaled
from sightline.attention.shared.key_sources import (
    FromStep,
    Gathered,
    GatherScratch,
    InPlace,
    KeySource,
    LayerEntries,
    TileTokens,
)
from sightline.attention.shared.tiles import (
    RowSpan,
    fill_bias,
    fill_slots,
    is_plain_causal,
    needs_bias,
    pack_tiles,
    row_spans,
    split_long,
)
from sightline.attention.spec import Feature, SoftmaxSpec, SpecKind
from sightline.cache.spec import SCALED_DTYPES
from sightline.core.batch import MaskKind
from sightline.core.device import DeviceKind
from sightline.kernels.softmax_attention import composed_attention, fused_attention

MIN_GATHERED_KEYS = 4096
"""Keys that a tile may gather even if sequences are shorter: enough rows to be worth a call."""

MIN_KEYS_IN_PLACE = 1024
"""Rows with at least this many keys are worth their own call if that saves gathering. A row alone has one anyway.

At 16 rows of 256 keys, separate calls cost half as much again as gathering; at 512 keys they break even.
"""


@dataclass(frozen=True, eq=False)
class _Tile:
    """Rows computed in one call."""

    tokens: TileTokens
    source: KeySource
    bias: Tensor | None
    """[num_rows, 1, query_len, num_keys]."""
    causal: bool
    fused: bool


@dataclass(frozen=True, eq=False)
class _TorchPlan(AttentionPlan[SoftmaxInputs]):
    spec: SoftmaxSpec
    keys: tuple[EntryPlane, ...]
    """Per layer: [num_slots, num_kv_heads, head_dim]."""
    values: tuple[EntryPlane, ...]
    """Per layer: [num_slots, num_kv_heads, head_dim]."""
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`, when no tile reads a pool."""
    tiles: tuple[_Tile, ...]
    needs_lse: bool

    def prepare(self) -> None:
        """Nothing to do: everything was built on the host."""

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Lse | None:
        entries = LayerEntries(layer, self.keys[layer], self.values[layer], inputs)
        if self.write_slots is not None:
            entries.keys.write(self.write_slots, inputs.k)
            entries.values.write(self.write_slots, inputs.v)
        lse = None
        if self.needs_lse:
            lse = inputs.q.new_full(inputs.q.shape[:2], -torch.inf, dtype=torch.float32)
        for tile in self.tiles:
            q = tile.tokens.of(inputs.q)
            k, v = tile.source.read(entries)
            if tile.fused:
                tile.tokens.put(out, fused_attention(q, k, v, tile.bias, scale=self.spec.scale, causal=tile.causal))
                continue
            result, tile_lse = composed_attention(
                q, k, v, tile.bias, scale=self.spec.scale, softcap=self.spec.softcap, sinks=inputs.sinks
            )
            tile.tokens.put(out, result)
            if lse is not None:
                tile.tokens.put(lse, tile_lse)
        return lse


def _capability(dtype: torch.dtype) -> Capability:
    return Capability(
        spec_kinds=frozenset({SpecKind.SOFTMAX}),
        devices=frozenset({DeviceKind.CPU, DeviceKind.CUDA}),
        compute_capabilities=ANY,
        dtypes=frozenset({dtype}),
        cache_dtypes=SCALED_DTYPES | {dtype},
        head_dims=ANY,
        group_sizes=ANY,
        page_sizes=ANY,
        # Other rows change the shapes of the products, and with them the order of summation.
        features=frozenset(Feature) - {Feature.BATCH_INVARIANT},
        host_lengths=HostLengths.EXACT,
    )


class TorchBackend(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
    """The default backend on a CPU."""

    capabilities: ClassVar[tuple[Capability, ...]] = tuple(
        _capability(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    )

    def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
        self._spec = context.spec
        self._pool = context.cache.pools["kv"]
        self._keys = entry_planes(self._pool, "k")
        self._values = entry_planes(self._pool, "v")
        self._is_scaled = is_scaled(self._pool)
        self._dtype = context.dtype
        longest = context.limits.max_seq_len
        if context.spec.window is not None:
            longest = min(longest, context.spec.window + context.limits.max_step_tokens)
        self._max_keys = max(longest, MIN_GATHERED_KEYS)
        shape = (self._max_keys, context.spec.num_kv_heads, context.spec.head_dim)
        self._scratch = {
            lane: GatherScratch(
                *(context.workspace.lease(context.group, name, lane, shape, context.dtype) for name in ("k", "v"))
            )
            for lane in context.limits.lanes
        }

    def plan(self, step: StepView, buffers: PlanBuffers) -> _TorchPlan:
        transient = step.policy is CachePolicy.TRANSIENT
        spans = row_spans(step.batch, self._spec.window)
        if not transient:
            spans = split_long(spans, self._spec, knows_causal=self._fits_fused(step))
        least = MIN_KEYS_IN_PLACE if len(spans) > 1 else 1
        alone = {
            span: InPlace(run, self._pool.plane("k"), self._pool.plane("v"))
            for span in spans
            if span.num_keys >= least and (run := self._run(span, step)) is not None
        }
        together = pack_tiles([span for span in spans if span not in alone], self._max_keys, transient=transient)
        tiles = [*((span,) for span in alone), *together]
        return _TorchPlan(
            spec=self._spec,
            keys=self._keys,
            values=self._values,
            write_slots=None if transient else step.batch.pools[self._pool.key].write_slots,
            tiles=tuple(
                self._plan_tile(f"tile{index}", tile, alone.get(tile[0]), step, buffers)
                for index, tile in enumerate(tiles)
            ),
            needs_lse=Feature.LSE in step.needs,
        )

    def _run(self, span: RowSpan, step: StepView) -> slice | None:
        """The slots of a row that is read in place, otherwise None."""
        if self._is_scaled or self._comes_from_step(span, step):
            return None
        stop = span.context_len + span.query_len
        return self._pool.table.run(step.batch.rows[span.row], span.first_key, stop, self._pool.page_size)

    def _plan_tile(
        self, name: str, rows: tuple[RowSpan, ...], in_place: InPlace | None, step: StepView, buffers: PlanBuffers
    ) -> _Tile:
        query_len, num_keys = rows[0].query_len, max(span.num_keys for span in rows)
        tokens = TileTokens.planned(name, rows, buffers)
        source: KeySource
        if in_place is not None:
            source = in_place
        elif self._comes_from_step(rows[0], step):
            source = FromStep(tokens)
        else:
            slots = buffers.take(f"{name}.slots", (len(rows), num_keys), torch.int64)
            fill_slots(rows, self._pool.table, step.batch.rows, self._pool.page_size, slots)
            source = Gathered(slots, self._scratch[step.lane])
        # In the fused kernel, a tree query that sees no key would give NaN.
        fused = self._fits_fused(step) and rows[0].kind is not MaskKind.TREE
        causal = fused and is_plain_causal(rows, self._spec)
        bias = None
        if not causal and needs_bias(rows, self._spec):
            bias = buffers.take(f"{name}.bias", (len(rows), 1, query_len, num_keys), self._dtype)
            fill_bias(rows, self._spec, step.batch, bias)
        return _Tile(tokens, source, bias, causal, fused)

    def _comes_from_step(self, span: RowSpan, step: StepView) -> bool:
        """True if the row reads only the step's own keys, and any cache stores them unchanged."""
        return step.policy is CachePolicy.TRANSIENT or (span.is_fresh and not self._is_scaled)

    def _fits_fused(self, step: StepView) -> bool:
        """True if the step needs no softcap, sinks or LSE, which the fused kernel lacks."""
        return self._spec.softcap is None and not self._spec.sinks and Feature.LSE not in step.needs
