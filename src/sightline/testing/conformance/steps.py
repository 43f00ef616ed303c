"""One step of one layer over random tensors, and the oracle's answer for dense copies of them.

Inputs and answers are on the host, so that the device computes only what is tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from sightline.attention.contract import AttentionInputs, LatentInputs, SoftmaxInputs, SoftmaxQueries
from sightline.attention.oracle.attention import loaded_entries, stored_entries, visible_keys
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import Feature
from sightline.attention.workspace import MAIN_LANE, Lane
from sightline.cache.layout import walk_slots
from sightline.cache.spec import PlaneSpec
from sightline.core.batch import Batch
from sightline.runner.batching import assemble_transient
from sightline.testing.conformance.problem import Entries
from sightline.testing.conformance.rig import AttentionRig, Row, as_bytes, row_work

_Inputs = TypeVar("_Inputs", SoftmaxInputs, LatentInputs)
_HOST = torch.device("cpu")
Asked: TypeAlias = Mapping[int, Sequence[int]]
"""For each row, in order, the new tokens that the oracle is asked about."""
_NOISE_NUMBERS = 1_000_003
"""Larger random tensors repeat this many numbers. A prime, so that no two entries of a row are alike."""


@cache
def _noise() -> Tensor:
    return torch.randn(_NOISE_NUMBERS, generator=torch.Generator().manual_seed(5))


@dataclass(frozen=True, eq=False)
class HostOutput:
    """The output of attention, on the host."""

    out: Tensor
    """[num_tokens, num_q_heads, out_dim]."""
    lse: Tensor | None
    """[num_tokens, num_q_heads]."""


def bits(tensor: Tensor) -> Tensor:
    """Returns a tensor as bytes, in which NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


def map_inputs(inputs: _Inputs, change: Callable[[Tensor], Tensor], names: Sequence[str] = ("q", "k", "v")) -> _Inputs:
    """Returns the inputs with the named tensors changed in the same way."""
    return replace(inputs, **{name: change(vars(inputs)[name]) for name in names})


def tensors_of(inputs: AttentionInputs) -> dict[str, Tensor]:
    """Returns all tensors of the inputs, by name."""
    return {name: tensor for name, tensor in vars(inputs).items() if tensor is not None}


def to_device(inputs: _Inputs, device: torch.device) -> _Inputs:
    """Copies the inputs, even to a CPU: a backend that changes its inputs must not change the oracle's."""
    return map_inputs(inputs, lambda tensor: tensor.to(device, copy=True), tuple(tensors_of(inputs)))


def _positions(row: Row) -> Tensor:
    """Returns the positions of a row's new tokens as requested: a backend may have changed the batch's."""
    return torch.tensor(list(row.positions or range(row.context_len, row.seq_len)), dtype=torch.int64)


