"""Latent attention with every head's keys and values expanded from entries, on a kernel for ragged rows.

    entries of a phase ──two products──▶ keys, values in leases ──one call per mask──▶ out, or merged by LSE

The parts of a phase are ordered so that each mask's keys are contiguous:

    |-- seen in full --|-- both --|-- causal --|
    |------- call: full ----------|
                       |------ call: causal ----|

Runs the phases of `latent.phases` except the absorbed one. Composed by backends, which own the cache write, the LSE's
memory and the kernel. Does not know which kernel it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import BackendContext, LatentInputs, StepView
from sightline.attention.latent.phases import Phase, RowPart, Way
from sightline.attention.shared.merge import PartialResults, merge_states
from sightline.attention.shared.step_tokens import StepTokens, joined_runs, spread_runs
from sightline.attention.shared.tiles import RowSpan
from sightline.attention.spec import LatentSpec
from sightline.attention.workspace import Lane
from sightline.core.batch import MaskKind
from sightline.kernels.latent_attention import expand_latents

ROOM_BYTES = 512 << 20
"""Memory for expanded keys and values: at 128 heads of 192 + 128 in half precision, 6,500 keys at once."""


class VarlenCall(Protocol):
    """One planned call over ragged rows."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """Computes q [nq, heads, nope + rope], k [nk, heads, nope + rope], v [nk, heads, value], all contiguous.

        Fills out [nq, heads, value] and returns the LSE [nq, heads], fp32, natural logarithm, in any memory order.
        """


class VarlenKernel(Protocol):
    """Attention over ragged rows of one spec: its heads, dimensions and scale."""

    def plan(
        self, name: str, query_lens: Sequence[int], key_lens: Sequence[int], *, causal: bool, buffers: PlanBuffers
    ) -> VarlenCall:
        """Plans rows of at least one query and one key each; buffer names begin with `name`.

        Causal masks are aligned to the end of the keys: query i of n sees keys up to nk - n + i, and n is at most nk.
        """


MergeStates: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Signature of `merge.merge_states`: (out, lse, other_out, other_lse); changes the first two in place."""


def never_absorbed(spec: LatentSpec, span: RowSpan, room: int) -> Way:
    """The choice for a backend without a kernel over entries, which does not support trees."""
    del spec
    return Way.ONE_SHOT if span.context_len + span.query_len <= room else Way.CHUNKED


class _Scratch(NamedTuple):
    """A lane's leases."""

    queries: Tensor
    """[max_step_tokens, heads, nope + rope]: the step's queries, if their two parts are separate tensors."""
    chosen: Tensor
    """[max_step_tokens, heads, nope + rope]: a call's queries, if they are not contiguous."""
    stored: Tensor
    """[room, latent + rope] in the cache's dtype: entries as stored."""
    gathered: Tensor
    """[room, latent + rope] in the compute dtype; shares memory with `stored` if the dtypes are equal."""
    keys: Tensor
    """[room, heads, nope + rope]."""
    values: Tensor
    """[room, heads, value]."""
    found: Tensor
    """[max_step_tokens, heads, value]: result of a call."""
    merged: PartialResults
    """Partial results of rows that take several calls."""


class _Run(NamedTuple):
    """One layer of one step."""

    entries: Tensor
    """[num_slots, latent + rope]."""
    entry_scale: float
    inputs: LatentInputs
    queries: Tensor
    """[num_tokens, heads, nope + rope]."""
    out: Tensor
    lse: Tensor | None
    scratch: _Scratch
    merge: MergeStates


class _Call(NamedTuple):
    """The queries of a phase that see its keys through one mask."""

    tokens: StepTokens
    keys: slice
    """Range within the phase's keys."""
    attend: VarlenCall
    merges: bool

    def __call__(self, run: _Run) -> None:
        scratch = run.scratch
        q = self.tokens.of(run.queries, scratch.chosen)
        keys, values = scratch.keys[self.keys], scratch.values[self.keys]
        in_place = self.tokens.side_by_side if not self.merges else None
        found = run.out[in_place] if in_place is not None else scratch.found[: self.tokens.count]
        lse = self.attend(q, keys, values, found)
        if self.merges:
            self._merge(run, found, lse)
            return
        if in_place is None:
            self.tokens.put(run.out, found)
        if run.lse is not None:
            self.tokens.put(run.lse, lse)

    def _merge(self, run: _Run, found: Tensor, lse: Tensor) -> None:
        merged, merged_lse = run.scratch.merged
        before, before_lse = self.tokens.of(merged), self.tokens.of(merged_lse)
        run.merge(before, before_lse, found, lse)
        if self.tokens.side_by_side is None:
            self.tokens.put(merged, before)
            self.tokens.put(merged_lse, before_lse)


