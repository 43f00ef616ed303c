"""Attention steps over shuffled, NaN-poisoned pages, with the answer that the oracle gives for dense copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sightline.attention.backends.registry import CANDIDATES
from sightline.attention.contract import BackendContext, Limits, SoftmaxInputs
from sightline.attention.planner import GroupBinding, Planner
from sightline.attention.reference import attend_row, visible_keys
from sightline.attention.spec import Feature, LayerGroup, SoftmaxSpec, group_layers
from sightline.attention.workspace import MAIN_LANE, Lane, Workspace
from sightline.cache.pools import CacheLimits, CacheStore, Pool
from sightline.core.batch import CAUSAL, Batch, RowMask
from sightline.runner.batching import RowWork, assemble, assemble_transient

CPU = torch.device("cpu")
BACKENDS = {candidate.name: candidate.backend for candidate in CANDIDATES}


@dataclass(frozen=True)
class Row:
    """One row to attend."""

    context_len: int
    query_len: int
    mask: RowMask = CAUSAL
    positions: tuple[int, ...] | None = None


def shuffle_free_pages(store: CacheStore, seed: int) -> None:
    """Makes every pool hand out its pages in random order."""
    order = random.Random(seed)
    for pool in store.pools:
        pages = list(pool.allocator.allocate(pool.allocator.num_free))
        order.shuffle(pages)
        pool.allocator.release(pages)


def poison(store: CacheStore) -> None:
    """Fills every slot of every pool with NaN."""
    for pool in store.pools:
        for plane in pool.spec.planes:
            pool.plane(plane.name).fill_(torch.nan)


@dataclass
class Bench:
    """A planner over one or more groups, on shuffled and poisoned pools."""

    specs: Sequence[SoftmaxSpec]
    backend: str = "torch"
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    max_seq_len: int = 512
    max_rows: int = 16
    max_step_tokens: int = 512
    lanes: tuple[Lane, ...] = (MAIN_LANE,)
    paranoid: bool = False
    shuffled: bool = True
    """Pages are handed out in random order, and to rows in turns; else each row's lie side by side."""
    groups: tuple[LayerGroup, ...] = field(init=False)
    store: CacheStore = field(init=False)
    planner: Planner = field(init=False)

    def __post_init__(self) -> None:
        self.groups = group_layers(self.specs)
        pages = self.max_rows * -(-self.max_seq_len // self.page_size) + 1
        self.store = CacheStore(
            [group.cache_spec(self.dtype) for group in self.groups],
            CacheLimits(pages, self.page_size, self.max_rows, self.max_seq_len),
            CPU,
        )
        poison(self.store)
        if self.shuffled:
            shuffle_free_pages(self.store, seed=7)
        self.planner = self.make_planner()

    def make_planner(self) -> Planner:
        """A planner with backends of its own over the same pools."""
        limits = Limits(self.max_rows, self.max_step_tokens, self.max_seq_len, self.lanes)
        workspace = Workspace(CPU, 1 << 32)
        bindings = [
            GroupBinding(
                group,
                cache,
                BACKENDS[self.backend](
                    BackendContext(group.name, group.spec, cache, workspace, limits, self.dtype, CPU)
                ),
                next(row for row in BACKENDS[self.backend].capabilities if self.dtype in row.dtypes),
            )
            for group, cache in zip(self.groups, self.store.groups, strict=True)
        ]
        return Planner(bindings, limits, CPU, paranoid=self.paranoid)

    def open_rows(self, rows: Sequence[Row]) -> list[int]:
        """Page-table rows with pages for each row, grown in turns so that shuffled pages interleave too."""
        table_rows = [self.store.open_row() for _ in rows]
        longest = max((row.context_len + row.query_len for row in rows), default=0)
        step = self.page_size if self.shuffled else longest
        for length in range(step, longest + step, step):
            for table_row, row in zip(table_rows, rows, strict=True):
                self.store.grow_row(table_row, min(length, row.context_len + row.query_len))
        return table_rows

    def batch(self, rows: Sequence[Row], table_rows: Sequence[int]) -> Batch:
        return assemble(_work(rows, table_rows), self.store)


def _work(rows: Sequence[Row], table_rows: Sequence[int]) -> list[RowWork]:
    return [
        RowWork(table_row, [1] * row.query_len, row.context_len, True, row.mask, row.positions)
        for row, table_row in zip(rows, table_rows, strict=True)
    ]


def map_inputs(inputs: SoftmaxInputs, change: Callable[[Tensor], Tensor]) -> SoftmaxInputs:
    """The inputs with q, k and v changed alike."""
    return replace(inputs, q=change(inputs.q), k=change(inputs.k), v=change(inputs.v))


def walk_slots(pool: Pool, table_row: int, length: int) -> list[int]:
    """The slots of a row's first entries, by walking its pages."""
    pages = pool.table.owned(table_row)
    return [pages[entry // pool.page_size] * pool.page_size + entry % pool.page_size for entry in range(length)]


@dataclass
class Step:
    """One layer's step with random tensors, and the oracle's answer."""

    bench: Bench
    rows: Sequence[Row]
    seed: int = 0
    layer: int = 0
    transient: bool = False
    contexts: list[tuple[Tensor, Tensor]] = field(init=False)
    inputs: SoftmaxInputs = field(init=False)
    batch: Batch = field(init=False)
    table_rows: list[int] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        spec, dtype = self.spec, self.bench.dtype

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        tokens = sum(row.query_len for row in self.rows)
        self.inputs = SoftmaxInputs(
            q=normal(tokens, spec.num_q_heads, spec.head_dim) * 2,
            k=normal(tokens, spec.num_kv_heads, spec.head_dim),
            v=normal(tokens, spec.num_kv_heads, spec.head_dim),
            sinks=normal(spec.num_q_heads) if spec.sinks else None,
        )
        entry = (spec.num_kv_heads, spec.head_dim)
        self.contexts = [(normal(row.context_len, *entry), normal(row.context_len, *entry)) for row in self.rows]
        if self.transient:
            self.table_rows = [0] * len(self.rows)
            self.batch = assemble_transient(_work(self.rows, self.table_rows), CPU)
            return
        self.table_rows = self.bench.open_rows(self.rows)
        self.batch = self.bench.batch(self.rows, self.table_rows)
        self.write_contexts()

    @property
    def spec(self) -> SoftmaxSpec:
        return self.bench.specs[self.layer]

    @property
    def pool(self) -> Pool:
        group = next(index for index, group in enumerate(self.bench.groups) if self.layer in group.layers)
        return self.bench.store.groups[group].pools["kv"]

    @property
    def layer_in_group(self) -> int:
        return next(group.layers.index(self.layer) for group in self.bench.groups if self.layer in group.layers)

    def write_contexts(self) -> None:
        """Puts each row's context where an earlier step would have."""
        for table_row, (keys, values) in zip(self.table_rows, self.contexts, strict=True):
            slots = walk_slots(self.pool, table_row, keys.shape[0])
            self.pool.plane("k")[self.layer_in_group][slots] = keys
            self.pool.plane("v")[self.layer_in_group][slots] = values

    def expected(self) -> tuple[Tensor, Tensor]:
        """Output and LSE from dense tensors, row by row; nothing paged is touched."""
        outs, lses, start = [], [], 0
        for row, (keys, values) in zip(self.rows, self.contexts, strict=True):
            tokens = slice(start, start + row.query_len)
            start += row.query_len
            visible = visible_keys(self.spec, row.mask, row.context_len, self.batch.positions[tokens])
            out, lse = attend_row(
                self.spec,
                self.inputs.q[tokens],
                torch.cat([keys, self.inputs.k[tokens]]),
                torch.cat([values, self.inputs.v[tokens]]),
                visible,
                self.inputs.sinks,
            )
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    def run(self, needs: frozenset[Feature] = frozenset(), lane: Lane = MAIN_LANE) -> tuple[Tensor, Tensor | None]:
        """Plans and runs the step's own layer."""
        planned = self.bench.planner.plan(self.batch, needs=needs, lane=lane)
        planned.prepare()
        out = torch.full_like(self.inputs.q, torch.nan)
        return out, planned.attend(self.layer, self.inputs, out)
