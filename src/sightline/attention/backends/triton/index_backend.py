"""Indexers with Sightline's own Triton kernels: one launch that writes keys, then scores and choices part by part.

The queries of a step are scored in parts whose scores fit a lease, so that a prompt of any length needs bounded memory.
Lengths stay on the device: a part has room for the longest sequence, and programs without keys return at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sightline.attention.backends.triton.rows import INDEX_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, IndexInputs, Lse, StepView
from sightline.attention.spec import IndexSpec
from sightline.attention.workspace import Lane
from sightline.cache.pools import Pool
from sightline.cache.spec import SCALED_DTYPES
from sightline.kernels.triton.chip import Chip
from sightline.kernels.triton.choose import Candidates, ChoiceConfig, choose_places
from sightline.kernels.triton.extend_tiles import FIELDS, Tiles, num_tiles, prepare_tiles
from sightline.kernels.triton.index_scores import (
    MOST_QUERIES,
    IndexKeys,
    ScoreConfig,
    choose_score_config,
    list_queries,
    score_keys,
    write_index_keys,
)

_MOST_AT_ONCE = 1 << 15
"""Queries of a launch, one program each: a grid has at most 65,535 programs in its second dimension."""


class _Room(NamedTuple):
    """A lane's leases: for the scores of as many queries as are chosen for at once, and for their candidates."""

    scores: Tensor
    """[queries, max_seq_len] fp32."""
    candidates: tuple[Candidates, ...]
    """Per level behind the first."""

    def part(self, queries: int) -> _Room:
        """The room of the first queries."""
        candidates = [Candidates(each.scores[:queries], each.places[:queries]) for each in self.candidates]
        return _Room(self.scores[:queries], tuple(candidates))


@dataclass(frozen=True, eq=False)
class _Choosing:
    """A step's queries and keys, and how scores and choices are computed."""

    query_lens: Tensor
    context_lens: Tensor | None
    """None under `TRANSIENT`, like the page-table rows."""
    table_rows: Tensor | None
    num_tokens: int
    query_offsets: Tensor
    """[num_rows + 1] int64."""
    tiles: Tiles
    tokens: Tensor
    """[num_tiles * tile_tokens] int32: the token of each query of the tiles; see `list_queries`."""
    counts: Tensor
    """[num_tiles * tile_tokens] int32."""
    most_keys: int
    """No row has more."""
    scoring: ScoreConfig
    choice: ChoiceConfig
    room: _Room

    def prepare(self) -> None:
        prepare_tiles(
            self.query_lens, self.context_lens, self.table_rows, self.num_tokens, self.query_offsets, self.tiles
        )
        list_queries(self.tiles, self.tokens, self.counts)

    def run(self, keys: IndexKeys, inputs: IndexInputs, out: Tensor, multiprocessors: int) -> None:
        size, count = self.tiles.tile_tokens, self.tiles.records.shape[0]
        at_once = self.room.scores.shape[0] // size
        for start in range(0, count, at_once):
            part = slice(start, min(start + at_once, count))
            queries = slice(part.start * size, part.stop * size)
            room = self.room.part(queries.stop - queries.start)
            score_keys(
                inputs.q,
                inputs.weights,
                keys,
                self.tiles,
                part,
                self.most_keys,
                room.scores,
                self.scoring,
                multiprocessors=multiprocessors,
            )
            choose_places(room.scores, self.tokens[queries], self.counts[queries], room.candidates, out, self.choice)