class _PhaseRun(NamedTuple):
    """A planned phase."""

    num_keys: int
    from_step: StepTokens | None
    """The step's tokens that hold the phase's entries; None if the entries are read from the pool."""
    slots: Tensor | None
    """[num_keys] int64; None unless the entries are read from the pool."""
    calls: tuple[_Call, ...]

    def __call__(self, run: _Run) -> None:
        latents, ropes = self._entries(run)
        keys, values = run.scratch.keys[: self.num_keys], run.scratch.values[: self.num_keys]
        expand_latents(latents, ropes, run.inputs.key_up, run.inputs.value_up, keys, values)
        for call in self.calls:
            call(run)

    def _entries(self, run: _Run) -> tuple[Tensor, Tensor]:
        """[num_keys, latent] and [num_keys, rope]."""
        inputs, latent_dim = run.inputs, run.inputs.latent.shape[1]
        gathered = run.scratch.gathered[: self.num_keys]
        if self.from_step is not None:
            return self.from_step.of(inputs.latent), self.from_step.of(inputs.k_rope)
        assert self.slots is not None, "entries of the pool have slots"
        stored = run.scratch.stored[: self.num_keys]
        # Copy as integers: the cache dtype may not support index_select.
        torch.index_select(_as_integers(run.entries), 0, self.slots, out=_as_integers(stored))
        if stored.dtype != gathered.dtype:
            gathered.copy_(stored)
        if run.entry_scale != 1.0:
            gathered.mul_(run.entry_scale)
        return gathered[:, :latent_dim], gathered[:, latent_dim:]


def _as_integers(entries: Tensor) -> Tensor:
    """A view of one-byte elements as uint8; other tensors unchanged."""
    return entries.view(torch.uint8) if entries.dtype.itemsize == 1 else entries


@dataclass(frozen=True, eq=False)
class VarlenPhases:
    """The phases of one step that are not absorbed."""

    entries: tuple[Tensor, ...]
    """Per layer: [num_slots, latent + rope]."""
    entry_scales: tuple[float, ...]
    """Per layer: factor for entries read from the pool."""
    scratch: _Scratch
    tokens: slice
    """From the first token that takes part to the last."""
    phases: tuple[_PhaseRun, ...]
    merged: tuple[slice, ...]
    """Tokens of rows in several calls."""
    merge: MergeStates

    def run(self, layer: int, inputs: LatentInputs, out: Tensor, lse: Tensor | None) -> None:
        """Fills `out` [num_tokens, heads, value], and `lse` [num_tokens, heads] fp32 if given, for the phases' rows.

        Except under `TRANSIENT`, the step's entries must already be in the pool.
        """
        if not self.phases:
            return
        scratch = self.scratch
        scratch.merged.begin(self.merged)
        queries = self._queries(inputs)
        run = _Run(self.entries[layer], self.entry_scales[layer], inputs, queries, out, lse, scratch, self.merge)
        for phase in self.phases:
            phase(run)
        scratch.merged.end(self.merged, out, lse)

    def _queries(self, inputs: LatentInputs) -> Tensor:
        """Nope and rope parts of each query, in place if they are contiguous, otherwise joined."""
        whole = inputs.whole_queries()
        if whole is not None:
            return whole
        joined, tokens, nope_dim = self.scratch.queries, self.tokens, inputs.q_nope.shape[-1]
        # Two copies, because joining along the last dimension copies element by element.
        joined[tokens, :, :nope_dim] = inputs.q_nope[tokens]
        joined[tokens, :, nope_dim:] = inputs.q_rope[tokens]
        return joined


