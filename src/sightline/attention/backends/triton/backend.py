"""Softmax attention with Sightline's own Triton kernels.

Leading rows of one new token are decoded by two launches per layer, which also write the cache. All other rows are
extended by a write and one launch. Planning is device work: the host looks only at bounds of query lengths, so a
captured step serves any lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.triton.plans import (
    PlannedDecode,
    PlannedExtend,
    decode_rows,
    layer_scales,
    lease_decode,
)
from sightline.attention.backends.triton.rows import ROWS
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
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import Lane
from sightline.kernels.triton.chip import Chip
from sightline.kernels.triton.decode import DecodeLayer, choose_decode, decode_softmax
from sightline.kernels.triton.decode_shares import DecodeScratch, divide
from sightline.kernels.triton.extend import extend_contiguous, extend_paged
from sightline.kernels.triton.extend_rules import ScoreRule
from sightline.kernels.triton.extend_tiles import FIELDS, ExtendConfig, Tiles, choose_config, num_tiles
from sightline.kernels.triton.write import write_keys_values


@dataclass(frozen=True, eq=False)
class _Reads:
    """How a planned step reads the cache, or its own entries."""

    spec: SoftmaxSpec
    layers: Sequence[DecodeLayer]
    pages: Tensor
    page_size: int
    decode: PlannedDecode | None
    extend: PlannedExtend | None
    needs_lse: bool

    def prepare(self) -> None:
        """Distributes the work, on the device."""
        if self.decode is not None:
            config, spec = self.decode.config, self.spec
            heads = spec.num_kv_heads * config.num_subgroups(spec.group_size)
            divide(self.decode.rows, self.decode.scratch, config, heads, spec.window)
        if self.extend is not None:
            self.extend.prepare()

    def make_lse(self, out: Tensor) -> Tensor | None:
        return torch.empty(out.shape[:2], dtype=torch.float32, device=out.device) if self.needs_lse else None

    def run_decode(
        self, layer: int, inputs: SoftmaxQueries, new: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor | None
    ) -> None:
        """Attends with decoded rows, and writes their new entries; without `new` they are in the cache."""
        if self.decode is not None:
            rows, scratch, config = self.decode.rows, self.decode.scratch, self.decode.config
            decode_softmax(inputs.q, new, inputs.sinks, self.layers[layer], rows, scratch, config, out, lse)

    def run_extend(self, layer: int, inputs: SoftmaxQueries, out: Tensor, lse: Tensor | None) -> None:
        """Attends with the other rows to what the cache holds."""
        rows, entries = self.extend, self.layers[layer]
        if rows is None:
            return
        extend_paged(
            inputs.q,
            entries.keys,
            entries.values,
            self.pages,
            self.page_size,
            rows.tiles,
            out,
            rule=self.rule(layer),
            masks=rows.masks,
            config=rows.config,
            sinks=inputs.sinks,
            lse=lse,
            k_scale=entries.k_scale,
            v_scale=entries.v_scale,
        )

    def rule(self, layer: int) -> ScoreRule:
        entries = self.layers[layer]
        return ScoreRule(entries.scale, entries.softcap, entries.window)


@dataclass(frozen=True, eq=False)
class _TritonPlan(AttentionPlan[SoftmaxInputs]):
    reads: _Reads
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`, which reads no pool."""

    def prepare(self) -> None:
        self.reads.prepare()

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Lse | None:
        reads, lse = self.reads, self.reads.make_lse(out)
        if self.write_slots is None:
            self._run_contiguous(layer, inputs, out, lse)
            return lse
        if reads.extend is not None:
            entries = reads.layers[layer]
            scales = (entries.k_scale, entries.v_scale)
            # Writes all tokens; decoded ones are written twice, with the same values.
            write_keys_values(inputs.k, inputs.v, entries.keys, entries.values, self.write_slots, *scales)
        reads.run_extend(layer, inputs, out, lse)
        reads.run_decode(layer, inputs, (inputs.k, inputs.v), out, lse)
        return lse

    def _run_contiguous(self, layer: int, inputs: SoftmaxInputs, out: Tensor, lse: Tensor | None) -> None:
        rows = self.reads.extend
        if rows is not None:
            extend_contiguous(
                inputs.q,
                inputs.k,
                inputs.v,
                rows.tiles,
                out,
                rule=self.reads.rule(layer),
                masks=rows.masks,
                config=rows.config,
                sinks=inputs.sinks,
                lse=lse,
            )


