"""Latent attention with Sightline's own Triton kernels.

A step whose rows have one new token each is decoded over the entries by two launches per layer, which also write the
cache. In other steps, rows with few queries attend to the entries in place, absorbed, and the rest to keys and values
expanded from them (`latent.varlen`). In a sparse step every token is decoded over what it chose (`chosen_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sightline.attention.backends.triton.chosen_rows import SLOT_BYTES, PlannedChoice, plan_choice
from sightline.attention.backends.triton.plans import (
    PlannedDecode,
    PlannedExtend,
    decode_rows,
    layer_scales,
    lease_decode,
)
from sightline.attention.backends.triton.rows import LATENT_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    EntryPlan,
    LatentInputs,
    Lse,
    StepView,
)
from sightline.attention.latent.extend import ExtendKernel
from sightline.attention.latent.phases import cheapest_way, plan_phases, split_absorbed
from sightline.attention.latent.varlen import LatentVarlen, VarlenPhases
from sightline.attention.shared.tiles import row_spans
from sightline.attention.spec import LatentSpec
from sightline.attention.workspace import Lane
from sightline.core.errors import PlanError
from sightline.kernels.latent_attention import absorb_queries, project_values
from sightline.kernels.triton.chip import Chip
from sightline.kernels.triton.decode_shares import DecodeScratch, divide
from sightline.kernels.triton.extend import extend_contiguous, extend_paged
from sightline.kernels.triton.extend_rules import ScoreRule
from sightline.kernels.triton.extend_tiles import (
    FIELDS,
    Tiles,
    choose_config,
    num_tiles,
)
from sightline.kernels.triton.latent_decode import LatentLayer, choose_latent_decode, decode_latent
from sightline.kernels.triton.merge import merge_states
from sightline.kernels.triton.project import project_real
from sightline.kernels.triton.write import write_latents


@dataclass(frozen=True, eq=False)
class _Lane:
    """A lane's leases."""

    decode: DecodeScratch
    queries: Tensor
    """[max_step_tokens, heads, latent + rope]: queries projected into latent space."""
    found: Tensor
    """[max_step_tokens, heads, latent]."""
    entries: Tensor
    """[max_step_tokens, latent + rope]: the step's own entries."""
    projected: Tensor
    """[max_step_tokens, heads, value]."""
    num_real: Tensor
    """[1] int64: number of non-padding tokens of a decode step."""
    query_offsets: Tensor
    """[max_rows + 1] int64."""
    numbers: Tensor
    """[tokens of sparse steps at once] int64: 0, 1, 2, ..."""


class _Absorbed(NamedTuple):
    """Rows whose queries attend to entries directly."""

    rows: PlannedExtend
    is_served: Tensor
    """[num_tokens] bool: True for tokens of absorbed rows."""
    places: Tensor | None
    """[num_tokens] int64: the index of each token, if the device must find out which of them belong to rows."""

    def prepare(self) -> None:
        self.rows.prepare()
        if self.places is not None:
            torch.lt(self.places, self.rows.query_lens.sum(), out=self.is_served)


