"""The oracle of latent attention as a backend: head by head, entry by entry, in fp32. Slow on purpose.

Always expands every head's keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

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
from sightline.attention.kinds import RECURRENT_ONLY, SOFTMAX_ONLY, Feature, SpecKind
from sightline.attention.oracle.attention import attend_latent_row
from sightline.attention.oracle.index import chosen_mask
from sightline.attention.oracle.rows import ReferenceStep, reference_capability
from sightline.attention.spec import LatentSpec
from sightline.cache.pools import Pool


@dataclass(frozen=True, eq=False)
class _ReferencePlan(AttentionPlan[LatentInputs]):
    spec: LatentSpec
    pool: Pool
    step: ReferenceStep
    is_sparse: bool
    kept: EntryPlan
    """Only prepared, so that hot copies of what the step writes are forgotten. The oracle reads and writes the pool
    itself, which always has every entry."""

    def prepare(self) -> None:
        self.kept.prepare()

    def run(self, layer: int, inputs: LatentInputs, out: Tensor) -> Lse | None:
        entries, new = self.pool.plane("entry")[layer], torch.cat([inputs.latent, inputs.k_rope], dim=-1)
        scale = self.pool.scales("entry")[layer]
        self.step.write(entries, scale, new)
        lse = new.new_full((new.shape[0], self.spec.num_q_heads), -torch.inf, dtype=torch.float32)
        chosen = inputs.chosen if self.is_sparse else None
        for row in self.step.rows:
            row_out, row_lse = attend_latent_row(
                self.spec,
                inputs.q_nope[row.tokens],
                inputs.q_rope[row.tokens],
                row.entries(entries, scale, new),
                inputs.key_up,
                inputs.value_up,
                row.visible if chosen is None else row.visible & chosen_mask(chosen[row.tokens], row.visible.shape[1]),
            )
            out[row.tokens] = row_out.to(out.dtype)
            lse[row.tokens] = row_lse
        return lse if self.step.needs_lse else None


class ReferenceLatentBackend(AttentionBackend[LatentSpec, LatentInputs]):
    """Serves every latent spec, slowly."""

    capabilities: ClassVar[tuple[Capability, ...]] = (
        reference_capability(SpecKind.LATENT, frozenset(Feature) - SOFTMAX_ONLY - RECURRENT_ONLY, hot_entries=True),
    )

    def __init__(self, context: BackendContext[LatentSpec]) -> None:
        self._spec = context.spec
        self._pool = context.cache.pools["latent"]
        self._coordinator = context.coordinator

    def plan(self, step: StepView, buffers: PlanBuffers) -> _ReferencePlan:
        found = ReferenceStep.of(step, self._spec, self._pool)
        return _ReferencePlan(self._spec, self._pool, found, step.is_sparse, self._coordinator.plan(step, buffers))
