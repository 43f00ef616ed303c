"""Latent attention with torch alone: the phases of `latent.phases`, each a few matrix products.

Absorbed rows are computed in tiles, as attention over one key head; a row whose pages are adjacent is read in place.
The other phases expand keys and values into leased memory, for as many entries as fit, and attend row by row; parts of
one row are merged by their log-sum-exp. A cache of 8-bit floats is always gathered, because it must be converted; so
are new tokens, so that a row sees the rounded values that the cache keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.torch.rows import LATENT_ROWS
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
from sightline.attention.latent.phases import (
    Choose,
    Phase,
    PhaseKind,
    RowPart,
    cheapest_way,
    plan_phases,
    split_absorbed,
)
from sightline.attention.latent.run import (
    AbsorbedTile,
    ChosenTokens,
    EntriesInPlace,
    EntrySource,
    Expansion,
    GatheredEntries,
    LatentScratch,
    LayerRun,
    QueryBlock,
    StepEntries,
)
from sightline.attention.shared.dense_tiles import Sources, TilePlanner
from sightline.attention.shared.entry_planes import EntryPlane, entry_planes, is_scaled
from sightline.attention.shared.merge import PartialResults
from sightline.attention.shared.tile_tokens import TileTokens
from sightline.attention.shared.tiles import RowSpan, row_spans
from sightline.attention.spec import LatentSpec
from sightline.attention.workspace import Lane
from sightline.core.batch import MaskKind

MIN_GATHERED_KEYS = 4096
"""Entries that a tile may gather even if sequences are shorter: enough rows to be worth a call."""
MIN_KEYS_IN_PLACE = 256
"""Rows with at least this many entries are worth their own call if that saves gathering. A row alone has one anyway."""
MAX_SCORES = 1 << 22
"""Maximum scores per call: 16 MiB in fp32. Larger calls are split by query."""


@dataclass(frozen=True, eq=False)
class _LatentPlan(AttentionPlan[LatentInputs]):
    spec: LatentSpec
    planes: tuple[Tensor, ...]
    """Per layer: [num_slots, latent + rope], as stored: what phases read that read a pool."""
    entries: tuple[EntryPlane, ...]
    """Accessors for `planes`, per layer."""
    kept: EntryPlan
    """Keeps the new entries, and finds chosen ones."""
    scratch: LatentScratch
    absorbed: tuple[AbsorbedTile, ...]
    expanded: tuple[Expansion, ...]
    merged: tuple[slice, ...]
    """Tokens of rows whose parts are merged."""
    needs_lse: bool
    chosen: ChosenTokens | None = None
    """All tokens, in a sparse step, which has no other phases."""

    def prepare(self) -> None:
        self.kept.prepare()

    def run(self, layer: int, inputs: LatentInputs, out: Tensor) -> Lse | None:
        num_tokens = inputs.latent.shape[0]
        step = self.scratch.step[:num_tokens]
        torch.cat((inputs.latent, inputs.k_rope), dim=-1, out=step)
        self.kept.write(layer, step)
        lse = None
        if self.needs_lse:
            lse = inputs.latent.new_full((num_tokens, self.spec.num_q_heads), -torch.inf, dtype=torch.float32)
        run = LayerRun(self.spec, layer, self.planes[layer], self.entries[layer], inputs, self.scratch, out, lse)
        if self.chosen is not None:
            self.chosen(run)
        self.scratch.merged.begin(self.merged)
        for tile in self.absorbed:
            tile(run)
        for expansion in self.expanded:
            expansion(run)
        self.scratch.merged.end(self.merged, out, lse)
        return lse


class TorchLatentBackend(AttentionBackend[LatentSpec, LatentInputs]):
    """The default backend on a CPU."""

    capabilities: ClassVar[tuple[Capability, ...]] = LATENT_ROWS
    choose: ClassVar[Choose] = staticmethod(cheapest_way)
    """Chooses how a row is computed."""
    room_bytes: ClassVar[int] = 128 << 20
    """Memory for keys and values expanded from entries."""

    def __init__(self, context: BackendContext[LatentSpec]) -> None:
        self._spec = spec = context.spec
        self._pool = context.cache.pools["latent"]
        self._coordinator = context.coordinator
        self._planes = self._pool.plane("entry").unbind(0)
        self._entries = entry_planes(self._pool, "entry")
        self._is_scaled = is_scaled(self._pool)
        self._dtype = context.dtype
        limits = context.limits
        max_keys = max(limits.max_seq_len, MIN_GATHERED_KEYS, spec.top_k or 0)
        key_bytes = spec.num_q_heads * (spec.nope_dim + spec.rope_dim + spec.value_dim) * context.dtype.itemsize
        self._room = max(1, min(limits.max_seq_len, self.room_bytes // key_bytes))

        def scratch(lane: Lane) -> LatentScratch:
            def lease(name: str, *shape: int, dtype: torch.dtype = context.dtype) -> Tensor:
                return context.workspace.lease(context.group, name, lane, shape, dtype)

            heads, tokens = spec.num_q_heads, limits.max_step_tokens
            return LatentScratch(
                step=lease("step", tokens, spec.head_dim),
                gathered=lease("gathered", max_keys, spec.head_dim),
                keys=lease("keys", self._room, heads, spec.nope_dim + spec.rope_dim),
                values=lease("values", self._room, heads, spec.value_dim),
                merged=PartialResults(
                    lease("merged", tokens, heads, spec.value_dim, dtype=torch.float32),
                    lease("merged lse", tokens, heads, dtype=torch.float32),
                ),
            )

        self._scratch = {lane: scratch(lane) for lane in limits.lanes}
        sources = Sources[EntrySource](EntriesInPlace, StepEntries, lambda slots, _: GatheredEntries(slots))
        self._tiles = TilePlanner(
            self._pool,
            spec,
            context.dtype,
            max_keys,
            MIN_KEYS_IN_PLACE,
            MAX_SCORES // spec.num_q_heads,
            sources,
        )

    def plan(self, step: StepView, buffers: PlanBuffers) -> _LatentPlan:
        kept = self._coordinator.plan(step, buffers)
        if step.is_sparse:
            return self._plan_chosen(step, kept)
        spans = row_spans(step.batch, None)
        absorbed, expanded = split_absorbed(plan_phases(spans, self._spec, self._room, type(self).choose))
        pieces = [part.span for phase in expanded for part in phase.parts]
        merged = {span for span in pieces if pieces.count(span) > 1}
        return _LatentPlan(
            spec=self._spec,
            planes=self._planes,
            entries=self._entries,
            kept=kept,
            scratch=self._scratch[step.lane],
            absorbed=tuple(
                AbsorbedTile(
                    tile.tokens, tile.source, tile.bias, plain=not step.needs_lse and tile.kind is not MaskKind.TREE
                )
                for tile in self._tiles.plan(absorbed, step, buffers)
            ),
            expanded=tuple(
                self._plan_expansion(f"phase{index}", phase, merged, step, buffers)
                for index, phase in enumerate(expanded)
            ),
            merged=tuple(_tokens(span) for span in spans if span in merged),
            needs_lse=step.needs_lse,
        )

    def _plan_chosen(self, step: StepView, kept: EntryPlan) -> _LatentPlan:
        return _LatentPlan(
            spec=self._spec,
            planes=self._planes,
            entries=self._entries,
            kept=kept,
            scratch=self._scratch[step.lane],
            absorbed=(),
            expanded=(),
            merged=(),
            needs_lse=step.needs_lse,
            chosen=ChosenTokens(kept, sum(step.batch.query_lens.exact())),
        )

    def _plan_expansion(
        self, name: str, phase: Phase, merged: set[RowSpan], step: StepView, buffers: PlanBuffers
    ) -> Expansion:
        blocks: list[QueryBlock] = []
        first = 0
        for index, part in enumerate(phase.parts):
            blocks += self._plan_blocks(f"{name}.part{index}", part, first, buffers, merges=part.span in merged)
            first += part.num_keys
        return Expansion(self._plan_source(name, phase, step, buffers), tuple(blocks))

    def _plan_source(self, name: str, phase: Phase, step: StepView, buffers: PlanBuffers) -> EntrySource:
        """Reads the phase's entries from the step if all of them are there, otherwise from the pool."""
        places = buffers.take(f"{name}.entries", (1, phase.num_keys), torch.int64)
        ragged = phase.kind is PhaseKind.RAGGED and not self._is_scaled
        from_step = step.is_transient or ragged
        start = 0
        for part in phase.parts:
            entries = torch.arange(part.first_key, part.stop_key, device=places.device)
            if from_step:
                found = entries + (part.span.first_token - part.span.context_len)
            else:
                rows = torch.full_like(entries, step.batch.rows[part.span.row])
                found = self._pool.table.slots(rows, entries, self._pool.page_size)
            places[0, start : start + part.num_keys] = found
            start += part.num_keys
        if not from_step:
            return GatheredEntries(places)
        return StepEntries(TileTokens(1, phase.num_keys, places.view(-1), _one_run(phase.parts)))

    def _plan_blocks(
        self, name: str, part: RowPart, first: int, buffers: PlanBuffers, *, merges: bool
    ) -> Iterator[QueryBlock]:
        """Splits the part's queries so that each call has few enough scores; `first` is the index of its first key."""
        span = part.span
        count = max(1, MAX_SCORES // (self._spec.num_q_heads * part.num_keys))
        for start in range(part.first_query, span.query_len, count):
            stop = min(start + count, span.query_len)
            last_key = part.stop_key
            if span.kind is MaskKind.CAUSAL:
                last_key = min(last_key, span.context_len + stop)
            num_keys = last_key - part.first_key
            bias = None
            # The block's first query sees the fewest keys.
            if span.kind is MaskKind.CAUSAL and span.context_len + start < last_key - 1:
                bias = buffers.take(f"{name}.bias{start}", (1, 1, stop - start, num_keys), self._dtype)
                reach = span.context_len + start - part.first_key
                seen = torch.ones(stop - start, num_keys, dtype=torch.bool, device=bias.device).tril(reach)
                bias.fill_(-torch.inf).masked_fill_(seen, 0.0)
            tokens = slice(span.first_token + start, span.first_token + stop)
            yield QueryBlock(tokens, slice(first, first + num_keys), bias, merges)


def _tokens(span: RowSpan) -> slice:
    return slice(span.first_token, span.first_token + span.query_len)


def _one_run(parts: Sequence[RowPart]) -> slice | None:
    """The step's tokens that hold the parts' keys if they are contiguous, otherwise None."""
    starts = [part.span.first_token - part.span.context_len + part.first_key for part in parts]
    stops = [start + part.num_keys for start, part in zip(starts, parts, strict=True)]
    return slice(starts[0], stops[-1]) if starts[1:] == stops[:-1] else None