@dataclass(frozen=True, eq=False)
class _TritonLatentPlan(AttentionPlan[LatentInputs]):
    spec: LatentSpec
    layers: Sequence[LatentLayer]
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`, which reads no pool."""
    pages: Tensor
    page_size: int
    lane: _Lane
    decode: PlannedDecode | None
    absorbed: _Absorbed | None
    expanded: VarlenPhases | None
    chosen: PlannedChoice | None
    """All tokens of a sparse step, which has nothing else."""
    kept: EntryPlan
    """Keeps the new entries of a sparse step, and finds chosen ones."""
    needs_lse: bool

    def prepare(self) -> None:
        """Distributes the work, on the device."""
        self.kept.prepare()
        if self.chosen is not None:
            self.chosen.prepare()
            torch.sum(self.chosen.query_lens, 0, keepdim=True, out=self.lane.num_real)
        if self.decode is not None:
            rows, config = self.decode.rows, self.decode.config
            divide(rows, self.decode.scratch, config, config.num_subgroups(self.spec.num_q_heads), None)
            torch.sum(rows.query_lens, 0, keepdim=True, out=self.lane.num_real)
        if self.absorbed is not None:
            self.absorbed.prepare()

    def run(self, layer: int, inputs: LatentInputs, out: Tensor) -> Lse | None:
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device) if self.needs_lse else None
        if self.decode is not None:
            self._decode(self.decode, self.layers[layer], inputs, out, lse)
            return lse
        if self.chosen is not None:
            self._attend_chosen(self.chosen, layer, inputs, out, lse)
            return lse
        if self.write_slots is not None:
            cached = self.layers[layer]
            write_latents(inputs.latent, inputs.k_rope, cached.entries, self.write_slots, cached.entry_scale)
        if self.expanded is not None:
            self.expanded.run(layer, inputs, out, lse)
        if self.absorbed is not None:
            self._absorb(self.absorbed, self.layers[layer], inputs, out, lse)
        return lse

    def _decode(
        self, decode: PlannedDecode, layer: LatentLayer, inputs: LatentInputs, out: Tensor, lse: Tensor | None
    ) -> None:
        # Rows of one token each come first; the rest is padding, whose output is left as it is.
        tokens = min(decode.rows.num_rows, out.shape[0])
        num_real, overlaps = self.lane.num_real, decode.config.overlaps
        q_latent = self.lane.queries[:tokens, :, : self.spec.latent_dim]
        key_up = inputs.key_up.transpose(1, 2)
        project_real(inputs.q_nope[:tokens], key_up, num_real, q_latent, overlaps=overlaps)
        decode_latent(
            q_latent,
            inputs.q_rope,
            (inputs.latent, inputs.k_rope),
            layer,
            decode.rows,
            decode.scratch,
            decode.config,
            self.lane.found[:tokens],
            lse,
        )
        project_real(
            self.lane.found[:tokens], inputs.value_up, num_real, out[:tokens], overlaps=overlaps, early=overlaps
        )

    def _attend_chosen(
        self, chosen: PlannedChoice, layer: int, inputs: LatentInputs, out: Tensor, lse: Tensor | None
    ) -> None:
        tokens, num_real, overlaps = out.shape[0], self.lane.num_real, chosen.config.overlaps
        new = self._entries_of_step(inputs)
        q_latent, found = self.lane.queries[:tokens, :, : self.spec.latent_dim], self.lane.found[:tokens]
        project_real(inputs.q_nope, inputs.key_up.transpose(1, 2), num_real, q_latent, overlaps=overlaps)
        chosen.run(layer, self.layers[layer], inputs, new, q_latent, found, lse)
        project_real(found, inputs.value_up, num_real, out, overlaps=overlaps, early=overlaps)

    def _entries_of_step(self, inputs: LatentInputs) -> Tensor:
        """[num_tokens, latent + rope]: the new entries."""
        new = self.lane.entries[: inputs.latent.shape[0]]
        return torch.cat((inputs.latent, inputs.k_rope), dim=-1, out=new)

    def _absorb(
        self, absorbed: _Absorbed, layer: LatentLayer, inputs: LatentInputs, out: Tensor, lse: Tensor | None
    ) -> None:
        rows, is_served = absorbed.rows, absorbed.is_served
        tokens, latent_dim = out.shape[0], self.spec.latent_dim
        queries, found = self.lane.queries[:tokens], self.lane.found[:tokens]
        absorb_queries(inputs.q_nope, inputs.q_rope, inputs.key_up, queries)
        rule = ScoreRule(layer.scale)
        if self.write_slots is None:
            new = self._entries_of_step(inputs)
            keys, values = new.unsqueeze(1), new[:, None, :latent_dim]
            extend_contiguous(
                queries, keys, values, rows.tiles, found, rule=rule, masks=rows.masks, config=rows.config, lse=lse
            )
        else:
            extend_paged(
                queries,
                layer.entries.unsqueeze(1),
                layer.entries[:, None, :latent_dim],
                self.pages,
                self.page_size,
                rows.tiles,
                found,
                rule=rule,
                masks=rows.masks,
                config=rows.config,
                lse=lse,
                k_scale=layer.entry_scale,
                v_scale=layer.entry_scale,
            )
        projected = self.lane.projected[:tokens]
        project_values(found, inputs.value_up, projected)
        torch.where(is_served[:, None, None], projected, out, out=out)


class TritonLatentBackend(AttentionBackend[LatentSpec, LatentInputs]):
    """Runs on NVIDIA GPUs."""

    capabilities: ClassVar[tuple[Capability, ...]] = LATENT_ROWS

    def __init__(self, context: BackendContext[LatentSpec]) -> None:
        self._spec = spec = context.spec
        self._pool = pool = context.cache.pools["latent"]
        self._dtype = context.dtype
        scales = layer_scales(pool, "entry")
        self._layers = tuple(
            LatentLayer(entries, scale, spec.scale) for entries, scale in zip(pool.plane("entry"), scales, strict=True)
        )
        self._chip = chip = Chip.of(context.device)
        self._config = choose_latent_decode(
            spec.latent_dim,
            spec.rope_dim,
            spec.num_q_heads,
            context.dtype,
            multiprocessors=chip.multiprocessors,
            shared_bytes=chip.shared_bytes,
            overlaps=chip.overlaps,
        )
        self._coordinator, limits = context.coordinator, context.limits
        at_once = 0 if spec.top_k is None else max(1, min(limits.max_step_tokens, SLOT_BYTES // (8 * spec.top_k)))

        def lane_leases(lane: Lane) -> _Lane:
            def lease(name: str, shape: tuple[int, ...], dtype: torch.dtype = context.dtype) -> Tensor:
                return context.workspace.lease(context.group, f"triton {name}", lane, shape, dtype)

            per_token = (limits.max_step_tokens, spec.num_q_heads)
            return _Lane(
                lease_decode(lease, self._config, limits.max_rows, spec.latent_dim),
                lease("queries", (*per_token, spec.head_dim)),
                lease("found", (*per_token, spec.latent_dim)),
                lease("entries", (limits.max_step_tokens, spec.head_dim)),
                lease("projected", (*per_token, spec.value_dim)),
                lease("real tokens", (1,), torch.int64),
                lease("query offsets", (limits.max_rows + 1,), torch.int64),
                torch.arange(at_once, out=lease("token numbers", (at_once,), torch.int64)),
            )

        self._lanes = {lane: lane_leases(lane) for lane in limits.lanes}
        kernel = ExtendKernel(spec, context.dtype, chip.shared_bytes)
        self._varlen = LatentVarlen(
            context, dict.fromkeys(limits.lanes, kernel), entry_scales=pool.scales("entry"), merge=merge_states
        )

    def plan(self, step: StepView, buffers: PlanBuffers) -> _TritonLatentPlan:
        batch, pool, lane = step.batch, self._pool, self._lanes[step.lane]
        decode = absorbed = expanded = chosen = None
        kept = self._coordinator.plan(step, buffers)
        if step.is_sparse and batch.num_rows:
            chosen = self._plan_chosen(step, kept, lane, buffers)
        elif not step.is_transient and batch.num_rows and batch.num_decoding() == batch.num_rows:
            decode = PlannedDecode(decode_rows(batch, batch.num_rows, pool), lane.decode, self._config)
        elif batch.num_rows:
            absorbed, expanded = self._plan_phases(step, lane, buffers)
        return _TritonLatentPlan(
            spec=self._spec,
            layers=self._layers,
            write_slots=step.write_slots(pool),
            pages=pool.table.pages,
            page_size=pool.page_size,
            lane=lane,
            decode=decode,
            absorbed=absorbed,
            expanded=expanded,
            chosen=chosen,
            kept=kept,
            needs_lse=step.needs_lse,
        )

    def _plan_chosen(self, step: StepView, kept: EntryPlan, lane: _Lane, buffers: PlanBuffers) -> PlannedChoice:
        spec, config = self._spec, self._config
        if spec.top_k is None:
            raise PlanError(f"expected a spec with a top_k in a sparse step, got {spec.label}; plan it as a dense one")
        subgroups = config.num_subgroups(spec.num_q_heads)
        return plan_choice(step, kept, spec.top_k, config, subgroups, lane.decode, lane.numbers, buffers)

    def _plan_phases(
        self, step: StepView, lane: _Lane, buffers: PlanBuffers
    ) -> tuple[_Absorbed | None, VarlenPhases | None]:
        batch = step.batch
        if batch.query_lens.host is None or batch.context_lens.host is None:
            # Other ways need the lengths of all rows before they run.
            return self._absorb_all(step, lane, buffers), None
        phases = plan_phases(row_spans(batch, None), self._spec, self._varlen.room, cheapest_way)
        spans, others = split_absorbed(phases)
        absorbed = self._plan_absorbed([span.row for span in spans], step, lane, buffers) if spans else None
        return absorbed, self._varlen.plan(others, step, buffers) if others else None

    def _plan_absorbed(self, rows: Sequence[int], step: StepView, lane: _Lane, buffers: PlanBuffers) -> _Absorbed:
        batch = step.batch
        lens = batch.query_lens.exact()
        chosen = set(rows)
        served = buffers.take("served", (batch.num_rows,), torch.int8)
        served.copy_(
            torch.tensor([row in chosen for row in range(batch.num_rows)], dtype=torch.int8), non_blocking=True
        )
        is_served = buffers.take("is served", (batch.num_tokens,), torch.bool)
        flags = [row in chosen for row, count in enumerate(lens) for _ in range(count)]
        flags += [False] * (batch.num_tokens - len(flags))
        is_served.copy_(torch.tensor(flags, dtype=torch.bool), non_blocking=True)
        return _Absorbed(self._extended(step, max(lens), served, lane, buffers), is_served, None)

    def _absorb_all(self, step: StepView, lane: _Lane, buffers: PlanBuffers) -> _Absorbed:
        """All rows, whatever their lengths are."""
        batch = step.batch
        is_served = buffers.take("is served", (batch.num_tokens,), torch.bool)
        places = buffers.take("places", (batch.num_tokens,), torch.int64)
        torch.arange(batch.num_tokens, out=places)
        rows = self._extended(step, max(batch.query_lens.bound), None, lane, buffers)
        return _Absorbed(rows, is_served, places)

    def _extended(
        self, step: StepView, longest_query: int, served: Tensor | None, lane: _Lane, buffers: PlanBuffers
    ) -> PlannedExtend:
        batch, spec = step.batch, self._spec
        config = choose_config(
            self._dtype,
            spec.head_dim,
            spec.latent_dim,
            spec.num_q_heads,
            longest_query,
            shared_bytes=self._chip.shared_bytes,
        )
        tile_tokens = config.tile_tokens(spec.num_q_heads)
        count = num_tiles(batch.num_rows, batch.num_tokens, tile_tokens)
        tiles = Tiles(buffers.take("tiles", (count, FIELDS), torch.int32), tile_tokens)
        return PlannedExtend.of(step, config, tiles, lane.query_offsets, served, buffers)