@dataclass(frozen=True, eq=False)
class _TritonIndexPlan(AttentionPlan[IndexInputs]):
    layers: tuple[IndexKeys, ...]
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`, which reads the step's own keys."""
    choosing: _Choosing | None
    """None if nothing is chosen."""
    multiprocessors: int

    def prepare(self) -> None:
        """Divides the queries into tiles, on the device."""
        if self.choosing is not None:
            self.choosing.prepare()

    def run(self, layer: int, inputs: IndexInputs, out: Tensor) -> Lse | None:
        keys = self.layers[layer]
        if self.write_slots is None:
            keys = IndexKeys(inputs.key, None, None, 1)
        else:
            write_index_keys(inputs.key, keys.codes, keys.scales, self.write_slots)
        if self.choosing is not None:
            self.choosing.run(keys, inputs, out, self.multiprocessors)
        return None


class TritonIndexBackend(AttentionBackend[IndexSpec, IndexInputs]):
    """Runs on NVIDIA GPUs."""

    capabilities: ClassVar[tuple[Capability, ...]] = INDEX_ROWS
    room_bytes: ClassVar[int] = 64 << 20
    """Memory for scores. Candidates take an eighth to a quarter of it in addition."""
    segment: ClassVar[int | None] = None
    """Scores that one program chooses from; None: as many as it has registers for."""

    def __init__(self, context: BackendContext[IndexSpec]) -> None:
        self._spec = context.spec
        self._pool = context.cache.pools["index"]
        self._layers = _layers(self._pool)
        self._dtype = context.dtype
        self._chip = Chip.of(context.device)
        self._most_keys = most = context.limits.max_seq_len
        self._choice = choice = self._choice_for(most)
        limits = context.limits
        queries = max(num_tiles(limits.max_rows, limits.max_step_tokens, size) * size for size in (1, 2, MOST_QUERIES))
        queries = max(MOST_QUERIES, min(queries, self.room_bytes // (4 * most), _MOST_AT_ONCE))

        def lease_room(lane: Lane) -> _Room:
            def lease(name: str, size: int, dtype: torch.dtype) -> Tensor:
                return context.workspace.lease(context.group, f"triton {name}", lane, (queries, size), dtype)

            candidates = tuple(
                Candidates(
                    lease(f"candidates {level}", size, torch.float32), lease(f"places {level}", size, torch.int32)
                )
                for level, size in enumerate(choice.sizes[1:])
            )
            return _Room(lease("scores", most, torch.float32), candidates)

        self._rooms = {lane: lease_room(lane) for lane in limits.lanes}

    def plan(self, step: StepView, buffers: PlanBuffers) -> _TritonIndexPlan:
        return _TritonIndexPlan(
            self._layers,
            step.write_slots(self._pool),
            self._plan_choosing(step, buffers) if step.is_sparse and step.batch.num_rows else None,
            self._chip.multiprocessors,
        )

    def _plan_choosing(self, step: StepView, buffers: PlanBuffers) -> _Choosing:
        batch, spec = step.batch, self._spec
        longest = max(1, *batch.query_lens.bound)
        most = min(longest, self._most_keys) if step.is_transient else self._most_keys
        scoring = choose_score_config(
            self._dtype,
            spec.num_q_heads,
            spec.head_dim,
            longest,
            shared_bytes=self._chip.shared_bytes,
        )
        count = num_tiles(batch.num_rows, batch.num_tokens, scoring.queries)
        room = self._rooms[step.lane]
        choice = self._choice_for(most) if step.is_transient else self._choice
        return _Choosing(
            query_lens=batch.query_lens.device,
            context_lens=None if step.is_transient else batch.context_lens.device,
            table_rows=None if step.is_transient else batch.table_rows,
            num_tokens=batch.num_tokens,
            query_offsets=buffers.take("query offsets", (batch.num_rows + 1,), torch.int64),
            tiles=Tiles(buffers.take("tiles", (count, FIELDS), torch.int32), scoring.queries),
            tokens=buffers.take("tokens", (count * scoring.queries,), torch.int32),
            counts=buffers.take("counts", (count * scoring.queries,), torch.int32),
            most_keys=most,
            scoring=scoring,
            choice=choice,
            room=room,
        )

    def _choice_for(self, most_keys: int) -> ChoiceConfig:
        if self.segment is None:
            return ChoiceConfig.of(self._spec.top_k, most_keys)
        return ChoiceConfig.of(self._spec.top_k, most_keys, self.segment)


def _layers(pool: Pool) -> tuple[IndexKeys, ...]:
    keys = IndexKeys(pool.plane("key")[0], None, pool.table.pages, pool.page_size)
    scales = pool.plane("scale") if pool.plane("key").dtype in SCALED_DTYPES else [None] * pool.spec.num_layers
    return tuple(
        replace(keys, codes=codes, scales=scale) for codes, scale in zip(pool.plane("key"), scales, strict=True)
    )
