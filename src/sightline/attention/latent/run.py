"""Execution of latent attention's phases in torch: what a plan holds for each, and what it does per layer.

    step's entries ──write──▶ pool
    Absorbed   queries into latent space ─ attend to entries in place ─ project values
    Expanded   entries ─ every head's keys and values ─ attention ─ merged if a row has several parts

Composed by backends. The plan has decided everything: which tokens, which slots, what is visible.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.attention.contract import EntryPlan, LatentInputs
from sightline.attention.shared.entry_planes import EntryPlane
from sightline.attention.shared.merge import PartialResults, merge_states
from sightline.attention.shared.tile_tokens import TileTokens
from sightline.attention.spec import LatentSpec
from sightline.kernels.latent_attention import (
    absorb_queries,
    attend_entries,
    attend_entries_with_lse,
    expand_entries,
    project_values,
)
from sightline.kernels.softmax_attention import composed_attention


@dataclass(frozen=True, eq=False)
class LatentScratch:
    """A lane's leases."""

    step: Tensor
    """[max_step_tokens, latent + rope]: the step's own entries."""
    gathered: Tensor
    """[max_keys, latent + rope]."""
    keys: Tensor
    """[room, heads, nope + rope]."""
    values: Tensor
    """[room, heads, value]."""
    merged: PartialResults
    """Partial results of rows that are computed in several parts."""


class LayerRun(NamedTuple):
    """One layer of one step."""

    spec: LatentSpec
    layer: int
    plane: Tensor
    """[num_slots, latent + rope]: the layer's part of the pool, as stored."""
    entries: EntryPlane
    """Accessor for `plane`."""
    inputs: LatentInputs
    scratch: LatentScratch
    out: Tensor
    """[num_tokens, heads, value]."""
    lse: Tensor | None
    """[num_tokens, heads] fp32; None unless the step needs it."""


class EntrySource(ABC):
    """Where entries come from."""

    @abstractmethod
    def read(self, run: LayerRun) -> Tensor:
        """[num_rows, num_keys, latent + rope]."""


@dataclass(frozen=True, eq=False)
class StepEntries(EntrySource):
    """Entries of the step itself."""

    tokens: TileTokens

    def read(self, run: LayerRun) -> Tensor:
        return self.tokens.of(run.scratch.step[: run.out.shape[0]])


@dataclass(frozen=True, eq=False)
class EntriesInPlace(EntrySource):
    """Adjacent entries of one row, in an unscaled pool."""

    slots: slice

    def read(self, run: LayerRun) -> Tensor:
        return run.plane[self.slots].unsqueeze(0)


@dataclass(frozen=True, eq=False)
class GatheredEntries(EntrySource):
    """Entries copied into contiguous scratch memory."""

    slots: Tensor
    """[num_rows, num_keys] int64."""

    def read(self, run: LayerRun) -> Tensor:
        gathered = run.scratch.gathered[: self.slots.numel()]
        run.entries.gather(self.slots.view(-1), gathered)
        return gathered.view(*self.slots.shape, -1)


@dataclass(frozen=True, eq=False)
class AbsorbedTile:
    """Rows of equal query length whose queries attend to entries directly."""

    tokens: TileTokens
    source: EntrySource
    bias: Tensor | None
    """[num_rows, 1, query_len, num_keys]."""
    plain: bool
    """True if no LSE is needed and every query sees a key."""

    def __call__(self, run: LayerRun) -> None:
        spec, inputs = run.spec, run.inputs
        q_nope, q_rope = self.tokens.of(inputs.q_nope), self.tokens.of(inputs.q_rope)
        rows, query_len, heads, _ = q_nope.shape
        q = q_nope.new_empty(rows * query_len, heads, spec.head_dim)
        absorb_queries(q_nope.flatten(0, 1), q_rope.flatten(0, 1), inputs.key_up, q)
        q, entries = q.view(rows, query_len, heads, -1), self.source.read(run)
        if self.plain:
            found = attend_entries(q, entries, self.bias, scale=spec.scale, latent_dim=spec.latent_dim)
        else:
            found, lse = attend_entries_with_lse(q, entries, self.bias, scale=spec.scale, latent_dim=spec.latent_dim)
            if run.lse is not None:
                self.tokens.put(run.lse, lse)
        values = q.new_empty(rows * query_len, heads, spec.value_dim)
        project_values(found.flatten(0, 1), inputs.value_up, values)
        self.tokens.put(run.out, values)


