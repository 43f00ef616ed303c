"""One step of one layer that keeps entries, over random tensors, and the oracle's answer for dense copies of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sightline.attention.contract import SoftmaxQueries
from sightline.attention.oracle.attention import loaded_entries, stored_entries, visible_keys
from sightline.attention.oracle.index import chosen_mask
from sightline.attention.planner import PlannedBatch
from sightline.cache.layout import walk_slots
from sightline.cache.spec import PlaneSpec
from sightline.testing.conformance.layer_step import Asked, HostOutput, LayerStep, bits
from sightline.testing.conformance.problem import Entries
from sightline.testing.conformance.rig import AttentionRig, Row, as_bytes

__all__ = ["Asked", "HostOutput", "Step", "bits"]


def positions_of(row: Row) -> Tensor:
    """Returns the positions of a row's new tokens as requested: a backend may have changed the batch's."""
    return torch.tensor(list(row.positions or range(row.context_len, row.seq_len)), dtype=torch.int64)


def best_places(wish: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Returns the visible places [num_queries, top_k] int32 with the highest wishes, increasing, -1 behind the last.

    Of equal wishes those at lower places win."""
    count, nowhere = min(top_k, wish.shape[1]), wish.shape[1]
    best = wish.masked_fill(~visible, -torch.inf).sort(dim=1, descending=True, stable=True)
    places = best.indices[:, :count].masked_fill(best.values[:, :count].isneginf(), nowhere).sort(dim=1).values
    places = torch.nn.functional.pad(places, (0, top_k - count), value=nowhere)
    return places.masked_fill(places == nowhere, -1).to(torch.int32)


