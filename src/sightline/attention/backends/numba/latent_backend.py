"""Latent attention on a CPU with compiled kernels that read pages in place.

Queries are always projected into latent space and attend to the entries themselves: all heads share one key, whose
first part is also the value. Like `backend`, planning looks at numbers of rows and tokens only. In a sparse step the
slots of what a token chose are its page table, with pages of one token; torch finds them, so such a step is not
recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.numba.calls import (
    AttentionCalls,
    AttentionScratch,
    AttentionShape,
    Entries,
    LatentCalls,
    Pages,
    RowMasks,
    layer_entries,
    plan_masks,
)
from sightline.attention.backends.numba.rows import LATENT_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    EntryPlan,
    EntryTurn,
    LatentInputs,
    Lse,
    StepView,
)
from sightline.attention.spec import LatentSpec
from sightline.attention.workspace import Lane
from sightline.kernels.cpu.attend import FIELDS

CHOSEN_TOKENS = 256
"""Tokens of a sparse step whose slots are found at once."""


@dataclass(frozen=True, eq=False)
class _LatentLeases:
    """A lane's leases."""

    attention: AttentionScratch
    queries: Tensor
    """[max_step_tokens, heads, latent + rope] fp32: queries in latent space."""
    found: Tensor
    """[max_step_tokens, heads, latent] fp32: weighted latents."""
    entries: Tensor
    """[max_step_tokens, latent + rope]: the step's own entries."""
    chosen: Tensor
    """[tokens at once, FIELDS] int64: what tokens of a sparse step see, like `AttentionScratch.located`."""


