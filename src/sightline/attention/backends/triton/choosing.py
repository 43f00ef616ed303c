"""Choosing of keys with Sightline's own Triton kernels: scores and choices of a step's queries, part by part.

The queries of a step are scored in parts whose scores fit a lease, so that a prompt of any length needs bounded memory.
Lengths stay on the device: a part has room for the longest sequence, and programs without keys return at once. Does not
know how keys are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import BackendContext, StepView
from sightline.attention.spec import IndexingSpec
from sightline.attention.workspace import Lane
from sightline.kernels.triton.chip import Chip
from sightline.kernels.triton.choose import ChoiceConfig, ChoiceRoom, choose_places
from sightline.kernels.triton.extend_tiles import FIELDS, Tiles, num_tiles, prepare_tiles
from sightline.kernels.triton.index_scores import (
    MOST_QUERIES,
    IndexKeys,
    ScoreConfig,
    choose_score_config,
    list_queries,
    score_keys,
)

SpecT = TypeVar("SpecT", bound=IndexingSpec)
_MOST_AT_ONCE = 1 << 15
"""Queries of a launch, one program each: a grid has at most 65,535 programs in its second dimension."""


class _Room(NamedTuple):
    """A lane's leases: for the scores of as many queries as are chosen for at once, and for their choice."""

    scores: Tensor
    """[queries, most keys] fp32."""
    choice: ChoiceRoom

    def part(self, queries: int) -> _Room:
        """The room of the first queries."""
        return _Room(self.scores[:queries], self.choice.part(queries))


@dataclass(frozen=True, eq=False)
class Choosing:
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
    ratio: int
    """Tokens per key."""
    most_keys: int
    """No row has more."""
    scoring: ScoreConfig
    choice: ChoiceConfig
    room: _Room
    multiprocessors: int
    overlaps: bool
    """True if launches may begin before the previous one ends."""

    def prepare(self) -> None:
        """Divides the queries into tiles, on the device."""
        prepare_tiles(
            self.query_lens, self.context_lens, self.table_rows, self.num_tokens, self.query_offsets, self.tiles
        )
        list_queries(self.tiles, self.tokens, self.counts, self.ratio)

    def run(self, keys: IndexKeys, q: Tensor, weights: Tensor, out: Tensor) -> None:
        """Writes what the queries choose among the keys to `out` [num_tokens, top_k] int32."""
        size, count = self.tiles.tile_tokens, self.tiles.records.shape[0]
        at_once = self.room.scores.shape[0] // size
        for start in range(0, count, at_once):
            part = slice(start, min(start + at_once, count))
            queries = slice(part.start * size, part.stop * size)
            room = self.room.part(queries.stop - queries.start)
            score_keys(
                q,
                weights,
                keys,
                self.tiles,
                part,
                self.most_keys,
                room.scores,
                self.scoring,
                multiprocessors=self.multiprocessors,
                overlaps=self.overlaps,
            )
            choose_places(
                room.scores,
                self.tokens[queries],
                self.counts[queries],
                room.choice,
                out,
                self.choice,
                overlaps=self.overlaps,
            )


class Chooser(Generic[SpecT]):
    """Plans the choices of one indexer, with the memory that they need."""

    def __init__(self, context: BackendContext[SpecT], room_bytes: int, at_once: int) -> None:
        """`room_bytes` is the memory for scores; `at_once` is how many of them one program chooses from."""
        self._spec = context.spec
        self._dtype = context.dtype
        self._at_once = at_once
        self._chip = Chip.of(context.device)
        limits = context.limits
        self._most_keys = most = max(1, limits.max_seq_len // context.spec.tokens_per_entry)
        self.choice = choice = self._choice_for(most)
        queries = max(num_tiles(limits.max_rows, limits.max_step_tokens, size) * size for size in (1, 2, MOST_QUERIES))
        queries = max(MOST_QUERIES, min(queries, room_bytes // (4 * most), _MOST_AT_ONCE))

        def lease_room(lane: Lane) -> _Room:
            def lease(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
                return context.workspace.lease(context.group, f"triton {name}", lane, shape, dtype)

            return _Room(lease("scores", (queries, most), torch.float32), ChoiceRoom.of(choice, queries, lease))

        self._rooms = {lane: lease_room(lane) for lane in limits.lanes}

    def plan(self, step: StepView, buffers: PlanBuffers) -> Choosing:
        """Plans a step in which something is chosen."""
        batch, spec = step.batch, self._spec
        longest = max(1, *batch.query_lens.bound)
        ratio = spec.tokens_per_entry
        most = min(max(1, longest // ratio), self._most_keys) if step.is_transient else self._most_keys
        scoring = choose_score_config(
            self._dtype,
            spec.num_q_heads,
            spec.head_dim,
            longest,
            shared_bytes=self._chip.shared_bytes,
        )
        count = num_tiles(batch.num_rows, batch.num_tokens, scoring.queries)
        return Choosing(
            query_lens=batch.query_lens.device,
            context_lens=None if step.is_transient else batch.context_lens.device,
            table_rows=None if step.is_transient else batch.table_rows,
            num_tokens=batch.num_tokens,
            query_offsets=buffers.take("query offsets", (batch.num_rows + 1,), torch.int64),
            tiles=Tiles(buffers.take("tiles", (count, FIELDS), torch.int32), scoring.queries),
            tokens=buffers.take("tokens", (count * scoring.queries,), torch.int32),
            counts=buffers.take("counts", (count * scoring.queries,), torch.int32),
            ratio=ratio,
            most_keys=most,
            scoring=scoring,
            choice=self._choice_for(most) if step.is_transient else self.choice,
            room=self._rooms[step.lane],
            multiprocessors=self._chip.multiprocessors,
            overlaps=self._chip.overlaps,
        )

    def _choice_for(self, most_keys: int) -> ChoiceConfig:
        return ChoiceConfig.of(self._spec.top_k, most_keys, self._at_once)
