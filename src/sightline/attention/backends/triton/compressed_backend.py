"""Compressed attention with Sightline's own Triton kernels: three launches a layer, whatever the rows are.

    keep     the states and the entries of the step, and where chosen entries are
    attend   all tokens to their windows and entries, in shares of equal size
    merge    what several programs computed of one token

Rows of one new token read their window from the state behind it, which the first launch writes; others read the state
behind their context, and the keys of the step. Nothing is read on the host but bounds.

With entries in host memory the first launch writes new entries to the device; the group's coordinator keeps them and
fetches what is chosen, turn by turn, and each turn has an `attend` and a `merge` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.triton.compressed_tokens import entry_places, new_entries, rule_of, step_tokens
from sightline.attention.backends.triton.rows import COMPRESSED_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.compressed.inputs import CompressedInputs
from sightline.attention.compressed.spec import CompressedSpec
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    EntryPlan,
    EntryTurn,
    Lse,
    StepView,
)
from sightline.attention.recurrent.planned_tokens import PlannedTokens
from sightline.attention.sparse.chosen import fetch_slots
from sightline.attention.workspace import Lane
from sightline.core.errors import PlanError
from sightline.kernels.triton.chip import Chip
from sightline.kernels.triton.compressed_attention import (
    CompressedLayer,
    SeenEntries,
    attend_compressed,
    choose_compressed,
    pieces_of,
)
from sightline.kernels.triton.compressed_steps import CompressionRule, NewChoice, NewKeys, keep_tokens
from sightline.kernels.triton.compressed_tokens import CompressedTokens, EntryPages, SeenKeys, count_keys
from sightline.kernels.triton.decode_shares import DecodeConfig, DecodeRows, DecodeScratch, divide

MOST_AT_ONCE = 2048
"""Tokens whose work is divided at once: every program looks at all of them."""


@dataclass(frozen=True, eq=False)
class _Planes:
    """The tensors that a layer keeps."""

    window: Tensor
    """[num_slots, window, head_dim]."""
    sums: Tensor | None
    """[num_slots, num_sums, 3, head_dim] fp32; None without compression."""
    entries: Tensor | None
    """[num_slots, head_dim]; None without compression."""


@dataclass(frozen=True, eq=False)
class _Lane:
    """A lane's leases."""

    parts: Tensor
    """[2 * num_programs, heads of a unit, values of a unit] fp32."""
    stats: Tensor
    """[2 * num_programs, 2, heads of a unit] fp32."""
    slots: Tensor
    """[max_step_tokens, top_k] int32: where chosen entries are."""
    entries: Tensor
    """[max_step_tokens, head_dim]: the entries of a step without a cache."""


@dataclass(frozen=True, eq=False)
class _Part:
    """Tokens that are computed at once."""

    place: slice
    rows: DecodeRows
    """Every token is one."""
    scratch: DecodeScratch


@dataclass(frozen=True, eq=False)
class _Turn:
    """Tokens whose entries are on the device at the same time."""

    entries: EntryTurn | None
    """None: all tokens, which find all entries in the pool."""
    masked: Tensor | None
    """[num_tokens] int64: 1 for the tokens of the turn if they do not follow each other, 0 for others."""
    parts: tuple[_Part, ...]

    def prepare(self, lens: Tensor, config: DecodeConfig, subgroups: int) -> None:
        """Divides the work. `lens` [num_tokens] int64 are 1 for tokens of rows, and 0 for padding."""
        if self.masked is not None and self.entries is not None:
            its = self.entries.tokens.indices
            self.masked.zero_().index_copy_(0, its, lens.index_select(0, its))
        for part in self.parts:
            divide(part.rows, part.scratch, config, subgroups, None, by_row=True)