@dataclass(frozen=True, eq=False)
class QueryBlock:
    """Contiguous queries of one row, and the keys of a phase that they may see."""

    tokens: slice
    keys: slice
    """Range within the phase's keys."""
    bias: Tensor | None
    """[1, 1, num_queries, num_keys]; None if all are visible."""
    merges: bool
    """True if the row also has keys in other phases."""

    def __call__(self, run: LayerRun) -> None:
        q = torch.cat((run.inputs.q_nope[self.tokens], run.inputs.q_rope[self.tokens]), dim=-1)
        keys, values = (each[self.keys].transpose(0, 1).unsqueeze(0) for each in (run.scratch.keys, run.scratch.values))
        [found], [lse] = composed_attention(
            q.unsqueeze(0), keys, values, self.bias, scale=run.spec.scale, softcap=None, sinks=None
        )
        if self.merges:
            merged = run.scratch.merged
            merge_states(merged.out[self.tokens], merged.lse[self.tokens], found, lse)
            return
        run.out[self.tokens] = found
        if run.lse is not None:
            run.lse[self.tokens] = lse


@dataclass(frozen=True, eq=False)
class Expansion:
    """A phase that expands keys and values from its entries."""

    source: EntrySource
    """All of the phase's entries as one row."""
    blocks: tuple[QueryBlock, ...]

    def __call__(self, run: LayerRun) -> None:
        [entries] = self.source.read(run)
        keys, values = (each[: entries.shape[0]] for each in (run.scratch.keys, run.scratch.values))
        expand_entries(entries, run.inputs.key_up, run.inputs.value_up, keys, values)
        for block in self.blocks:
            block(run)


@dataclass(frozen=True, eq=False)
class ChosenTokens:
    """Queries that attend to chosen entries, turn after turn, as many at a time as `gathered` has room for."""

    plan: EntryPlan
    num_tokens: int
    """Tokens of rows: those behind them are padding."""

    def __call__(self, run: LayerRun) -> None:
        chosen = run.inputs.chosen
        assert chosen is not None, "a sparse step has a choice"
        most = max(1, run.scratch.gathered.shape[0] // chosen.shape[1])
        for turn in self.plan.turns:
            turn.fetch(run.layer, chosen)
            tokens = turn.tokens
            count = tokens.indices.shape[0]
            if tokens.contiguous is not None:
                count = min(count, self.num_tokens - tokens.contiguous.start)
            for start in range(0, count, most):
                part = slice(start, min(start + most, count))
                self._attend(run, tokens.part(part), turn.slots(chosen, part))

    def _attend(self, run: LayerRun, tokens: TileTokens, slots: Tensor) -> None:
        """`slots` [num_tokens, top_k] are those of the tokens."""
        spec, inputs = run.spec, run.inputs
        assert inputs.chosen is not None
        entries = self._entries(run, slots)
        q_nope, q_rope, chosen = (
            tokens.of(each).flatten(0, 1) for each in (inputs.q_nope, inputs.q_rope, inputs.chosen)
        )
        q = q_nope.new_empty(entries.shape[0], spec.num_q_heads, spec.head_dim)
        absorb_queries(q_nope, q_rope, inputs.key_up, q)
        bias = q.new_zeros(entries.shape[0], 1, 1, chosen.shape[1], dtype=torch.float32)
        bias[:, 0, 0].masked_fill_(chosen < 0, -torch.inf)
        found, lse = attend_entries_with_lse(
            q.unsqueeze(1), entries, bias, scale=spec.scale, latent_dim=spec.latent_dim
        )
        if run.lse is not None:
            tokens.put(run.lse, lse)
        values = q.new_empty(entries.shape[0], spec.num_q_heads, spec.value_dim)
        project_values(found.squeeze(1), inputs.value_up, values)
        tokens.put(run.out, values)

    def _entries(self, run: LayerRun, slots: Tensor) -> Tensor:
        """[num_tokens, top_k, latent + rope]."""
        if self.plan.reads_step:
            return run.scratch.step[slots]
        gathered = run.scratch.gathered[: slots.numel()]
        self.plan.gather(run.layer, slots.view(-1), gathered)
        return gathered.view(*slots.shape, -1)