@dataclass(frozen=True, eq=False)
class _NumbaLatentPlan(AttentionPlan[LatentInputs]):
    spec: LatentSpec
    attention: AttentionCalls
    latents: LatentCalls
    step: StepView
    entries: Sequence[Entries]
    slots: Tensor
    """[num_tokens] int64: where new entries are written, in the pool or among the step's own."""
    pages: Pages | None
    """None under `TRANSIENT`, which reads no pool."""
    masks: RowMasks | None
    leases: _LatentLeases
    kept: EntryPlan
    """Keeps the new entries of a sparse step, and finds chosen ones."""

    def prepare(self) -> None:
        self.kept.prepare()
        self.attention.locate(self.step, self.masks, None, self.leases.attention)

    def run(self, layer: int, inputs: LatentInputs, out: Tensor) -> Lse | None:
        num_tokens, latent_dim = out.shape[0], self.spec.latent_dim
        lse = torch.empty(out.shape[:2], dtype=torch.float32) if self.step.needs_lse else None
        queries, found = self.leases.queries[:num_tokens], self.leases.found[:num_tokens]
        if self.step.is_sparse:
            self._attend_chosen(layer, inputs, queries, found, lse)
            self.latents.project(found, inputs.value_up, self.leases.attention.located, out)
            return lse
        keys = self.entries[layer] if self.pages is not None else Entries(self.leases.entries.unsqueeze(1), 1.0)
        latents = Entries(keys.plane[..., :latent_dim], keys.scale)
        ropes = Entries(keys.plane[..., latent_dim:], keys.scale)
        self.attention.write(inputs.latent.unsqueeze(1), latents, self.slots)
        self.attention.write(inputs.k_rope.unsqueeze(1), ropes, self.slots)
        self.latents.absorb(inputs, queries)
        scratch = self.leases.attention
        self.attention.attend(queries, keys, latents, self.pages, scratch, found, scale=self.spec.scale, lse=lse)
        self.latents.project(found, inputs.value_up, scratch.located, out)
        return lse

    def _attend_chosen(
        self, layer: int, inputs: LatentInputs, queries: Tensor, found: Tensor, lse: Tensor | None
    ) -> None:
        chosen = inputs.chosen
        assert chosen is not None, "a sparse step has a choice"
        new = self.leases.entries[: queries.shape[0]]
        torch.cat((inputs.latent, inputs.k_rope), dim=-1, out=new)
        self.kept.write(layer, new)
        self.latents.absorb(inputs, queries)
        keys = Entries(new.unsqueeze(1), 1.0)
        if not self.kept.reads_step:
            keys = replace(self.entries[layer], plane=self.kept.plane(layer).unsqueeze(1))
        for turn in self.kept.turns:
            turn.fetch(layer, chosen)
            size, at_once = turn.tokens.indices.shape[0], self.leases.chosen.shape[0]
            for start in range(0, size, at_once):
                place = slice(start, min(start + at_once, size))
                self._attend_part(turn, place, chosen, keys, queries, found, lse)

    def _attend_part(
        self,
        turn: EntryTurn,
        place: slice,
        chosen: Tensor,
        keys: Entries,
        queries: Tensor,
        found: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attends for some tokens of a turn, each as a row of its own."""
        tokens = turn.tokens.part(place).indices
        scratch = replace(self.leases.attention, located=self.leases.chosen[: tokens.shape[0]])
        is_real = self.leases.attention.located.index_select(0, tokens)[:, 2] >= 0
        counts = (chosen.index_select(0, tokens) >= 0).sum(1)
        scratch.located.zero_()
        torch.arange(tokens.shape[0], out=scratch.located[:, 0])
        scratch.located[:, 2] = torch.where(is_real, counts, -1)
        latents = Entries(keys.plane[..., : self.spec.latent_dim], keys.scale)
        its_queries, its_found = queries.index_select(0, tokens), found.new_empty(tokens.shape[0], *found.shape[1:])
        its_lse = None if lse is None else lse.new_empty(tokens.shape[0], lse.shape[1])
        pages = Pages(turn.slots(chosen, place), 1)
        self.attention.attend(its_queries, keys, latents, pages, scratch, its_found, scale=self.spec.scale, lse=its_lse)
        found.index_copy_(0, tokens, its_found)
        if lse is not None and its_lse is not None:
            lse.index_copy_(0, tokens, its_lse)


class NumbaLatentBackend(AttentionBackend[LatentSpec, LatentInputs]):
    """Decodes on a CPU."""

    capabilities: ClassVar[tuple[Capability, ...]] = LATENT_ROWS

    def __init__(self, context: BackendContext[LatentSpec]) -> None:
        self._spec = spec = context.spec
        self._pool = pool = context.cache.pools["latent"]
        self._coordinator = context.coordinator
        self._entries = layer_entries(pool, "entry")
        self._pages = Pages(pool.table.pages, pool.page_size)
        shape = AttentionShape(1, spec.num_q_heads, spec.head_dim, spec.latent_dim)
        dtype, launcher, limits = context.dtype, context.launcher, context.limits
        cache = pool.plane("entry").dtype
        self._attention = AttentionCalls(launcher, shape, torch.float32, cache, dtype, torch.float32)
        self._latents = LatentCalls(launcher, dtype)

        def leases(lane: Lane) -> _LatentLeases:
            def lease(name: str, size: tuple[int, ...], kind: torch.dtype) -> Tensor:
                return context.workspace.lease(context.group, f"numba {name}", lane, size, kind)

            tokens, heads = limits.max_step_tokens, spec.num_q_heads
            return _LatentLeases(
                AttentionScratch.of(lease, shape, tokens, launcher.num_threads),
                lease("queries", (tokens, heads, spec.head_dim), torch.float32),
                lease("found", (tokens, heads, spec.latent_dim), torch.float32),
                lease("entries", (tokens, spec.head_dim), dtype),
                lease("chosen", (0 if spec.top_k is None else min(tokens, CHOSEN_TOKENS), FIELDS), torch.int64),
            )

        self._leases = {lane: leases(lane) for lane in limits.lanes}

    def plan(self, step: StepView, buffers: PlanBuffers) -> _NumbaLatentPlan:
        slots = step.write_slots(self._pool)
        pages = None if slots is None else self._pages
        if slots is None:
            slots = buffers.take("own slots", (step.batch.num_tokens,), torch.int64)
            torch.arange(step.batch.num_tokens, out=slots)
        return _NumbaLatentPlan(
            spec=self._spec,
            attention=self._attention,
            latents=self._latents,
            step=step,
            entries=self._entries,
            slots=slots,
            pages=pages,
            masks=plan_masks(step, buffers),
            leases=self._leases[step.lane],
            kept=self._coordinator.plan(step, buffers),
        )
