"""An indexer and a sparse layer for the simulated model, which must agree about every choice.

Both keep, for each token, its position and the hash of all tokens up to it, each group in its own pool. The hash is a
token's score: the indexer chooses by the hashes in its pool, and the sparse layer finds out what it would have chosen
by those in its own. The layer gives the hash of each new token, or NaN if the choices differ or an entry is not the one
of its place. A page that is stale, lost or another row's in one of the pools thus gives other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import ANY, Capability, HostLengths
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    EntryPlan,
    IndexInputs,
    LatentInputs,
    StepView,
)
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.oracle.attention import visible_keys
from sightline.attention.sparse.chosen import fetch_slots
from sightline.attention.spec import IndexSpec, LatentSpec
from sightline.cache.pools import Pool
from sightline.core.device import DeviceKind
from sightline.testing.simulator.numbers import DTYPE

_HASH, POSITION, ENTRY_SIZE = 0, 1, 2
"""The numbers of an entry, and how many they are."""


def sparse_specs(top_k: int) -> tuple[LatentSpec, IndexSpec]:
    """The specs of a layer that attends to so many tokens, and of its indexer."""
    return LatentSpec(1, 1, 1, 1, 1, 1.0, top_k), IndexSpec(1, ENTRY_SIZE, top_k)


def latent_inputs(hashes: Tensor, positions: Tensor, chosen: Tensor | None) -> LatentInputs:
    """The inputs of the sparse layer for [num_tokens] hashes and positions."""
    query = hashes.view(-1, 1, 1)
    weight = torch.ones(1, 1, 1, dtype=DTYPE)
    return LatentInputs(query, query, hashes.view(-1, 1), positions.view(-1, 1).to(DTYPE), weight, weight, chosen)


def index_inputs(hashes: Tensor, positions: Tensor) -> IndexInputs:
    """The inputs of its indexer."""
    key = torch.stack((hashes, positions.to(DTYPE)), dim=1)
    return IndexInputs(key.unsqueeze(1), key, torch.ones(len(hashes), 1, dtype=DTYPE))


class _Row(NamedTuple):
    """One row of a step."""

    tokens: slice
    slots: Tensor
    """[seq_len]."""
    positions: Tensor
    """[seq_len]: the positions of its entries."""
    visible: Tensor
    """[query_len, seq_len] bool."""

    def choice(self, entries: Tensor, top_k: int) -> Tensor:
        """The choice of its queries by the hashes of `entries` [num_slots, 2]. A spoilt token's hash counts as 0."""
        scores = entries[self.slots, _HASH].nan_to_num(0.0, 0.0, 0.0).expand_as(self.visible)
        ranked = scores.masked_fill(~self.visible, -torch.inf).sort(dim=1, descending=True, stable=True)
        count, nowhere = min(top_k, len(self.slots)), len(self.slots)
        best = ranked.indices.masked_fill(ranked.values.isneginf(), nowhere)[:, :count].sort(dim=1).values
        choice = torch.full((len(self.visible), top_k), -1, dtype=torch.int32)
        choice[:, :count] = torch.where(best == nowhere, -1, best)
        return choice


def _rows(step: StepView, spec: IndexSpec | LatentSpec, pool: Pool) -> Iterator[_Row]:
    batch = step.batch
    offsets = batch.query_offsets_host()
    for row, (context_len, mask) in enumerate(zip(batch.context_lens.exact(), batch.masks, strict=True)):
        tokens = slice(offsets[row], offsets[row + 1])
        new = batch.positions[tokens]
        positions = torch.cat((torch.arange(context_len), new))
        table_rows = torch.full_like(positions, batch.rows[row])
        slots = pool.table.slots(table_rows, torch.arange(len(positions)), pool.page_size)
        yield _Row(tokens, slots, positions, visible_keys(spec, mask, context_len, new))


@dataclass(frozen=True, eq=False)
class _ChoosingPlan(AttentionPlan[IndexInputs]):
    spec: IndexSpec
    keys: Tensor
    """[num_slots, 2]."""
    write_slots: Tensor
    rows: tuple[_Row, ...]
    is_sparse: bool

    def prepare(self) -> None:
        """Nothing is shared between layers."""

    def run(self, layer: int, inputs: IndexInputs, out: Tensor) -> None:
        del layer
        self.keys[self.write_slots] = inputs.key
        for row in self.rows if self.is_sparse else ():
            out[row.tokens] = row.choice(self.keys, self.spec.top_k)