class _Piece(NamedTuple):
    """Queries of a part that see its keys through one mask."""

    part: RowPart
    first_query: int
    stop_query: int

    @property
    def tokens(self) -> slice:
        first = self.part.span.first_token
        return slice(first + self.first_query, first + self.stop_query)


class LatentVarlen:
    """Plans the phases that are not absorbed. Built once per group, with every lease that it needs."""

    def __init__(
        self,
        context: BackendContext[LatentSpec],
        kernels: Mapping[Lane, VarlenKernel],
        *,
        entry_scales: Sequence[float],
        room_bytes: int = ROOM_BYTES,
        merge: MergeStates = merge_states,
    ) -> None:
        """`entry_scales`, per layer, multiply entries read from the pool: 1 unless the cache dtype is scaled."""
        spec, limits = context.spec, context.limits
        self._spec = spec
        self._pool = context.cache.pools["latent"]
        self._entries = self._pool.plane("entry").unbind(0)
        self._entry_scales = tuple(entry_scales)
        self._kernels = dict(kernels)
        self._merge = merge
        key_bytes = spec.num_q_heads * (spec.nope_dim + spec.rope_dim + spec.value_dim) * context.dtype.itemsize
        self.room = max(1, min(limits.max_rows * limits.max_seq_len, room_bytes // key_bytes))
        """Maximum keys per phase."""
        self._scratch = {lane: self._lease(context, lane) for lane in limits.lanes}

    def _lease(self, context: BackendContext[LatentSpec], lane: Lane) -> _Scratch:
        spec, heads = self._spec, self._spec.num_q_heads
        tokens, query_dim = context.limits.max_step_tokens, spec.nope_dim + spec.rope_dim

        def lease(name: str, *shape: int, dtype: torch.dtype = context.dtype) -> Tensor:
            return context.workspace.lease(context.group, f"varlen {name}", lane, shape, dtype)

        cache_dtype = self._entries[0].dtype
        stored = lease("stored", self.room, spec.head_dim, dtype=cache_dtype)
        return _Scratch(
            queries=lease("queries", tokens, heads, query_dim),
            chosen=lease("chosen", tokens, heads, query_dim),
            stored=stored,
            gathered=stored if cache_dtype == context.dtype else lease("gathered", self.room, spec.head_dim),
            keys=lease("keys", self.room, heads, query_dim),
            values=lease("values", self.room, heads, spec.value_dim),
            found=lease("found", tokens, heads, spec.value_dim),
            merged=PartialResults(
                lease("merged", tokens, heads, spec.value_dim, dtype=torch.float32),
                lease("merged lse", tokens, heads, dtype=torch.float32),
            ),
        )

    def plan(self, phases: Sequence[Phase], step: StepView, buffers: PlanBuffers) -> VarlenPhases:
        """Plans phases of at most `room` keys each, none of them absorbed and without trees."""
        calls = [[pieces for pieces in _by_mask(phase) if pieces] for phase in phases]
        flat = [pieces for of_phase in calls for pieces in of_phase]
        merged = _merged_rows(flat)
        spans = sorted({part.span for phase in phases for part in phase.parts}, key=lambda span: span.first_token)
        return VarlenPhases(
            entries=self._entries,
            entry_scales=self._entry_scales,
            scratch=self._scratch[step.lane],
            tokens=slice(spans[0].first_token, _tokens(spans[-1]).stop) if spans else slice(0, 0),
            phases=tuple(
                self._plan_phase(f"varlen{index}", phase, merged, step, buffers) for index, phase in enumerate(phases)
            ),
            merged=joined_runs([_tokens(span) for span in spans if span in merged]),
            merge=self._merge,
        )

    def _plan_phase(
        self, name: str, phase: Phase, merged: Set[RowSpan], step: StepView, buffers: PlanBuffers
    ) -> _PhaseRun:
        full, causal = _by_mask(phase)
        parts = _ordered(phase.parts, {piece.part for piece in full}, {piece.part for piece in causal})
        first_causal = phase.num_keys - sum(piece.part.num_keys for piece in causal)
        calls = [
            self._plan_call(f"{name}.full", _in_order(full, parts), 0, merged, step, buffers, causal=False),
            self._plan_call(
                f"{name}.causal", _in_order(causal, parts), first_causal, merged, step, buffers, causal=True
            ),
        ]
        from_step, slots = self._plan_entries(name, parts, phase, step, buffers)
        return _PhaseRun(phase.num_keys, from_step, slots, tuple(call for call in calls if call is not None))

    def _plan_call(
        self,
        name: str,
        pieces: Sequence[_Piece],
        first_key: int,
        merged: Set[RowSpan],
        step: StepView,
        buffers: PlanBuffers,
        *,
        causal: bool,
    ) -> _Call | None:
        """Returns None if no piece has this mask."""
        if not pieces:
            return None
        query_lens = [piece.stop_query - piece.first_query for piece in pieces]
        key_lens = [piece.part.num_keys for piece in pieces]
        attend = self._kernels[step.lane].plan(name, query_lens, key_lens, causal=causal, buffers=buffers)
        tokens = StepTokens.planned(name, [piece.tokens for piece in pieces], buffers)
        merges = any(piece.part.span in merged for piece in pieces)
        return _Call(tokens, slice(first_key, first_key + sum(key_lens)), attend, merges)

    def _plan_entries(
        self, name: str, parts: Sequence[RowPart], phase: Phase, step: StepView, buffers: PlanBuffers
    ) -> tuple[StepTokens | None, Tensor | None]:
        """The step's tokens if they hold all entries, otherwise slots of the pool.

        A scaled cache is always read from the pool, so that a prompt gives the same result however it is chunked.
        """
        new = all(part.first_key >= part.span.context_len for part in parts)
        scratch = self._scratch[step.lane]
        if step.is_transient or (new and scratch.stored.dtype == scratch.gathered.dtype):
            starts = [part.span.first_token - part.span.context_len + part.first_key for part in parts]
            runs = [slice(start, start + part.num_keys) for start, part in zip(starts, parts, strict=True)]
            return StepTokens.planned(f"{name}.entries", runs, buffers), None
        slots = buffers.take(f"{name}.slots", (phase.num_keys,), torch.int64)
        runs = [slice(part.first_key, part.stop_key) for part in parts]
        rows = [step.batch.rows[part.span.row] for part in parts]
        table_rows, entries = spread_runs(runs, rows, slots.device)
        slots.copy_(self._pool.table.slots(table_rows, entries, self._pool.page_size))
        return None, slots


def _by_mask(phase: Phase) -> tuple[list[_Piece], list[_Piece]]:
    """Pieces that see a part's keys in full, and pieces that see them causally up to their end."""
    full: list[_Piece] = []
    causal: list[_Piece] = []
    for part in phase.parts:
        span = part.span
        if span.kind is not MaskKind.CAUSAL or part.stop_key <= span.context_len:
            full.append(_Piece(part, part.first_query, span.query_len))
            continue
        # Queries up to the one at the last key are causal; later queries see all keys.
        stop_query = part.stop_key - span.context_len
        causal.append(_Piece(part, part.first_query, stop_query))
        if stop_query < span.query_len:
            full.append(_Piece(part, stop_query, span.query_len))
    return full, causal


def _ordered(parts: Sequence[RowPart], in_full: Set[RowPart], causally: Set[RowPart]) -> list[RowPart]:
    """Orders parts so that keys seen in full are contiguous at the beginning and keys seen causally at the end."""
    return [
        *(part for part in parts if part not in causally),
        *(part for part in parts if part in in_full and part in causally),
        *(part for part in parts if part not in in_full),
    ]


def _in_order(pieces: Sequence[_Piece], parts: Sequence[RowPart]) -> list[_Piece]:
    place = {part: index for index, part in enumerate(parts)}
    return sorted(pieces, key=lambda piece: place[piece.part])


def _merged_rows(calls: Sequence[Sequence[_Piece]]) -> set[RowSpan]:
    """Rows in several calls, and the rows that share those calls: a call merges all of its rows or none."""
    counts = Counter(piece.part.span for call in calls for piece in call)
    several = {span for span, count in counts.items() if count > 1}
    return {piece.part.span for call in calls if any(each.part.span in several for each in call) for piece in call}


def _tokens(span: RowSpan) -> slice:
    return slice(span.first_token, span.first_token + span.query_len)
