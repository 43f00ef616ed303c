"""One step of one layer over random tensors, and the oracle's answer for dense copies of them.

Inputs and answers live on the host, so that the device computes nothing but what is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sightline.attention.contract import SoftmaxInputs
from sightline.attention.planner import PlannedBatch
from sightline.attention.reference import attend_row, visible_keys
from sightline.attention.spec import Feature, SoftmaxSpec
from sightline.attention.workspace import MAIN_LANE, Lane
from sightline.core.batch import Batch
from sightline.runner.batching import assemble_transient
from sightline.testing.bench import Bench, Row, row_work, walk_slots

_HOST = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Answer:
    """What attention gives, on the host."""

    out: Tensor
    """[num_tokens, num_q_heads, head_dim]."""
    lse: Tensor | None
    """[num_tokens, num_q_heads]."""


def bits(tensor: Tensor) -> Tensor:
    """As bytes, in which NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


def map_inputs(inputs: SoftmaxInputs, change: Callable[[Tensor], Tensor]) -> SoftmaxInputs:
    """The inputs with q, k and v changed alike."""
    return replace(inputs, q=change(inputs.q), k=change(inputs.k), v=change(inputs.v))


def to_device(inputs: SoftmaxInputs, device: torch.device) -> SoftmaxInputs:
    """A copy there, on a CPU too: a backend that changes its inputs must not change what the oracle is asked."""
    moved = map_inputs(inputs, lambda tensor: tensor.to(device, copy=True))
    return moved if inputs.sinks is None else replace(moved, sinks=inputs.sinks.to(device, copy=True))


Entries = tuple[Tensor, Tensor]
"""Keys and values [num_entries, num_kv_heads, head_dim], on the host."""


def _positions(row: Row) -> Tensor:
    """Of a row's new tokens, as they were asked for: a backend may have changed the batch's."""
    return torch.tensor(list(row.positions or range(row.context_len, row.seq_len)), dtype=torch.int64)


