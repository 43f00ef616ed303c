"""Latent attention composed of two kernels: one over paged entries for absorbed rows, one over ragged rows for others.

    rows of at most one new token     absorbed, one launch per kernel, which can be captured
    others                            the phases of `latent.phases`: absorbed (`latent.paged`), or with keys and values
                                      expanded from entries (`latent.varlen`)

Owns what adapters of kernel libraries have in common: the choice of ways, the order of writes and reads, the plan. A
backend gives the kernels, and everything else exists once it is built. Does not know which library the kernels are
from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import AttentionPlan, BackendContext, LatentInputs, Lse, StepView
from sightline.attention.latent.paged import AbsorbedTokens, EntryKernel, PagedEntries, ProjectReal
from sightline.attention.latent.phases import cheapest_way, plan_phases, split_absorbed
from sightline.attention.latent.varlen import LatentVarlen, VarlenKernel, VarlenPhases, never_absorbed
from sightline.attention.shared.tiles import row_spans
from sightline.attention.spec import LatentSpec
from sightline.attention.workspace import Lane

WriteLatents: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Signature of `kernels.triton.write.write_latents` for an unscaled cache: (latent, k_rope, entries, slots)."""


@dataclass(frozen=True, eq=False)
class ComposedLatentPlan(AttentionPlan[LatentInputs]):
    """A step of a group, as its phases."""

    entries: tuple[Tensor, ...]
    """Per layer: [num_slots, latent + rope]."""
    page_size: int
    write: WriteLatents
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`."""
    absorbed: AbsorbedTokens | None
    expanded: VarlenPhases | None
    needs_lse: bool

    def prepare(self) -> None:
        """Nothing to do: `plan` fills the buffers."""

    def run(self, layer: int, inputs: LatentInputs, out: Tensor) -> Lse | None:
        entries = self.entries[layer]
        if self.write_slots is not None:
            self.write(inputs.latent, inputs.k_rope, entries, self.write_slots)
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device) if self.needs_lse else None
        if self.absorbed is not None:
            self.absorbed.run(entries.view(-1, self.page_size, entries.shape[1]), inputs, out, lse)
        if self.expanded is not None:
            self.expanded.run(layer, inputs, out, lse)
        return lse


@dataclass(frozen=True)
class LatentKernels:
    """The kernels that a composition is made of, per lane: each lane has scratch memory of its own."""

    entries: Mapping[Lane, EntryKernel]
    ragged: Mapping[Lane, VarlenKernel]
    write: WriteLatents
    project: ProjectReal


class ComposedLatent:
    """Plans steps of one group, for an unscaled cache."""

    def __init__(self, context: BackendContext[LatentSpec], kernels: LatentKernels, *, room_bytes: int) -> None:
        """`room_bytes` is the memory for keys and values expanded at once: a longer prefix is read in chunks."""
        self._spec = context.spec
        self._pool = context.cache.pools["latent"]
        self._entries = self._pool.plane("entry").unbind(0)
        self._write = kernels.write
        self._paged = PagedEntries(context, kernels.entries, kernels.project)
        self._varlen = LatentVarlen(
            context, kernels.ragged, entry_scales=(1.0,) * len(self._entries), room_bytes=room_bytes
        )

    def plan(self, step: StepView, buffers: PlanBuffers) -> ComposedLatentPlan:
        batch = step.batch
        absorbed, expanded = None, None
        if batch.num_rows and not step.is_transient and max(batch.query_lens.bound) <= 1:
            absorbed = self._paged.plan_decode(step, buffers)
        elif batch.num_rows:
            choose = never_absorbed if step.is_transient else cheapest_way
            phases = plan_phases(row_spans(batch, None), self._spec, self._varlen.room, choose)
            spans, others = split_absorbed(phases)
            absorbed = self._paged.plan_rows(spans, step, buffers)
            expanded = self._varlen.plan(others, step, buffers)
        return ComposedLatentPlan(
            entries=self._entries,
            page_size=self._pool.page_size,
            write=self._write,
            write_slots=step.write_slots(self._pool),
            absorbed=absorbed,
            expanded=expanded,
            needs_lse=step.needs_lse,
        )
