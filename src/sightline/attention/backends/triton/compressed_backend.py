"""Compressed attention with Sightline's own Triton kernels: three launches a layer, whatever the rows are.

    keep     the states and the entries of the step, and where chosen entries are
    attend   all tokens to their windows and entries, in shares of equal size
    merge    what several programs computed of one token

Rows of one new token read their window from the state behind it, which the first launch writes; others read the state
behind their context, and the keys of the step. Nothing is read on the host but bounds.
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
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, Lse, StepView
from sightline.attention.recurrent.planned_tokens import PlannedTokens
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
class _PlannedEntries:
    """How a step writes and reads entries."""

    rule: CompressionRule
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`."""
    step: Tensor
    """[max_step_tokens, head_dim]: where entries are under `TRANSIENT`."""
    seen: SeenEntries


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
    parts: tuple[_Part, ...]
    config: DecodeConfig
    subgroups: int
    """Units of a token and a block of keys."""

    def prepare(self) -> None:
        """Finds every token's row and divides the work, on the device."""
        self.planned.prepare()
        count_keys(self.tokens, self.keys, self.config.block, self.lens, self.counts)
        for part in self.parts:
            divide(part.rows, part.scratch, self.config, self.subgroups, None)

    def run(self, layer: int, inputs: CompressedInputs, out: Tensor) -> Lse | None:
        kept = self.tokens.slots is not None
        planes = self.layers[layer]
        sums, entries = planes.sums if kept else None, planes.entries
        rule, new, choice, seen = None, None, None, None
        if self.entries is not None:
            rule, seen, entries = self.entries.rule, self.entries.seen, entries if kept else self.entries.step
            new = new_entries(inputs.entries, sums, entries, self.entries.write_slots)
            if seen.slots is not None:
                if inputs.chosen is None:
                    raise PlanError("expected chosen entries in a sparse step, got none; run the indexer before")
                choice = NewChoice(inputs.chosen, seen.places, seen.slots)
        keys = NewKeys(inputs.key, planes.window)
        keep_tokens(self.tokens, rule, new, keys, choice, overlaps=self.config.overlaps)
        given = CompressedLayer(inputs.key, planes.window, entries, inputs.sinks, self.scale)
        for part in self.parts:
            attend_compressed(
                inputs.q, given, self.tokens, self.keys, seen, part.place, part.rows, part.scratch, self.config, out
            )
        return None


class TritonCompressedBackend(AttentionBackend[CompressedSpec, CompressedInputs]):
    """Runs on NVIDIA GPUs."""

    capabilities: ClassVar[tuple[Capability, ...]] = COMPRESSED_ROWS
    sizes: ClassVar[DecodeConfig | None] = None
    """The sizes of programs; None: those that suit the device."""

    def __init__(self, context: BackendContext[CompressedSpec]) -> None:
        self._spec = spec = context.spec
        self._cache = context.cache
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
        return _TritonCompressedPlan(
            scale=spec.scale,
            layers=self._layers,
            planned=planned,
            tokens=step_tokens(step, planned),
            keys=keys,
            entries=None if compression is None else self._plan_entries(rule_of(compression), step, lane),
            lens=lens,
            counts=counts,
            parts=tuple(self._plan_parts(planned, lens, counts, lane, buffers)),
            config=config,
            subgroups=config.num_subgroups(spec.num_q_heads) * self._pieces,
        )

    def _plan_entries(self, rule: CompressionRule, step: StepView, lane: _Lane) -> _PlannedEntries:
        pool = self._cache.pools["entry"]
        slots = lane.slots[: step.batch.num_tokens] if step.is_sparse else None
        places: EntryPages = entry_places(step, pool)
        return _PlannedEntries(rule, step.write_slots(pool), lane.entries, SeenEntries(places, slots))

    def _plan_parts(
        self, planned: PlannedTokens, lens: Tensor, counts: Tensor, lane: _Lane, buffers: PlanBuffers
    ) -> Iterator[_Part]:
        programs, count = self._config.num_programs, lens.shape[0]
        for start in range(0, count if planned.num_rows else 0, MOST_AT_ONCE):
            place = slice(start, min(start + MOST_AT_ONCE, count))
            scratch = DecodeScratch(
                starts=buffers.take(f"starts {start}", (programs, 8), torch.int32),
                cuts=buffers.take(f"cuts {start}", (programs, 8), torch.int32),
                row_tokens=buffers.take(f"row tokens {start}", (place.stop - start,), torch.int32),
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