@dataclass(frozen=True, eq=False)
class _ChosenPlan(AttentionPlan[LatentInputs]):
    spec: LatentSpec
    entries: Tensor
    """[num_slots, 2]: the pool, which has every entry."""
    write_slots: Tensor
    hot: EntryPlan | None
    """None if entries are on the device."""
    rows: tuple[_Row, ...]
    is_sparse: bool

    def prepare(self) -> None:
        if self.hot is not None:
            self.hot.prepare()

    def _look(self, layer: int, hot: EntryPlan, chosen: Tensor, out: Tensor) -> None:
        """Gives NaN for tokens of which a chosen entry is not where the coordinator says."""
        places, slots = torch.zeros(chosen.shape, dtype=torch.int64), torch.zeros(chosen.shape, dtype=torch.int64)
        for row in self.rows:
            places[row.tokens] = row.slots[chosen[row.tokens].clamp(min=0).long()]
        wanted = self.entries[places].nan_to_num()
        for turn in hot.turns:
            fetch_slots(turn, layer, chosen, slots)
            its = turn.tokens.indices
            found = hot.plane(layer)[slots[its]].nan_to_num()
            wrong = ((found != wanted[its]).any(2) & (chosen[its] >= 0)).any(1)
            out[its[wrong]] = torch.nan

    def run(self, layer: int, inputs: LatentInputs, out: Tensor) -> None:
        new = torch.cat((inputs.latent, inputs.k_rope), dim=1)
        out[:] = inputs.latent.unsqueeze(1)
        if self.hot is None:
            self.entries[self.write_slots] = new
        else:
            self.hot.write(layer, new)
            if self.is_sparse and inputs.chosen is not None:
                self._look(layer, self.hot, inputs.chosen, out)
        for row in self.rows:
            # Only what some query sees: a guess that was given up may have left anything behind it.
            seen = row.visible.any(0)
            right = torch.equal(self.entries[row.slots, POSITION][seen], row.positions.to(DTYPE)[seen])
            if self.is_sparse and inputs.chosen is not None:
                expected = row.choice(self.entries, self.spec.top_k or 0)
                right &= torch.equal(inputs.chosen[row.tokens], expected)
            if not right or self.is_sparse != (inputs.chosen is not None):
                out[row.tokens] = torch.nan


def _capability(kind: SpecKind) -> Capability:
    return Capability(
        spec_kinds=frozenset({kind}),
        devices=frozenset({DeviceKind.CPU}),
        compute_capabilities=ANY,
        dtypes=frozenset({DTYPE}),
        cache_dtypes=frozenset({DTYPE}),
        head_dims=frozenset({ENTRY_SIZE}),
        group_sizes=frozenset({1}),
        page_sizes=ANY,
        features=frozenset({Feature.TREE_MASK, Feature.SPARSE}),
        host_lengths=HostLengths.EXACT,
    )


class ChoosingBackend(AttentionBackend[IndexSpec, IndexInputs]):
    """Chooses the tokens with the highest hashes."""

    capabilities: ClassVar[tuple[Capability, ...]] = (_capability(SpecKind.INDEX),)

    def __init__(self, context: BackendContext[IndexSpec]) -> None:
        self._spec = context.spec
        self._pool = context.cache.pools["index"]

    def plan(self, step: StepView, buffers: PlanBuffers) -> _ChoosingPlan:
        del buffers
        rows = tuple(_rows(step, self._spec, self._pool))
        write_slots = step.batch.pools[self._pool.key].write_slots
        return _ChoosingPlan(self._spec, self._pool.plane("key")[0], write_slots, rows, step.is_sparse)


class ChosenBackend(AttentionBackend[LatentSpec, LatentInputs]):
    """Reads what was chosen, and checks the choice."""

    capabilities: ClassVar[tuple[Capability, ...]] = (replace(_capability(SpecKind.LATENT), hot_entries=True),)

    def __init__(self, context: BackendContext[LatentSpec]) -> None:
        self._spec = context.spec
        self._cache, self._coordinator = context.cache, context.coordinator
        self._pool = context.cache.pools["latent"]

    def plan(self, step: StepView, buffers: PlanBuffers) -> _ChosenPlan:
        rows = tuple(_rows(step, self._spec, self._pool))
        hot = self._coordinator.plan(step, buffers) if self._cache.is_on_host else None
        write_slots = step.batch.pools[self._pool.key].write_slots
        return _ChosenPlan(self._spec, self._pool.plane("entry")[0], write_slots, hot, rows, step.is_sparse)