class Step:
    """A batch over a bench, one layer's inputs for it, and contexts where earlier steps would have put them."""

    def __init__(
        self,
        bench: Bench,
        rows: Sequence[Row],
        *,
        seed: int = 0,
        layer: int = 0,
        transient: bool = False,
        table_rows: Sequence[int] | None = None,
        contexts: Sequence[Entries] | None = None,
    ) -> None:
        """Opens page-table rows, unless it is given some that have their pages; makes up contexts and writes them,
        unless it is given what stands in the cache already."""
        self.bench = bench
        self.rows = tuple(rows)
        self.layer = layer
        self.spec: SoftmaxSpec = bench.specs[layer]
        self.pool, self.layer_in_group = bench.place_of(layer)
        self._generator = torch.Generator().manual_seed(seed)
        spec, num_tokens = self.spec, sum(row.query_len for row in rows)
        entry = (spec.num_kv_heads, spec.head_dim)
        self.inputs = SoftmaxInputs(
            q=self._normal(num_tokens, spec.num_q_heads, spec.head_dim) * 2,
            k=self._normal(num_tokens, *entry),
            v=self._normal(num_tokens, *entry),
            sinks=self._normal(spec.num_q_heads) if spec.sinks else None,
        )
        """On the host."""
        self.contexts: list[Entries] = (
            [(self._normal(row.context_len, *entry), self._normal(row.context_len, *entry)) for row in rows]
            if contexts is None
            else list(contexts)
        )
        if transient:
            self.table_rows = [0] * len(rows)
            self.batch: Batch = assemble_transient(row_work(rows, self.table_rows), bench.device)
            return
        self.table_rows = bench.open_rows(rows) if table_rows is None else list(table_rows)
        self.batch = bench.batch(rows, self.table_rows)
        if contexts is None:
            self.write_contexts()

    def next_step(self, query_len: int, *, seed: int) -> Step:
        """The same rows go on, over what the backend itself left in the cache."""
        rows = [Row(row.seq_len, query_len) for row in self.rows]
        contexts, start = [], 0
        for row, following, table_row, (keys, values) in zip(
            self.rows, rows, self.table_rows, self.contexts, strict=True
        ):
            self.bench.store.grow_row(table_row, following.seq_len)
            tokens = slice(start, start + row.query_len)
            start += row.query_len
            contexts.append((torch.cat([keys, self.inputs.k[tokens]]), torch.cat([values, self.inputs.v[tokens]])))
        return Step(self.bench, rows, seed=seed, layer=self.layer, table_rows=self.table_rows, contexts=contexts)

    def pad(self, num_rows: int, num_tokens: int, value: float) -> None:
        """Adds rows of no tokens, and tokens of no row whose inputs are all `value`."""
        self.batch = self.batch.pad(len(self.rows) + num_rows, self.inputs.q.shape[0] + num_tokens)
        self.inputs = map_inputs(
            self.inputs, lambda tensor: torch.cat([tensor, tensor.new_full((num_tokens, *tensor.shape[1:]), value)])
        )

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.bench.setting.dtype)

    def write_contexts(self) -> None:
        """Puts each row's context where an earlier step would have."""
        for table_row, entries in zip(self.table_rows, self.contexts, strict=True):
            slots = walk_slots(self.pool, table_row, entries[0].shape[0])
            for plane, values in zip(("k", "v"), entries, strict=True):
                stored = self.pool.plane(plane)
                stored[self.layer_in_group][slots] = values.to(stored.device, stored.dtype)

    def unwritten(self) -> str | None:
        """Which new token's key or value is not in its slot, in the step's layer; None where all are."""
        start = 0
        for row, table_row in zip(self.rows, self.table_rows, strict=True):
            slots = walk_slots(self.pool, table_row, row.seq_len)[row.context_len :]
            for name, values in (("k", self.inputs.k), ("v", self.inputs.v)):
                got = self.pool.plane(name)[self.layer_in_group][slots].cpu()
                if not torch.equal(got, self.stored(values[start : start + row.query_len])):
                    return (
                        f"expected the {name} of the {row.query_len} new tokens after a context of {row.context_len} "
                        f"in slots {slots[:4]}{'…' if len(slots) > 4 else ''}, got other contents there"
                    )
            start += row.query_len
        return None

    def stored(self, values: Tensor) -> Tensor:
        """What is left of values that went through the cache, if the step has one."""
        return values.to(self.bench.setting.cache_dtype or self.bench.setting.dtype) if self.batch.pools else values

    def expected(self) -> Answer:
        """From dense tensors, row by row; nothing paged is touched."""
        outs, lses, start = [], [], 0
        for row, (keys, values) in zip(self.rows, self.contexts, strict=True):
            tokens = slice(start, start + row.query_len)
            start += row.query_len
            out, lse = attend_row(
                self.spec,
                self.inputs.q[tokens],
                self.stored(torch.cat([keys, self.inputs.k[tokens]])),
                self.stored(torch.cat([values, self.inputs.v[tokens]])),
                visible_keys(self.spec, row.mask, row.context_len, _positions(row)),
                self.inputs.sinks,
            )
            outs.append(out)
            lses.append(lse)
        empty = (0, self.spec.num_q_heads)
        return Answer(
            torch.cat(outs) if outs else torch.zeros(*empty, self.spec.head_dim),
            torch.cat(lses) if lses else torch.zeros(empty),
        )

    def plan(self, needs: frozenset[Feature] = frozenset(), lane: Lane = MAIN_LANE) -> PlannedBatch:
        return self.bench.planner.plan(self.batch, needs=needs, lane=lane)

    def attend(self, planned: PlannedBatch) -> Answer:
        """Runs the step's own layer on a plan that was proven; what attention does not write stays NaN."""
        inputs = to_device(self.inputs, self.bench.device)
        out = torch.full_like(inputs.q, torch.nan)
        with torch.inference_mode():
            lse = planned.attend(self.layer, inputs, out)
        return Answer(out.to(_HOST), None if lse is None else lse.to(_HOST))

    def run(self, needs: frozenset[Feature] = frozenset(), lane: Lane = MAIN_LANE) -> Answer:
        """Plans, proves and runs."""
        planned = self.bench.planner.ensure(self.plan(needs, lane))
        with torch.inference_mode():
            planned.prepare()
        return self.attend(planned)
