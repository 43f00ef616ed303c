"""Softmax attention with torch alone: batched gathers, then one product kernel for each tile.

Uses the fused kernel where it fits and plain products where it does not (softcap, sinks, LSE, trees). Decode rows are
served together whatever their lengths; no loop runs over them.
"""

from __future__ import annotations

import itertools
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
from sightline.attention.spec import Feature, SoftmaxSpec, SpecKind
from sightline.attention.tiles import (
    RowSpan,
    fill_bias,
    fill_slots,
    is_plain_causal,
    needs_bias,
    pack_tiles,
    row_spans,
    split_long,
)
from sightline.core.batch import MaskKind
from sightline.core.device import DeviceKind
from sightline.kernels.paging import gather_entries, write_entries
from sightline.kernels.softmax_attention import composed_attention, fused_attention

MIN_GATHERED_KEYS = 4096
"""Keys that a tile may gather even where sequences are shorter: enough rows to be worth a call."""


@dataclass(frozen=True, eq=False)
class _Scratch:
    """Where a lane gathers keys and values: [max_keys, num_kv_heads, head_dim] each."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, eq=False)
class _Gathered:
    """A tile's part of the scratch memory, seen two ways."""

    flat: Tensor
    """[num_rows * num_keys, num_kv_heads, head_dim]."""
    by_row: Tensor
    """[num_rows, num_keys, num_kv_heads, head_dim]."""


@dataclass(frozen=True, eq=False)
class _Tile:
    """Rows that are computed in one call."""

    num_rows: int
    query_len: int
    num_keys: int
    tokens: Tensor
    """[num_rows * query_len] int64."""
    contiguous: slice | None
    """The same tokens where they lie side by side: no copy is needed then."""
    slots: Tensor | None
    """[num_rows * num_keys] int64; None where the keys are the step's own."""
    gathered_k: _Gathered
    """Where keys are gathered to; of no use where there are no slots."""
    gathered_v: _Gathered
    bias: Tensor | None
    """[num_rows, 1, query_len, num_keys]."""
    causal: bool
    fused: bool

    def rows_of(self, values: Tensor) -> Tensor:
        """[num_rows, query_len, ...] of this tile's tokens."""
        chosen = values[self.contiguous] if self.contiguous is not None else values.index_select(0, self.tokens)
        return chosen.view(self.num_rows, self.query_len, *values.shape[1:])

    def put(self, out: Tensor, result: Tensor) -> None:
        flat = result.reshape(self.num_rows * self.query_len, *out.shape[1:])
        if self.contiguous is not None:
            out[self.contiguous] = flat
        else:
            out.index_copy_(0, self.tokens, flat)


