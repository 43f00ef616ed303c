"""A small correct indexer made of replaceable parts, row by row, in fp32: a fault is one of its parts replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from conformance.parts import get_entries, put_entries
from conformance.parts_backend import DTYPES, EVERYTHING
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability, GraphLevel, HostLengths
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    CachePolicy,
    IndexInputs,
    Lse,
    StepView,
)
from sightline.attention.kinds import INDEX_FEATURES, Feature, SpecKind
from sightline.attention.oracle.attention import visible_keys
from sightline.attention.oracle.index import stored_keys
from sightline.attention.spec import IndexSpec
from sightline.cache.pools import Pool
from sightline.cache.spec import SCALED_DTYPES
from sightline.cache.table import PageTable

INDEX = replace(
    EVERYTHING,
    spec_kinds=frozenset({SpecKind.INDEX}),
    dtypes=DTYPES,
    features=INDEX_FEATURES - {Feature.BATCH_INVARIANT},
    host_lengths=HostLengths.EXACT,
    graph=GraphLevel.NONE,
)
Kept: TypeAlias = dict[Any, Any]
"""What a backend keeps from step to step. The correct one keeps nothing."""


@dataclass(frozen=True, eq=False)
class IndexRow:
    """One row of a step."""

    first_token: int
    query_len: int
    context_len: int
    table_row: int
    visible: Tensor
    """[query_len, seq_len] bool."""

    @property
    def seq_len(self) -> int:
        return self.context_len + self.query_len

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.first_token + self.query_len)


def rank(scores: Tensor) -> Tensor:
    """The places from the highest score to the lowest, of equal ones the lower place first."""
    return scores.sort(dim=1, descending=True, stable=True).indices


def in_order(places: Tensor) -> Tensor:
    return places.sort(dim=1).values


def walk(table: PageTable, row: IndexRow, page_size: int, kept: Kept) -> Tensor:
    """The slots [seq_len] of a row's keys."""
    del kept
    entries = torch.arange(row.seq_len, device=row.visible.device)
    return table.slots(torch.full_like(entries, row.table_row), entries, page_size)


@dataclass(frozen=True)
class IndexParts:
    """What an indexer is made of. The defaults are correct."""

    sees: Callable[[IndexRow], Tensor] = lambda row: row.visible
    cut_off: Callable[[Tensor], Tensor] = torch.relu
    """Of the products of queries and keys."""
    weights: Callable[[Tensor], Tensor] = lambda weights: weights
    count: Callable[[int], int] = lambda top_k: top_k
    rank: Callable[[Tensor], Tensor] = rank
    order: Callable[[Tensor], Tensor] = in_order
    """Of chosen places [1, count]."""
    slots: Callable[[PageTable, IndexRow, int, Kept], Tensor] = walk
    read_layer: Callable[[int], int] = lambda layer: layer
    code: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]] = stored_keys
    scale_slots: Callable[[Tensor], Tensor] = lambda slots: slots
    """Where the scales of the keys in these slots are."""
    row_of: Callable[[int], int] = lambda row: row
    """Whose choice a row takes."""
    of_layer: Callable[[int, Tensor, Kept], Tensor] = lambda layer, choice, kept: choice
    filling: int = -1
    """What stands behind the last chosen place."""
    padding: Callable[[Tensor], None] = lambda out: None
    """What is done to the choice of padding tokens."""
    chooses: Callable[[StepView, int], bool] = lambda step, top_k: step.is_sparse


CORRECT_INDEX = IndexParts()