class Step(LayerStep):
    """A step of a layer that keeps entries, with contexts in the slots where earlier steps would put them."""

    def __init__(self, bench: AttentionRig, rows: Sequence[Row], **options: Any) -> None:
        """Takes the options of `LayerStep`."""
        super().__init__(bench, rows, **options)
        self._complete_inputs()
        if self.is_borrowed and self.batch.pools:
            self.write_new()

    def _find_place(self) -> None:
        self.pool, self.layer_in_group = self.bench.place_of(self.layer)

    def _random_contexts(self) -> list[Entries]:
        return [tuple(self._normal(row.context_len, *plane.shape) for plane in self.planes) for row in self.rows]

    def _occupy(self, *, is_there: bool) -> None:
        del is_there
        for row, table_row in zip(self.rows, self.table_rows, strict=True):
            self.bench.store.fill_row(table_row, row.context_len)

    def _complete_inputs(self) -> None:
        """Draws which entries each query attends to, if the layer attends to chosen ones."""
        if self.inputs_choose:
            self.inputs = replace(self.inputs, chosen=self._drawn_choice(self.spec.top_k))

    def _drawn_choice(self, top_k: int) -> Tensor:
        """[num_tokens, top_k] int32: in turn, any entries that a query sees, the first and the last ones, and any but
        its own. No indexer would choose like this."""
        choices = [torch.zeros(0, top_k, dtype=torch.int32)]
        for row in self.rows:
            if row.query_len:
                visible = visible_keys(self.spec, row.mask, row.context_len, positions_of(row))
                wish = torch.rand(visible.shape, generator=self._generator)
                places, queries = torch.arange(row.seq_len), torch.arange(row.query_len)
                way = (queries + len(choices)) % 4
                wish[way == 1] -= places.float()
                wish[way == 2] += places.float()
                wish[queries, row.context_len + queries] -= 2.0 * (way == 3)
                choices.append(best_places(wish, visible, top_k))
        return torch.cat(choices)

    def given(self, planned: PlannedBatch, inputs: Any) -> Any:
        if self.is_borrowed:
            return SoftmaxQueries(q=inputs.q, sinks=inputs.sinks)
        if not self.inputs_choose:
            return inputs
        is_sparse = planned.plan.groups[planned.plan.places[self.layer].group].is_sparse
        return inputs if is_sparse else replace(inputs, chosen=None)

    @property
    def inputs_choose(self) -> bool:
        """True if the inputs say which entries each query attends to."""
        return self.spec.top_k is not None

    @property
    def is_borrowed(self) -> bool:
        """True if the layer reads what another layer wrote."""
        return self.layer in self.bench.lenders

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        """The planes of the pool, in the order of entries."""
        return self.pool.spec.planes

    def next_step(self, query_len: int, *, seed: int) -> Step:
        """Returns the next step of the same rows, over what the backend itself left in the cache."""
        rows = [Row(row.seq_len, query_len) for row in self.rows]
        for following, table_row in zip(rows, self.table_rows, strict=True):
            self.bench.store.grow_row(table_row, following.seq_len)
        contexts = [entries for _, entries in self._whole_rows()]
        return type(self)(self.bench, rows, seed=seed, layer=self.layer, table_rows=self.table_rows, contexts=contexts)

    def step_before(self, written: Mapping[int, int]) -> Step:
        """Returns an earlier step, which writes the last `written[row]` entries of the contexts of some rows."""
        rows = [Row(self.rows[row].context_len - count, count) for row, count in written.items()]
        step = type(self)(
            self.bench,
            rows,
            seed=self.layer,
            layer=self.layer,
            table_rows=[self.table_rows[row] for row in written],
            contexts=[tuple(plane[:-count] for plane in self.contexts[row]) for row, count in written.items()],
        )
        ends = [tuple(plane[-count:] for plane in self.contexts[row]) for row, count in written.items()]
        self.problem.put_entries(self.spec, step.inputs, tuple(torch.cat(planes) for planes in zip(*ends, strict=True)))
        return step

    def weigh_alike(self) -> None:
        """Sets queries to 0, so that every key weighs the same."""
        for queries in self.problem.queries(self.inputs):
            queries.zero_()

    def _new_entries(self) -> Entries:
        """Returns what each plane of the pool stores of the new tokens."""
        entries: Entries = self.problem.entries(self.inputs)
        return entries

    def _whole_rows(self) -> Iterator[tuple[slice, Entries]]:
        """Yields each row's new tokens and all its entries, those of the context first."""
        new, start = self._new_entries(), 0
        for row, context in zip(self.rows, self.contexts, strict=True):
            tokens = slice(start, start + row.query_len)
            start += row.query_len
            yield tokens, tuple(torch.cat([old, plane[tokens]]) for old, plane in zip(context, new, strict=True))

    def write_contexts(self, lengths: Sequence[int] | None = None) -> None:
        """Writes each row's context, or its first `lengths[row]` entries, to the slots of earlier steps."""
        lengths = lengths or [row.context_len for row in self.rows]
        for table_row, entries, length in zip(self.table_rows, self.contexts, lengths, strict=True):
            slots = torch.tensor(walk_slots(self.pool, table_row, length), dtype=torch.int64)
            for plane, values in zip(self.planes, entries, strict=True):
                target = as_bytes(self.pool.plane(plane.name)[self.layer_in_group])
                stored = as_bytes(self.stored(plane, values[:length])).to(target.device)
                target.index_copy_(0, slots.to(target.device), stored)

    def write_new(self) -> None:
        """Writes the new entries to their slots, as the lender of a layer that borrows does earlier in the step."""
        for tokens, slots in self._new_slots():
            for plane, values in zip(self.planes, self._new_entries(), strict=True):
                target = as_bytes(self.pool.plane(plane.name)[self.layer_in_group])
                places = torch.tensor(slots, dtype=torch.int64, device=target.device)
                target.index_copy_(0, places, as_bytes(self.stored(plane, values[tokens])).to(target.device))

    def _new_slots(self) -> Iterator[tuple[slice, list[int]]]:
        """Yields, for each row, its new tokens that have entries, and the slots of these."""
        start = 0
        for row, table_row in zip(self.rows, self.table_rows, strict=True):
            slots = walk_slots(self.pool, table_row, row.num_entries)[row.context_len :]
            yield slice(start, start + len(slots)), slots
            start += row.query_len

    def unwritten(self, expected: HostOutput | None = None, tolerance: float = 0.0) -> str | None:
        """Entries must be bitwise equal, so that the tolerance does not matter."""
        del expected, tolerance
        new = self._new_entries()
        for row, (tokens, slots) in zip(self.rows, self._new_slots(), strict=True):
            for plane, values in zip(self.planes, new, strict=True):
                held = as_bytes(self.pool.plane(plane.name)[self.layer_in_group])
                places = torch.tensor(slots, dtype=torch.int64, device=held.device)
                got = held.index_select(0, places).cpu().view(plane.dtype)
                wanted = self.stored(plane, values[tokens])
                if not torch.equal(got.float(), wanted.float()):
                    return (
                        f"expected the {plane.name} of the {row.query_len} new tokens after a context of "
                        f"{row.context_len} in slots {slots[:4]}{'…' if len(slots) > 4 else ''}, got others there"
                    )
        return None

    def snap(self) -> None:
        """Rounds every entry to a number that the cache represents exactly, so that rounding does not matter."""
        self.contexts = [
            tuple(self.kept(plane, values).to(values.dtype) for plane, values in zip(self.planes, entries, strict=True))
            for entries in self.contexts
        ]
        for plane, new in (
            (self.planes[0], self.problem.new_keys(self.inputs)),
            (self.planes[-1], self.problem.new_values(self.inputs)),
        ):
            new.copy_(self.kept(plane, new))
        self.write_contexts()

    def _scale(self, plane: PlaneSpec) -> float:
        return self.pool.scales(plane.name)[self.layer_in_group]

    def stored(self, plane: PlaneSpec, values: Tensor) -> Tensor:
        """Returns values as the cache stores them."""
        return stored_entries(values, plane.dtype, self._scale(plane)).contiguous()

    def kept(self, plane: PlaneSpec, values: Tensor) -> Tensor:
        """Returns values as they are read back from the cache. A TRANSIENT step returns them unchanged."""
        return loaded_entries(self.stored(plane, values), self._scale(plane)) if self.batch.pools else values

    def _visible(self, number: int, row: Row, queries: Sequence[int] | None) -> Tensor:
        """Returns which entries of a row its new tokens, or some of them, attend to."""
        visible = visible_keys(self.spec, row.mask, row.context_len, positions_of(row), queries)
        if not self.inputs_choose:
            return visible
        first = sum(each.query_len for each in self.rows[:number])
        chosen = self.inputs.chosen[first : first + row.query_len]
        return visible & chosen_mask(chosen if queries is None else chosen[list(queries)], row.seq_len)

    def expected(self, asked: Asked | None = None) -> HostOutput:
        outs, lses = [], []
        for number, (row, (tokens, entries)) in enumerate(zip(self.rows, self._whole_rows(), strict=True)):
            queries = None if asked is None else asked.get(number, ())
            if queries is not None and not queries:
                continue
            chosen = tokens if queries is None else torch.tensor(queries) + tokens.start
            visible = self._visible(number, row, queries)
            kept = tuple(self.kept(plane, values) for plane, values in zip(self.planes, entries, strict=True))
            out, lse = self.problem.answer(self.spec, self.inputs, chosen, kept, visible)
            outs.append(out)
            lses.append(lse)
        empty = (0, self.spec.num_q_heads)
        return HostOutput(
            torch.cat(outs) if outs else torch.zeros(*empty, self.spec.out_dim),
            torch.cat(lses) if lses else torch.zeros(empty),
        )
