"""The oracle of latent attention as a backend: head by head, entry by entry, in fp32. Slow on purpose.

Finds slots by walking the page table itself, and knows one way only: every head's keys and values are made.
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
    LatentInputs,
    Lse,
    StepView,
)
from sightline.attention.reference import attend_latent_row, visible_keys
from sightline.attention.spec import Feature, LatentSpec, SpecKind
from sightline.cache.pools import Pool
from sightline.core.device import DeviceKind


@dataclass(frozen=True, eq=False)
class _Row:
    """One row of the step."""

    tokens: slice
    context_slots: tuple[int, ...]
    visible: Tensor
    """[query_len, seq_len] bool."""


@dataclass(frozen=True, eq=False)
class _ReferencePlan(AttentionPlan[LatentInputs]):
    spec: LatentSpec
    pool: Pool
    policy: CachePolicy
    write_slots: tuple[int, ...]
    rows: tuple[_Row, ...]
    needs_lse: bool

    def prepare(self) -> None:
        """Nothing is shared between layers."""

    def run(self, layer: int, inputs: LatentInputs, out: Tensor) -> Lse | None:
        entries = self.pool.plane("entry")[layer]
        new = torch.cat([inputs.latent, inputs.k_rope], dim=-1)
        if self.policy is CachePolicy.PAGED:
            for token, slot in enumerate(self.write_slots):
                entries[slot] = new[token]
        lse = inputs.latent.new_full((new.shape[0], self.spec.num_q_heads), -torch.inf, dtype=torch.float32)
        for row in self.rows:
            slots = [*row.context_slots, *self.write_slots[row.tokens]]
            row_out, row_lse = attend_latent_row(
                self.spec,
                inputs.q_nope[row.tokens],
                inputs.q_rope[row.tokens],
                entries[slots] if self.policy is CachePolicy.PAGED else new[row.tokens],
                inputs.key_up,
                inputs.value_up,
                row.visible,
            )
            out[row.tokens] = row_out.to(out.dtype)
            lse[row.tokens] = row_lse
        return lse if self.needs_lse else None


class ReferenceLatentBackend(AttentionBackend[LatentSpec, LatentInputs]):
    """Serves anything, slowly."""

    capabilities: ClassVar[tuple[Capability, ...]] = (
        Capability(
            spec_kinds=frozenset({SpecKind.LATENT}),
            devices=frozenset({DeviceKind.CPU, DeviceKind.CUDA}),
            compute_capabilities=ANY,
            dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
            cache_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
            head_dims=ANY,
            group_sizes=ANY,
            page_sizes=ANY,
            features=frozenset(Feature) - {Feature.WINDOW, Feature.SOFTCAP, Feature.SINKS},
            host_lengths=HostLengths.EXACT,
        ),
    )

    def __init__(self, context: BackendContext[LatentSpec]) -> None:
        self._spec = context.spec
        self._pool = context.cache.pools["latent"]

    def plan(self, step: StepView, buffers: PlanBuffers) -> _ReferencePlan:
        del buffers
        batch = step.batch
        offsets = batch.query_offsets_host()
        rows = tuple(
            _Row(
                tokens=slice(offsets[row], offsets[row + 1]),
                context_slots=self._context_slots(batch.rows[row], context_len),
                visible=visible_keys(self._spec, mask, context_len, batch.positions[offsets[row] : offsets[row + 1]]),
            )
            for row, (context_len, mask) in enumerate(zip(batch.context_lens.exact(), batch.masks, strict=True))
            if offsets[row] < offsets[row + 1]
        )
        paged = step.policy is CachePolicy.PAGED
        write_slots = tuple(batch.pools[self._pool.key].write_slots.tolist()) if paged else ()
        return _ReferencePlan(self._spec, self._pool, step.policy, write_slots, rows, Feature.LSE in step.needs)

    def _context_slots(self, table_row: int, context_len: int) -> tuple[int, ...]:
        pages = self._pool.table.pages[table_row].tolist()
        size = self._pool.page_size
        return tuple(pages[entry // size] * size + entry % size for entry in range(context_len))