@dataclass(frozen=True, eq=False)
class _IndexPlan(AttentionPlan[IndexInputs]):
    parts: IndexParts
    spec: IndexSpec
    pool: Pool
    write_slots: Tensor | None
    rows: tuple[IndexRow, ...]
    chooses: bool
    kept: Kept
    own: Kept
    """What is kept from layer to layer of one plan."""

    def prepare(self) -> None:
        """Layers share nothing."""

    def run(self, layer: int, inputs: IndexInputs, out: Tensor) -> Lse | None:
        if self.write_slots is not None:
            self._write(layer, inputs.key)
        if not self.chooses:
            return None
        read = self.parts.read_layer(layer)
        choices = [self._choice(row, read, inputs) for row in self.rows]
        for number, row in enumerate(self.rows):
            choice = choices[self.parts.row_of(number)]
            found = choice if choice.shape[0] == row.query_len else choice[:1].expand(row.query_len, -1)
            out[row.tokens] = self.parts.of_layer(layer, found, self.own.setdefault(number, {}))
        end = max((row.tokens.stop for row in self.rows), default=0)
        self.parts.padding(out[end:])
        return None

    def _write(self, layer: int, keys: Tensor) -> None:
        assert self.write_slots is not None
        plane = self.pool.plane("key")[layer]
        if plane.dtype not in SCALED_DTYPES:
            put_entries(plane, self.write_slots, keys.to(plane.dtype))
            return
        codes, scales = self.parts.code(keys, plane.dtype)
        put_entries(plane, self.write_slots, codes)
        put_entries(self.pool.plane("scale")[layer], self.write_slots, scales)

    def _keys(self, row: IndexRow, layer: int, inputs: IndexInputs) -> Tensor:
        if self.write_slots is None:
            return inputs.key[row.tokens].float()
        slots = self.parts.slots(self.pool.table, row, self.pool.page_size, self.kept)
        plane = self.pool.plane("key")[layer]
        keys = get_entries(plane, slots).float()
        if plane.dtype not in SCALED_DTYPES:
            return keys
        return keys * get_entries(self.pool.plane("scale")[layer], self.parts.scale_slots(slots))

    def _choice(self, row: IndexRow, layer: int, inputs: IndexInputs) -> Tensor:
        """[query_len, top_k] int32."""
        top_k, sees = self.spec.top_k, self.parts.sees(row)
        products = torch.einsum("qhd,kd->qhk", inputs.q[row.tokens].float(), self._keys(row, layer, inputs))
        weights = self.parts.weights(inputs.weights[row.tokens].float())
        scores = torch.einsum("qh,qhk->qk", weights, self.parts.cut_off(products))
        ranked = self.parts.rank(scores.masked_fill(~sees, -torch.inf))
        choice = torch.full((row.query_len, top_k), self.parts.filling, dtype=torch.int32, device=sees.device)
        for query in range(row.query_len):
            count = min(self.parts.count(top_k), int(sees[query].sum()))
            best = self.parts.order(ranked[query : query + 1, :count])[0, :top_k]
            choice[query, : best.shape[0]] = best.to(torch.int32)
        return choice


class IndexPartsBackend(AttentionBackend[IndexSpec, IndexInputs]):
    """Made by `make_index_backend`, which gives it its parts."""

    parts: IndexParts

    def __init__(self, context: BackendContext[IndexSpec]) -> None:
        self._spec = context.spec
        self._pool = context.cache.pools["index"]
        self._device = context.device
        self._kept: Kept = {}

    def plan(self, step: StepView, buffers: PlanBuffers) -> _IndexPlan:
        del buffers
        batch = step.batch
        offsets = batch.query_offsets_host()
        rows = [
            IndexRow(
                offsets[row],
                query_len,
                context_len,
                batch.rows[row],
                visible_keys(self._spec, mask, context_len, batch.positions[offsets[row] : offsets[row + 1]]).to(
                    self._device
                ),
            )
            for row, (query_len, context_len, mask) in enumerate(
                zip(batch.query_lens.exact(), batch.context_lens.exact(), batch.masks, strict=True)
            )
            if query_len
        ]
        transient = step.policy is CachePolicy.TRANSIENT
        return _IndexPlan(
            parts=self.parts,
            spec=self._spec,
            pool=self._pool,
            write_slots=None if transient else batch.pools[self._pool.key].write_slots,
            rows=tuple(rows),
            chooses=self.parts.chooses(step, self._spec.top_k),
            kept=self._kept,
            own={},
        )


def make_index_backend(parts: IndexParts = CORRECT_INDEX, *, declares: Capability = INDEX) -> type[IndexPartsBackend]:
    """A backend of these parts that declares this row."""
    return type("MadeOfIndexParts", (IndexPartsBackend,), {"parts": parts, "capabilities": (declares,)})