class Step:
    """A batch on a rig, one layer's inputs for it, and contexts in the slots where earlier steps would put them."""

    def __init__(
        self,
        bench: AttentionRig,
        rows: Sequence[Row],
        *,
        seed: int = 0,
        layer: int = 0,
        transient: bool = False,
        table_rows: Sequence[int] | None = None,
        contexts: Sequence[Entries] | None = None,
        writes: bool = True,
    ) -> None:
        """Opens page-table rows unless `table_rows` are given. Draws contexts and writes them to the cache, unless
        `contexts` are given, which are there already, or `writes` is False."""
        self.bench = bench
        self.rows = tuple(rows)
        self.layer = layer
        self.problem = bench.problem
        self.spec: Any = bench.specs[layer]
        """A spec of the problem's kind."""
        self.pool, self.layer_in_group = bench.place_of(layer)
        self._generator = torch.Generator().manual_seed(seed)
        num_tokens = sum(row.query_len for row in rows)
        self.inputs: Any = self.problem.random_inputs(self.spec, num_tokens, self._normal)
        """Inputs of the problem's kind, on the host."""
        self.contexts: list[Entries] = (
            [tuple(self._normal(row.context_len, *plane.shape) for plane in self.planes) for row in rows]
            if contexts is None
            else list(contexts)
        )
        if transient:
            self.table_rows = [0] * len(rows)
            self.batch: Batch = assemble_transient(row_work(rows, self.table_rows), bench.device)
            return
        self.table_rows = bench.open_rows(rows) if table_rows is None else list(table_rows)
        for row, table_row in zip(rows, self.table_rows, strict=True):
            bench.store.fill_row(table_row, row.context_len)
        self.batch = bench.batch(rows, self.table_rows)
        if contexts is None and writes:
            self.write_contexts()
        if self.is_borrowed:
            self.write_new()

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
        return Step(self.bench, rows, seed=seed, layer=self.layer, table_rows=self.table_rows, contexts=contexts)

    def step_before(self, written: Mapping[int, int]) -> Step:
        """Returns an earlier step, which writes the last `written[row]` entries of the contexts of some rows."""
        rows = [Row(self.rows[row].context_len - count, count) for row, count in written.items()]
        step = Step(
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

    def pad(self, num_rows: int, num_tokens: int, value: float) -> None:
        """Adds padding rows, and padding tokens whose inputs are all `value`."""
        self.batch = self.batch.pad(len(self.rows) + num_rows, self.batch.num_tokens + num_tokens)
        self.change_inputs(lambda tensor: torch.cat([tensor, tensor.new_full((num_tokens, *tensor.shape[1:]), value)]))

    def change_inputs(self, change: Callable[[Tensor], Tensor]) -> None:
        """Changes all inputs that have one row per token in the same way."""
        self.inputs = map_inputs(self.inputs, change, self.problem.per_token)

    def take_row(self, other: Step, place: slice) -> None:
        """Copies all inputs of another step to these tokens, and its layer's weights."""
        names = tensors_of(other.inputs)
        for name in self.problem.per_token:
            vars(self.inputs)[name][place] = names.pop(name)
        self.inputs = replace(self.inputs, **names)

    def weigh_alike(self) -> None:
        """Sets queries to 0, so that every key weighs the same."""
        for queries in self.problem.queries(self.inputs):
            queries.zero_()

    def _whole_rows(self) -> Iterator[tuple[slice, Entries]]:
        """Yields each row's new tokens and all its entries, those of the context first."""
        new, start = self.problem.entries(self.inputs), 0
        for row, context in zip(self.rows, self.contexts, strict=True):
            tokens = slice(start, start + row.query_len)
            start += row.query_len
            yield tokens, tuple(torch.cat([old, plane[tokens]]) for old, plane in zip(context, new, strict=True))

    def _normal(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        if count <= _NOISE_NUMBERS:
            return torch.randn(*shape, generator=self._generator).to(self.bench.setting.dtype)
        start = int(torch.randint(_NOISE_NUMBERS, (1,), generator=self._generator))
        noise = _noise().to(self.bench.setting.dtype)
        return noise.repeat(-(-(start + count) // _NOISE_NUMBERS))[start : start + count].view(shape)

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
            for plane, values in zip(self.planes, self.problem.entries(self.inputs), strict=True):
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

    def unwritten(self) -> str | None:
        """Describes a new entry that is not in its slot, or returns None if all are."""
        new = self.problem.entries(self.inputs)
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

    def places(self, asked: Asked) -> Tensor:
        """Returns the indices of the tokens that are asked about."""
        starts = [0, *itertools.accumulate(row.query_len for row in self.rows)]
        places = [starts[row] + query for row, queries in asked.items() for query in queries]
        return torch.tensor(places, dtype=torch.int64)

    def expected(self, asked: Asked | None = None) -> HostOutput:
        """Returns the oracle's answer for all tokens, or for those that are asked about. Reads no page."""
        outs, lses = [], []
        for number, (row, (tokens, entries)) in enumerate(zip(self.rows, self._whole_rows(), strict=True)):
            queries = None if asked is None else asked.get(number, ())
            if queries is not None and not queries:
                continue
            chosen = tokens if queries is None else torch.tensor(queries) + tokens.start
            visible = visible_keys(self.spec, row.mask, row.context_len, _positions(row), queries)
            kept = tuple(self.kept(plane, values) for plane, values in zip(self.planes, entries, strict=True))
            out, lse = self.problem.answer(self.spec, self.inputs, chosen, kept, visible)
            outs.append(out)
            lses.append(lse)
        empty = (0, self.spec.num_q_heads)
        return HostOutput(
            torch.cat(outs) if outs else torch.zeros(*empty, self.spec.out_dim),
            torch.cat(lses) if lses else torch.zeros(empty),
        )

    def plan(self, needs: frozenset[Feature] = frozenset(), lane: Lane = MAIN_LANE) -> PlannedBatch:
        return self.bench.planner.plan(self.batch, needs=needs, lane=lane)

    def attend(self, planned: PlannedBatch) -> HostOutput:
        """Runs the step's layer on a plan that `ensure` accepted. Output that attention does not write stays NaN."""
        inputs = to_device(self.inputs, self.bench.device)
        out = self.empty_out()
        given = SoftmaxQueries(q=inputs.q, sinks=inputs.sinks) if self.is_borrowed else inputs
        with torch.inference_mode():
            lse = planned.attend(self.layer, given, out)
        return HostOutput(out.to(_HOST), None if lse is None else lse.to(_HOST))

    def empty_out(self) -> Tensor:
        """Returns an output tensor on the device, filled with NaN."""
        shape = (self.batch.num_tokens, self.spec.num_q_heads, self.spec.out_dim)
        return torch.full(shape, torch.nan, dtype=self.bench.setting.dtype, device=self.bench.device)

    def run(self, needs: frozenset[Feature] = frozenset(), lane: Lane = MAIN_LANE) -> HostOutput:
        """Plans the step, checks the plan and runs it."""
        planned = self.bench.planner.ensure(self.plan(needs, lane))
        with torch.inference_mode():
            planned.prepare()
        return self.attend(planned)
