"""Steps of compressed attention, and of indexers over compressed keys, over random tokens, and the oracle's answer.

A context is the inputs of its tokens. What earlier steps would have left of it, entries and a state, is made by the
oracle. Before a step runs, what it writes holds NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from sightline.attention.compressed.inputs import CompressionInputs
from sightline.attention.contract import Lse
from sightline.attention.oracle.compressed import (
    attend_compressed_row,
    compress_row,
    sums_behind,
    window_behind,
)
from sightline.attention.oracle.index import index_scores
from sightline.attention.planner import GroupPlan, PlannedBatch
from sightline.cache.layout import walk_slots
from sightline.core.batch import PADDING_SLOT
from sightline.testing.conformance.compressed_problems import rotation_at
from sightline.testing.conformance.index_steps import UNTOUCHED, is_right
from sightline.testing.conformance.layer_step import Asked, HostOutput
from sightline.testing.conformance.problem import State
from sightline.testing.conformance.rig import Row
from sightline.testing.conformance.state_steps import StateStep
from sightline.testing.conformance.steps import best_places

_SUMS_TOLERANCE = 1e-4
"""Sums are fp32 whatever the dtype of the inputs is."""
_ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""How far a score may be off, relative to the largest that its factors could give: keys may be rounded either way."""


class _WholeRow(NamedTuple):
    """A row with its context, as the oracle sees it."""

    number: int
    row: Row
    tokens: slice
    """Its new tokens in the step."""
    keys: Tensor
    """[seq_len, head_dim], without columns for an indexer."""
    raw: CompressionInputs | None
    """Of all tokens; None without compression."""
    entries: Tensor
    """[num_entries, head_dim], as stored."""