@dataclass(frozen=True, eq=False)
class _TorchPlan(AttentionPlan[SoftmaxInputs]):
    spec: SoftmaxSpec
    keys: tuple[Tensor, ...]
    """By layer: [num_slots, num_kv_heads, head_dim]."""
    values: tuple[Tensor, ...]
    """By layer, as the keys."""
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`, which then has no tile that gathers either."""
    tiles: tuple[_Tile, ...]
    needs_lse: bool

    def prepare(self) -> None:
        """Everything was built on the host."""

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Lse | None:
        keys, values = self.keys[layer], self.values[layer]
        if self.write_slots is not None:
            write_entries(keys, self.write_slots, inputs.k)
            write_entries(values, self.write_slots, inputs.v)
        lse = None
        if self.needs_lse:
            lse = inputs.q.new_full(inputs.q.shape[:2], -torch.inf, dtype=torch.float32)
        for tile in self.tiles:
            q = tile.rows_of(inputs.q)
            if tile.slots is None:
                k, v = tile.rows_of(inputs.k), tile.rows_of(inputs.v)
            else:
                k, v = tile.gathered_k.by_row, tile.gathered_v.by_row
                gather_entries(keys, tile.slots, tile.gathered_k.flat)
                gather_entries(values, tile.slots, tile.gathered_v.flat)
            if tile.fused:
                tile.put(out, fused_attention(q, k, v, tile.bias, scale=self.spec.scale, causal=tile.causal))
                continue
            result, tile_lse = composed_attention(
                q, k, v, tile.bias, scale=self.spec.scale, softcap=self.spec.softcap, sinks=inputs.sinks
            )
            tile.put(out, result)
            if lse is not None:
                tile.put(lse, tile_lse)
        return lse


def _capability(dtype: torch.dtype) -> Capability:
    return Capability(
        spec_kinds=frozenset({SpecKind.SOFTMAX}),
        devices=frozenset({DeviceKind.CPU}),
        compute_capabilities=ANY,
        dtypes=frozenset({dtype}),
        cache_dtypes=frozenset({dtype}),
        head_dims=ANY,
        page_sizes=ANY,
        features=frozenset(Feature),
        host_lengths=HostLengths.EXACT,
    )


class TorchBackend(AttentionBackend[SoftmaxInputs]):
    """For real use on a CPU."""

    capabilities: ClassVar[tuple[Capability, ...]] = tuple(
        _capability(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    )

    def __init__(self, context: BackendContext) -> None:
        self._spec = context.spec
        self._pool = context.cache.pools["kv"]
        self._keys = self._pool.plane("k").unbind(0)
        self._values = self._pool.plane("v").unbind(0)
        self._dtype = context.dtype
        longest = context.limits.max_seq_len
        if context.spec.window is not None:
            longest = min(longest, context.spec.window + context.limits.max_step_tokens)
        self._max_keys = max(longest, MIN_GATHERED_KEYS)
        shape = (self._max_keys, context.spec.num_kv_heads, context.spec.head_dim)
        self._scratch = {
            lane: _Scratch(
                *(context.workspace.lease(context.group, name, lane, shape, context.dtype) for name in ("k", "v"))
            )
            for lane in context.limits.lanes
        }

    def plan(self, step: StepView, buffers: PlanBuffers) -> _TorchPlan:
        transient = step.policy is CachePolicy.TRANSIENT
        spans = row_spans(step.batch, self._spec.window)
        if not transient:
            spans = split_long(spans, self._spec, knows_causal=self._fits_fused(step))
        tiles = pack_tiles(spans, self._max_keys, transient=transient)
        return _TorchPlan(
            spec=self._spec,
            keys=self._keys,
            values=self._values,
            write_slots=None if transient else step.batch.pools[self._pool.key].write_slots,
            tiles=tuple(self._plan_tile(f"tile{i}", tile, step, buffers) for i, tile in enumerate(tiles)),
            needs_lse=Feature.LSE in step.needs,
        )

    def _plan_tile(self, name: str, rows: tuple[RowSpan, ...], step: StepView, buffers: PlanBuffers) -> _Tile:
        query_len, num_keys = rows[0].query_len, max(span.num_keys for span in rows)
        from_step = step.policy is CachePolicy.TRANSIENT or rows[0].is_fresh
        tokens = buffers.take(f"{name}.tokens", (len(rows) * query_len,), torch.int64)
        first = torch.tensor([span.first_token for span in rows], device=tokens.device).unsqueeze(1)
        tokens.view(len(rows), query_len).copy_(first + torch.arange(query_len, device=tokens.device))
        slots = None
        if not from_step:
            slots = buffers.take(f"{name}.slots", (len(rows) * num_keys,), torch.int64)
            fill_slots(rows, self._pool.table, step.batch.rows, self._pool.page_size, slots.view(len(rows), num_keys))
        # A tree's query that sees nothing would be NaN in the fused kernel.
        fused = self._fits_fused(step) and rows[0].kind is not MaskKind.TREE
        causal = fused and is_plain_causal(rows, self._spec)
        bias = None
        if not causal and needs_bias(rows, self._spec):
            bias = buffers.take(f"{name}.bias", (len(rows), 1, query_len, num_keys), self._dtype)
            fill_bias(rows, self._spec, step.batch, bias)
        return _Tile(
            num_rows=len(rows),
            query_len=query_len,
            num_keys=num_keys,
            tokens=tokens,
            contiguous=_contiguous_tokens(rows),
            slots=slots,
            gathered_k=_gathered(self._scratch[step.lane].k, len(rows), num_keys),
            gathered_v=_gathered(self._scratch[step.lane].v, len(rows), num_keys),
            bias=bias,
            causal=causal,
            fused=fused,
        )

    def _fits_fused(self, step: StepView) -> bool:
        """The fused kernel has no softcap, sinks or LSE."""
        return self._spec.softcap is None and not self._spec.sinks and Feature.LSE not in step.needs


def _gathered(scratch: Tensor, num_rows: int, num_keys: int) -> _Gathered:
    flat = scratch[: num_rows * num_keys]
    return _Gathered(flat, flat.view(num_rows, num_keys, *scratch.shape[1:]))


def _contiguous_tokens(rows: tuple[RowSpan, ...]) -> slice | None:
    for previous, span in itertools.pairwise(rows):
        if span.first_token != previous.first_token + previous.query_len:
            return None
    return slice(rows[0].first_token, rows[-1].first_token + rows[-1].query_len)