@dataclass(frozen=True, eq=False)
class _BorrowedPlan(AttentionPlan[SoftmaxQueries]):
    reads: _Reads

    def prepare(self) -> None:
        self.reads.prepare()

    def run(self, layer: int, inputs: SoftmaxQueries, out: Tensor) -> Lse | None:
        lse = self.reads.make_lse(out)
        self.reads.run_extend(layer, inputs, out, lse)
        self.reads.run_decode(layer, inputs, None, out, lse)
        return lse


@dataclass(frozen=True, eq=False)
class _Lane:
    """A lane's leases."""

    decode: DecodeScratch
    query_offsets: Tensor
    """[max_rows + 1] int64."""
    records: Tensor
    """[most tiles, fields] int32."""


class TritonBackend(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
    """Runs on NVIDIA GPUs."""

    capabilities: ClassVar[tuple[Capability, ...]] = ROWS

    def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
        self._spec = spec = context.spec
        self._pool = pool = context.cache.pools["kv"]
        self._dtype = context.dtype
        keys, values = pool.plane("k"), pool.plane("v")
        planes = zip(keys, values, layer_scales(pool, "k"), layer_scales(pool, "v"), strict=True)
        self._layers = tuple(DecodeLayer(*each, spec.scale, spec.window, spec.softcap) for each in planes)
        self._chip = chip = Chip.of(context.device)
        self._config = choose_decode(
            spec.head_dim,
            spec.group_size,
            keys.dtype,
            context.dtype,
            multiprocessors=chip.multiprocessors,
            shared_bytes=chip.shared_bytes,
            overlaps=chip.overlaps,
        )
        limits = context.limits

        def lane_leases(lane: Lane) -> _Lane:
            def lease(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
                return context.workspace.lease(context.group, f"triton {name}", lane, shape, dtype)

            most_tiles = max(
                num_tiles(limits.max_rows, limits.max_step_tokens, self._extend_config(longest)[1])
                for longest in (1, limits.max_step_tokens)
            )
            return _Lane(
                lease_decode(lease, self._config, limits.max_rows, spec.head_dim),
                lease("query offsets", (limits.max_rows + 1,), torch.int64),
                lease("tiles", (most_tiles, FIELDS), torch.int32),
            )

        self._lanes = {lane: lane_leases(lane) for lane in limits.lanes}
        # Zeros, then ones: a slice marks the first n rows as decoded without a copy.
        self._served = torch.zeros(2 * limits.max_rows, dtype=torch.int8, device=context.device)
        self._served[limits.max_rows :] = 1
        self._max_rows = limits.max_rows

    def _extend_config(self, longest_query: int) -> tuple[ExtendConfig, int]:
        """The tiling of queries, and the number of queries per tile."""
        spec = self._spec
        config = choose_config(
            self._dtype,
            spec.head_dim,
            spec.head_dim,
            spec.group_size,
            longest_query,
            shared_bytes=self._chip.shared_bytes,
        )
        return config, config.tile_tokens(spec.group_size)

    def plan(self, step: StepView, buffers: PlanBuffers) -> AttentionPlan[SoftmaxInputs]:
        batch, pool, lane = step.batch, self._pool, self._lanes[step.lane]
        decoding = 0 if step.is_transient else batch.num_decoding()
        decode = None
        if decoding:
            decode = PlannedDecode(decode_rows(batch, decoding, pool), lane.decode, self._config)
        extend = None
        if decoding < batch.num_rows and batch.num_tokens:
            config, tile_tokens = self._extend_config(max(batch.query_lens.bound))
            count = num_tiles(batch.num_rows, batch.num_tokens, tile_tokens)
            tiles = Tiles(lane.records[:count], tile_tokens)
            served = self._served[self._max_rows - decoding :][: batch.num_rows] if decoding else None
            extend = PlannedExtend.of(step, config, tiles, lane.query_offsets, served, buffers)
        reads = _Reads(
            spec=self._spec,
            layers=self._layers,
            pages=pool.table.pages,
            page_size=pool.page_size,
            decode=decode,
            extend=extend,
            needs_lse=step.needs_lse,
        )
        return _BorrowedPlan(reads) if step.is_borrowed else _TritonPlan(reads, step.write_slots(pool))