class CompressedStep(StateStep):
    """A step of compressed attention."""

    def _find_place(self) -> None:
        super()._find_place()
        self.pool = self.bench.entries_of(self.layer)
        positions = [torch.arange(row.context_len, row.seq_len) for row in self.rows]
        joined = torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64)
        self.inputs = self.problem.at_positions(self.spec, self.inputs, joined)
        self._complete_inputs()

    def _complete_inputs(self) -> None:
        """Draws which entries each query attends to, if the layer attends to chosen ones."""
        if self.spec.top_k is None:
            return
        choices = [torch.zeros(0, self.spec.top_k, dtype=torch.int32)]
        for row in self.rows:
            if row.query_len:
                visible = self._visible(row, range(row.query_len))
                wish = torch.rand(visible.shape, generator=self._generator)
                way, places = torch.arange(row.query_len) % 3, torch.arange(visible.shape[1]).float()
                wish[way == 1] -= places
                wish[way == 2] += places
                choices.append(best_places(wish, visible, self.spec.top_k))
        self.inputs = replace(self.inputs, chosen=torch.cat(choices))

    def _visible(self, row: Row, queries: Sequence[int]) -> Tensor:
        """[num_queries, num_entries] bool: the entries that new tokens of a row see."""
        ratio = self.spec.compression.ratio
        ready = (row.context_len + torch.tensor(list(queries)) + 1).div(ratio, rounding_mode="floor")
        return torch.arange(row.seq_len // ratio) < ready.unsqueeze(1)

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype in which keys and entries are kept."""
        return self.bench.setting.cache_dtype or self.bench.setting.dtype

    def _random_contexts(self) -> list[tuple[Tensor, ...]]:
        drawn = [self.problem.random_inputs(self.spec, row.context_len, self._normal) for row in self.rows]
        return [self.problem.of_history(inputs) for inputs in drawn]

    def given(self, planned: PlannedBatch, inputs: Any) -> Any:
        if self.spec.top_k is None or planned.plan.groups[planned.plan.places[self.layer].group].is_sparse:
            return inputs
        return replace(inputs, chosen=None)

    def _whole(self, number: int, tokens: slice, length: int | None = None) -> _WholeRow:
        """Returns a row; `length` tokens of it, context included, or all."""
        row, new = self.rows[number], self.problem.of_history(self.inputs)
        both = zip(self.contexts[number], new, strict=True)
        history = [torch.cat([old, plane[tokens]])[:length] for old, plane in both]
        keys = history[0] if self.problem.history[0] == "key" else history[0][:, :0]
        compression = self.spec.compression
        if compression is None:
            return _WholeRow(number, row, tokens, keys, None, keys[:0])
        values, gates = history[-2:]
        turned = rotation_at(compression, torch.arange(len(values)))
        raw = CompressionInputs(values, gates, self.inputs.entries.norm, *turned)
        return _WholeRow(number, row, tokens, keys, raw, compress_row(compression, raw).to(self._dtype))

    def _state(self, whole: _WholeRow, length: int) -> State:
        """Returns the state behind the first `length` tokens of a row."""
        found = []
        for plane in self.planes:
            if plane.name == "window":
                found.append(window_behind(self.spec, whole.keys[:length].to(self._dtype)))
            else:
                assert whole.raw is not None, "a layer with sums compresses"
                found.append(sums_behind(self.spec.compression, whole.raw.part(slice(length))))
        return tuple(found)

    def write_contexts(self) -> None:
        """Writes each row's state and entries to where earlier steps would put them, and NaN to what it writes."""
        for number, (row, table_row) in enumerate(zip(self.rows, self.table_rows, strict=True)):
            if not row.context_len:
                continue
            whole = self._whole(number, slice(0, 0))
            self._put(self.table.slot(table_row, row.context_len), self._state(whole, row.context_len))
            if self.pool is not None:
                slots = walk_slots(self.pool, table_row, len(whole.entries))
                self._plane()[slots] = whole.entries.to(self.bench.device)
        self.clear_written()

    def _plane(self) -> Tensor:
        """[num_slots, head_dim]: the layer's entries."""
        assert self.pool is not None, "a layer with entries has a pool"
        return self.pool.plane(self.pool.spec.planes[0].name)[self.layer_in_group]

    def _entry_slots(self) -> list[int]:
        """The slots of entries that the step writes."""
        if self.pool is None or not self.batch.pools:
            return []
        return sorted(set(self.batch.pools[self.pool.key].write_slots.tolist()) - {PADDING_SLOT})

    def clear_written(self) -> None:
        super().clear_written()
        if self.pool is not None:
            self._plane()[self._entry_slots()] = torch.nan

    def written_in(self, name: str) -> set[int]:
        is_pool = self.pool is not None and name.startswith(f"{self.pool.key}.")
        # What a token writes that completes no entry may be in the padding slot.
        return {*self._entry_slots(), PADDING_SLOT} if is_pool else super().written_in(name)

    def _asked_rows(self, asked: Asked | None) -> Iterator[tuple[_WholeRow, list[int]]]:
        """Yields the rows of which some tokens are asked about, with these tokens."""
        for number, row, tokens in self._row_tokens():
            queries = list(range(row.query_len) if asked is None else asked.get(number, ()))
            if queries:
                yield self._whole(number, tokens), queries

    def expected(self, asked: Asked | None = None) -> HostOutput:
        outs = [torch.zeros(0, self.spec.num_q_heads, self.spec.out_dim)]
        kept, entries = dict[int, State](), dict[int, Tensor]()
        for whole, queries in self._asked_rows(asked):
            outs.append(self._attended(whole, queries))
            self._note(whole, kept, entries)
        return HostOutput(torch.cat(outs), None, kept, entries)

    def _attended(self, whole: _WholeRow, queries: Sequence[int]) -> Tensor:
        places = torch.tensor(queries)
        inputs, positions = self.inputs.part(whole.tokens), places + whole.row.context_len
        chosen = None if inputs.chosen is None or not self.is_sparse else inputs.chosen[places]
        keys = whole.keys.to(self._dtype)
        return attend_compressed_row(self.spec, inputs.q[places], positions, keys, whole.entries, inputs.sinks, chosen)

    def _note(self, whole: _WholeRow, kept: dict[int, State], entries: dict[int, Tensor]) -> None:
        """Adds the states that a row keeps, and the entries that it completes."""
        context = whole.row.context_len
        for place in range(whole.tokens.start, whole.tokens.stop) if self.kept else ():
            if self.kept[place]:
                kept[place] = self._state(whole, context + place - whole.tokens.start + 1)
        ratio = self.spec.tokens_per_entry
        for number in range(context // ratio, len(whole.entries)):
            entries[whole.tokens.start + (number + 1) * ratio - 1 - context] = whole.entries[number]

    @property
    def is_sparse(self) -> bool:
        """True if entries are in host memory, or if some row may have more of them than are chosen, as far as the
        batch's bounds tell."""
        if self.spec.top_k is not None and self.bench.setting.hot_per_choice:
            return True
        bounds = zip(self.batch.context_lens.bound, self.batch.query_lens.bound, strict=True)
        longest = max((context + new for context, new in bounds), default=0)
        return self.spec.top_k is not None and longest // self.spec.tokens_per_entry > self.spec.top_k

    def unwritten(self, expected: HostOutput, tolerance: float) -> str | None:
        wrong = super().unwritten(expected, tolerance)
        if wrong is not None or self.pool is None:
            return wrong
        slots, plane = self.batch.pools[self.pool.key].write_slots.tolist(), self._plane().cpu().float()
        allowed = max(_SUMS_TOLERANCE, 2 * torch.finfo(self._dtype).eps)
        for place, wanted in (expected.entries or {}).items():
            error = (plane[slots[place]] - wanted.float()).abs()
            if not slots[place] or not bool((error <= allowed * (1 + wanted.float().abs())).all()):
                return f"expected the entry of {self._told(place)} in slot {slots[place]}, got another there"
        return None

    def _wrong(self, place: int, wanted: State, tolerance: float) -> str | None:
        del tolerance
        slot = self.kept[place]
        for plane, got, want in zip(self.planes, self.read(slot), wanted, strict=True):
            same = torch.equal(got, want) if plane.name == "window" else _same_sums(got, want)
            if not same:
                return f"expected the {plane.name} behind {self._told(place)} in slot {slot}, got another there"
        return None

    def continued(self, rows: Sequence[Row], *, seed: int) -> StateStep:
        contexts, new = [], self.problem.of_history(self.inputs)
        for number, _, tokens in self._row_tokens():
            both = zip(self.contexts[number], new, strict=True)
            contexts.append(tuple(torch.cat([old, plane[tokens]]) for old, plane in both))
        for row, table_row in zip(rows, self.table_rows, strict=True):
            self.bench.store.grow_row(table_row, row.seq_len)
        step = type(self)(self.bench, rows, seed=seed, layer=self.layer, table_rows=self.table_rows, contexts=contexts)
        step.clear_written()
        return step

    def accepted(self, counts: Sequence[int], query_len: int, *, seed: int) -> CompressedStep:
        """Returns the next step of rows that keep only the first `counts` of their new tokens; others were guesses
        that turned out to be wrong."""
        lengths = self.bench.store.lengths
        lengths.launch(self.batch, 0)
        rows, contexts, new = [], [], self.problem.of_history(self.inputs)
        for (number, row, tokens), table_row, count in zip(self._row_tokens(), self.table_rows, counts, strict=True):
            stop = row.context_len + count
            lengths.commit(table_row, stop)
            lengths.settle(table_row, stop)
            right = slice(tokens.start, tokens.start + count)
            both = zip(self.contexts[number], new, strict=True)
            contexts.append(tuple(torch.cat([old, plane[right]]) for old, plane in both))
            rows.append(Row(stop, query_len))
            self.bench.store.grow_row(table_row, stop + query_len)
        # What the wrong guesses wrote stays: the next step must not read it.
        return type(self)(self.bench, rows, seed=seed, layer=self.layer, table_rows=self.table_rows, contexts=contexts)


def _same_sums(got: Tensor, want: Tensor) -> bool:
    """Compares sums [num_sums, 3, head_dim] whatever maximum they were divided by."""
    if not bool(got.isfinite().all()):
        return False
    some = want[:, 1] > 0
    if not torch.equal(got[:, 1] > 0, some):
        return False
    for one, two in ((_logarithm(got), _logarithm(want)), (got[:, 2] / got[:, 1], want[:, 2] / want[:, 1])):
        if not bool(((one - two).abs() <= _SUMS_TOLERANCE * (1 + two.abs()))[some].all()):
            return False
    return True


def _logarithm(sums: Tensor) -> Tensor:
    return sums[:, 0] + sums[:, 1].log()


class CompressedIndexStep(CompressedStep):
    """A step of an indexer over compressed keys. Scores that differ by no more than rounding may be ranked either
    way."""

    names_of_numbers: ClassVar[tuple[str, ...]] = ("choice",)
    _is_disturbed = False

    def _complete_inputs(self) -> None:
        """Nothing to draw: an indexer chooses itself."""

    def given(self, planned: PlannedBatch, inputs: Any) -> Any:
        del planned
        return inputs

    def room(self, planned: PlannedBatch) -> Tensor:
        choice = self._group(planned).choice
        assert choice is not None, "indexers have memory for their choice"
        room = choice[: self.batch.num_tokens]
        self.clear(room)
        return room

    def clear(self, out: Tensor) -> None:
        out.fill_(UNTOUCHED)

    def _group(self, planned: PlannedBatch) -> GroupPlan:
        return planned.plan.groups[planned.plan.indexers[self.layer].group]

    def launch(self, planned: PlannedBatch, inputs: Any, out: Tensor) -> Lse | None:
        del out  # the planner's
        planned.choose(self.layer, inputs)
        return None

    def answer_in(self, planned: PlannedBatch, out: Tensor, lse: Lse | None) -> HostOutput:
        """Numbers as fp32, NaN where nothing was written. No columns if the step is not sparse."""
        found = out.cpu().float()
        found = found.masked_fill(found == UNTOUCHED, torch.nan)
        if not self._group(planned).is_sparse:
            self._is_disturbed |= not bool(found.isnan().all())
            found = found[:, :0]
        return HostOutput(found, lse)

    def spoiled(self) -> str | None:
        if self._is_disturbed:
            return "expected a step that is not sparse to leave the memory of its choice unchanged, got numbers in it"
        return super().spoiled()

    def _scores(self, whole: _WholeRow, queries: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Scores and what is visible, both [num_queries, num_entries], and how far scores may be off."""
        inputs, places = self.inputs.part(whole.tokens), torch.tensor(queries)
        q, weights, keys = inputs.q[places], inputs.weights[places], whole.entries.float()
        longest = keys.norm(dim=-1).amax() if len(keys) else torch.zeros(())
        largest = longest * (weights.float().abs() * q.float().norm(dim=-1)).sum(-1, keepdim=True)
        scores = index_scores(q, keys, weights)
        return scores, self._visible(whole.row, queries), _ROUNDING[self._dtype] * largest

    def expected(self, asked: Asked | None = None) -> HostOutput:
        top_k = self.spec.top_k if self.is_sparse else 0
        outs, kept, entries = [torch.zeros(0, top_k)], dict[int, State](), dict[int, Tensor]()
        for whole, queries in self._asked_rows(asked):
            if top_k:
                scores, visible, _ = self._scores(whole, queries)
                outs.append(best_places(scores, visible, top_k).float())
            else:
                outs.append(torch.zeros(len(queries), 0))
            self._note(whole, kept, entries)
        return HostOutput(torch.cat(outs), None, kept, entries)

    def admitted(self, answer: Tensor, expected: HostOutput, asked: Asked | None) -> HostOutput:
        if not self.is_sparse or answer.shape != expected.out.shape:
            return expected
        out, start = expected.out.clone(), 0
        for whole, queries in self._asked_rows(asked):
            tokens = slice(start, start + len(queries))
            start = tokens.stop
            if len(whole.entries):
                right = is_right(answer[tokens], *self._scores(whole, queries))
                out[tokens] = torch.where(right.unsqueeze(1), answer[tokens], out[tokens])
        return replace(expected, out=out)