@dataclass(frozen=True, eq=False)
class _PlannedEntries:
    """How a step writes and reads entries."""

    rule: CompressionRule
    write_slots: Tensor | None
    """[num_tokens] int64, of the pool or of the plane that `hot` has; None under `TRANSIENT`."""
    step: Tensor
    """[max_step_tokens, head_dim]: where entries are under `TRANSIENT`."""
    seen: SeenEntries
    hot: EntryPlan | None
    """None unless entries are in host memory."""

    def planes(self, layer: int, pool: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The planes that new entries are written to, and that queries read; `pool` is the layer's."""
        if self.write_slots is None:
            return self.step, self.step
        if self.hot is None:
            return pool, pool
        plane = self.hot.plane(layer)
        # The pool in host memory has every entry, for steps that are not sparse.
        return plane, plane if self.hot.turns else pool

    def choice(self, inputs: CompressedInputs) -> NewChoice | None:
        """What the first launch finds in the pool; None if nothing is chosen, or entries are in host memory."""
        if self.seen.slots is None or self.hot is not None:
            return None
        return NewChoice(_chosen(inputs), self.seen.places, self.seen.slots)


@dataclass(frozen=True, eq=False)
class _TritonCompressedPlan(AttentionPlan[CompressedInputs]):
    scale: float
    layers: tuple[_Planes, ...]
    planned: PlannedTokens
    tokens: CompressedTokens
    keys: SeenKeys
    entries: _PlannedEntries | None
    """None without compression."""
    lens: Tensor
    """[num_tokens] int64: see `count_keys`, like the next."""
    counts: Tensor
    turns: tuple[_Turn, ...]
    config: DecodeConfig
    subgroups: int
    """Units of a token and a block of keys."""

    def prepare(self) -> None:
        """Finds every token's row and divides the work, on the device."""
        self.planned.prepare()
        if self.entries is not None and self.entries.hot is not None:
            self.entries.hot.prepare()
        count_keys(self.tokens, self.keys, self.config.block, self.lens, self.counts)
        for turn in self.turns:
            turn.prepare(self.lens, self.config, self.subgroups)

    def run(self, layer: int, inputs: CompressedInputs, out: Tensor) -> Lse | None:
        source = self._keep(layer, inputs)
        given = CompressedLayer(inputs.key, self.layers[layer].window, source, inputs.sinks, self.scale)
        seen = None if self.entries is None else self.entries.seen
        for turn in self.turns:
            if turn.entries is not None and seen is not None and seen.slots is not None:
                fetch_slots(turn.entries, layer, _chosen(inputs), seen.slots)
            for part in turn.parts:
                attend_compressed(
                    inputs.q, given, self.tokens, self.keys, seen, part.place, part.rows, part.scratch, self.config, out
                )
        return None

    def _keep(self, layer: int, inputs: CompressedInputs) -> Tensor | None:
        """Keeps what later steps go on from; returns the plane of entries that this one reads."""
        planes, entries, rule, new, choice = self.layers[layer], self.entries, None, None, None
        read = planes.entries
        if entries is not None:
            sums = None if entries.write_slots is None else planes.sums
            written, read = entries.planes(layer, planes.entries)
            rule, choice = entries.rule, entries.choice(inputs)
            new = new_entries(inputs.entries, sums, written, entries.write_slots)
        keys = NewKeys(inputs.key, planes.window)
        keep_tokens(self.tokens, rule, new, keys, choice, overlaps=self.config.overlaps)
        if entries is not None and entries.hot is not None:
            entries.hot.keep(layer)
        return read


def _chosen(inputs: CompressedInputs) -> Tensor:
    if inputs.chosen is None:
        raise PlanError("expected chosen entries in a sparse step, got none; run the indexer before")
    return inputs.chosen


class TritonCompressedBackend(AttentionBackend[CompressedSpec, CompressedInputs]):
    """Runs on NVIDIA GPUs."""

    capabilities: ClassVar[tuple[Capability, ...]] = COMPRESSED_ROWS
    sizes: ClassVar[DecodeConfig | None] = None
    """The sizes of programs; None: those that suit the device."""

    def __init__(self, context: BackendContext[CompressedSpec]) -> None:
        self._spec = spec = context.spec
        self._cache, self._coordinator = context.cache, context.coordinator
        self._layers = _planes_by_layer(context)
        chip = Chip.of(context.device)
        self._config = config = self.sizes or choose_compressed(
            spec.head_dim,
            spec.num_q_heads,
            context.dtype,
            multiprocessors=chip.multiprocessors,
            shared_bytes=chip.shared_bytes,
            overlaps=chip.overlaps,
        )
        self._pieces = pieces = pieces_of(config, spec.head_dim)
        limits, has_entries = context.limits, spec.compression is not None

        def lane_leases(lane: Lane) -> _Lane:
            def lease(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
                return context.workspace.lease(context.group, f"triton {name}", lane, shape, dtype)

            programs, tokens = config.num_programs, limits.max_step_tokens
            return _Lane(
                parts=lease("parts", (2 * programs, config.heads, spec.head_dim // pieces), torch.float32),
                stats=lease("part stats", (2 * programs, 2, config.heads), torch.float32),
                slots=lease("chosen slots", (tokens, spec.top_k or 0), torch.int32),
                entries=lease("step entries", (tokens if has_entries else 0, spec.head_dim), context.dtype),
            )

        self._lanes = {lane: lane_leases(lane) for lane in limits.lanes}

    def plan(self, step: StepView, buffers: PlanBuffers) -> _TritonCompressedPlan:
        spec, config, lane = self._spec, self._config, self._lanes[step.lane]
        planned, count = PlannedTokens.of(step, buffers), step.batch.num_tokens
        compression = spec.compression
        keys = SeenKeys(
            window=spec.window,
            ratio=0 if compression is None else compression.ratio,
            most_entries=(spec.top_k or 0) if step.is_sparse else 0,
            one_by_one=planned.longest <= 1 and step.states is not None,
        )
        lens, counts = (buffers.take(name, (count,), torch.int64) for name in ("lens", "counts"))
        entries = None if compression is None else self._plan_entries(rule_of(compression), step, lane, buffers)
        turns = () if entries is None or entries.hot is None else entries.hot.turns
        return _TritonCompressedPlan(
            scale=spec.scale,
            layers=self._layers,
            planned=planned,
            tokens=step_tokens(step, planned),
            keys=keys,
            entries=entries,
            lens=lens,
            counts=counts,
            turns=tuple(
                self._plan_turn(turn, number, planned, lens, counts, lane, buffers)
                for number, turn in enumerate(turns or (None,))
            ),
            config=config,
            subgroups=config.num_subgroups(spec.num_q_heads) * self._pieces,
        )

    def _plan_entries(
        self, rule: CompressionRule, step: StepView, lane: _Lane, buffers: PlanBuffers
    ) -> _PlannedEntries:
        pool, is_hot = self._cache.pools["entry"], self._cache.is_on_host and not step.is_transient
        hot = self._coordinator.plan(step, buffers) if is_hot else None
        slots = lane.slots[: step.batch.num_tokens] if step.is_sparse else None
        places: EntryPages = entry_places(step, pool)
        write_slots = step.write_slots(pool) if hot is None else hot.new_slots
        return _PlannedEntries(rule, write_slots, lane.entries, SeenEntries(places, slots), hot)

    def _plan_turn(
        self,
        turn: EntryTurn | None,
        number: int,
        planned: PlannedTokens,
        lens: Tensor,
        counts: Tensor,
        lane: _Lane,
        buffers: PlanBuffers,
    ) -> _Turn:
        """Plans the tokens of a turn. If others are between them, these count as padding."""
        tokens, masked = slice(0, lens.shape[0]), None
        if turn is not None and turn.tokens.contiguous is not None:
            tokens = turn.tokens.contiguous
        elif turn is not None:
            lens = masked = buffers.take(f"lens of turn {number}", lens.shape, torch.int64)
        parts = self._plan_parts(f"turn {number}", tokens, planned, lens, counts, lane, buffers)
        return _Turn(turn, masked, tuple(parts))

    def _plan_parts(
        self,
        name: str,
        tokens: slice,
        planned: PlannedTokens,
        lens: Tensor,
        counts: Tensor,
        lane: _Lane,
        buffers: PlanBuffers,
    ) -> Iterator[_Part]:
        programs, stop = self._config.num_programs, tokens.stop if planned.num_rows else tokens.start
        for start in range(tokens.start, stop, MOST_AT_ONCE):
            place = slice(start, min(start + MOST_AT_ONCE, stop))
            scratch = DecodeScratch(
                starts=buffers.take(f"{name}, starts {start}", (programs, 8), torch.int32),
                cuts=buffers.take(f"{name}, cuts {start}", (programs, 8), torch.int32),
                row_tokens=buffers.take(f"{name}, row tokens {start}", (place.stop - start,), torch.int32),
                out=lane.parts,
                stats=lane.stats,
            )
            # Nothing is written at slots, and pages are those of entries.
            rows = DecodeRows(lens[place], counts[place], planned.rows.rows[place], counts, counts.view(1, -1), 1)
            yield _Part(place, rows, scratch)


def _planes_by_layer(context: BackendContext[CompressedSpec]) -> tuple[_Planes, ...]:
    states, pools = context.cache.states, context.cache.pools
    windows = states.plane("window").unbind(0)
    if context.spec.compression is None:
        return tuple(_Planes(window, None, None) for window in windows)
    sums, entries = states.plane("sums").unbind(0), pools["entry"].plane("entry").unbind(0)
    return tuple(map(_Planes, windows, sums, entries))
