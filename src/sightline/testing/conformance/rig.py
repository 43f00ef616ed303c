"""A planner over pools that are laid out to expose faults: pages out of order, and unused slots full of garbage.

Builds what a runtime builds, for one backend and without a model. Does not know what is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from sightline.attention.bindings import GroupBinding
from sightline.attention.capability import Capability
from sightline.attention.compressed.spec import CompressedIndexSpec, CompressedSpec, Compression
from sightline.attention.contract import AttentionBackend, BackendContext, EntryCoordinator, StepLimits
from sightline.attention.groups import LayerGroup, Lenders, group_layers
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.oracle.attention import stored_entries
from sightline.attention.planner import Planner
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.sparse.hot_entries import HotEntries
from sightline.attention.spec import AttentionSpec, IndexingSpec, IndexSpec, LatentSpec
from sightline.attention.workspace import MAIN_LANE, Lane, Workspace
from sightline.cache.layout import Layout, arrange_free_pages
from sightline.cache.pools import CacheLimits, GroupCache, Pool
from sightline.cache.spec import SCALED_DTYPES, ScalesByPlane
from sightline.cache.states import StatePool, StateTable
from sightline.cache.store import CacheStore
from sightline.core.batch import CAUSAL, CONTEXT, PADDING_SLOT, Batch, MaskKind, RowMask, RowWork
from sightline.core.device import Device
from sightline.core.errors import ConfigError
from sightline.kernels.cpu.program import inline_launcher
from sightline.runner.batching import assemble
from sightline.runner.coordinators import copies_for
from sightline.testing.conformance.problem import Problem
from sightline.testing.conformance.problems import PROBLEMS


@dataclass(frozen=True)
class Subject:
    """The subject of a trial: one capability row of one backend, for one kind of attention, on one device."""

    name: str
    backend: type[AttentionBackend[Any, Any]]
    capability: Capability
    device: Device
    planner: type[Planner] = Planner
    named_kind: SpecKind | None = None
    """One of the row's kinds of attention; None if it has only one."""

    @property
    def kind(self) -> SpecKind:
        kinds = self.capability.spec_kinds if self.named_kind is None else {self.named_kind}
        if len(kinds) != 1:
            names = ", ".join(sorted(kind.value for kind in kinds)) or "none"
            raise ConfigError(f"expected one kind of attention to try, got {names}; name one of the row's")
        return next(iter(kinds))

    @property
    def problem(self) -> Problem[Any, Any]:
        return PROBLEMS[self.kind]

    @property
    def features(self) -> frozenset[Feature]:
        """Features that the row declares and the kind of attention has."""
        return self.capability.features & self.problem.features


@dataclass(frozen=True)
class Row:
    """One row of a step."""

    context_len: int
    query_len: int
    mask: RowMask = CAUSAL
    positions: tuple[int, ...] | None = None
    """Positions of the new tokens; None if they follow the context one by one."""
    checkpoints: tuple[int, ...] = ()
    """New tokens, by number, behind which a state is kept for others. Entries are kept in any case."""
    candidates: int = 1
    """How many of the last new tokens keep the state behind them: more than 1 if they are guesses."""

    @property
    def seq_len(self) -> int:
        return self.context_len + self.query_len

    @property
    def num_entries(self) -> int:
        """The cache entries of the row after the step. Tokens that see the context alone have none."""
        return self.context_len if self.mask is CONTEXT else self.seq_len


def tree_row(context_len: int, parents: Sequence[int]) -> Row:
    """Returns a row whose new tokens form a tree: each sees its ancestors, and its position is its depth.

    `parents` has the index of each token's parent, or -1 for a token that follows the context.
    """
    count = len(parents)
    tree, depths = torch.eye(count, dtype=torch.bool), [0] * count
    for child, parent in enumerate(parents):
        if parent >= 0:
            tree[child] |= tree[parent]
            depths[child] = depths[parent] + 1
    return Row(context_len, count, RowMask(MaskKind.TREE, tree), tuple(context_len + depth for depth in depths))


_NOISE_ENTRIES = 61
_FILLED_BYTES = 96 << 20
"""In a larger pool only the pages of rows are filled, with NaN."""
GARBAGE_VALUE = 100.0
"""The magnitude of values in unused slots, far from all others."""


PLAIN_SCALES = (1.0,)
SCALES = (0.5, 0.25, 2.0, 0.125)
"""Scales of the first layer's keys and values, the second layer's keys and values, and so on, repeated. Powers of two:
dividing, and multiplying by the reciprocal, then store the same bits."""

_GIVES_KEYS = ("k", "entry", "key")
"""Planes from which scores come. A key far from all others could have no weight, and reading it would go unnoticed."""


class Unused(Enum):
    """The contents of slots that nobody wrote."""

    GARBAGE = "garbage"
    """Finite numbers, which show if they are read with a weight above 0."""
    NAN = "NaN"
    """NaN, which shows if it is read at all, even with weight 0."""


class Memory(Enum):
    """The contents of leases that did not ask for zeros."""

    ZEROS = "zeros"
    POISON = "poison"


class _ZeroedWorkspace(Workspace):
    """Zeroes every lease, so that a backend that forgot to ask for zeros fails only the check for that."""

    def lease(
        self, owner: str, name: str, lane: Lane, shape: Sequence[int], dtype: torch.dtype, *, zeroed: bool = False
    ) -> Tensor:
        del zeroed
        return super().lease(owner, name, lane, shape, dtype, zeroed=True)


@dataclass(frozen=True)
class RigSetting:
    """Everything about a rig except its backend and specs."""

    page_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    """None for the compute dtype."""
    cache_scales: tuple[float, ...] = SCALES
    """Used in turn if the cache dtype has scales."""
    max_seq_len: int = 512
    max_rows: int = 16
    max_step_tokens: int = 512
    lanes: tuple[Lane, ...] = (MAIN_LANE,)
    max_rollout: int = 4
    paranoid: bool = False
    layout: Layout = Layout.SHUFFLED
    unused: Unused = Unused.NAN
    memory: Memory = Memory.POISON
    num_pages: int | None = None
    """None for enough pages for all rows at their longest."""
    pages_passed_over: int = 0
    """Pages, and state slots, at the beginning that are allocated last if they are in order."""
    states_per_row: int = 12
    """States that a row of a layer with states may hold at once."""
    max_checkpoints: int = 16
    """States that are kept for others beside those."""
    hot_per_choice: int = 0
    """Entries that indexers choose from are in host memory, with so many hot ones of each row per chosen one; 0: all
    entries are on the device."""


class AttentionRig:
    """Pools, backends and a planner for one or more layers."""

    def __init__(
        self,
        subject: Subject,
        specs: Sequence[AttentionSpec],
        setting: RigSetting,
        lenders: Lenders | None = None,
    ) -> None:
        self.subject = subject
        self.problem = subject.problem
        self.specs = tuple(specs)
        self.setting = setting
        self.device = subject.device.torch_device
        self.lenders = lenders or {}
        self.groups = _groups(specs, lenders)
        pages = setting.num_pages or setting.max_rows * -(-setting.max_seq_len // setting.page_size) + 1
        cache_dtype = setting.cache_dtype or setting.dtype
        scales = self._scales() if cache_dtype in SCALED_DTYPES else None
        self.store = CacheStore(
            [
                group.cache_spec(cache_dtype, scales, with_hot_entries=setting.hot_per_choice > 0)
                for group in self.groups
            ],
            CacheLimits(
                pages,
                setting.page_size,
                setting.max_rows,
                setting.max_seq_len,
                setting.states_per_row,
                setting.max_checkpoints,
            ),
            self.device,
        )
        self._is_large = max([pool.num_bytes for pool in self.store.pools], default=0) > _FILLED_BYTES
        if not self._is_large:
            fill_pools(self.store, setting.unused)
        fill_states(self.store, setting.unused)
        arrange_free_pages(self.store, setting.layout, passed_over=setting.pages_passed_over)
        self.workspace = self._make_workspace()
        self.planner = self._make_planner(self.workspace)

    def _scales(self) -> ScalesByPlane:
        """The scales of each plane, by layer. Each layer takes the next two."""
        given = self.setting.cache_scales
        planes = {
            plane.name: place
            for pool in self.specs[0].pools(1, torch.float32)
            for place, plane in enumerate(pool.planes)
        }
        return {
            name: [given[(2 * layer + place) % len(given)] for layer in range(len(self.specs))]
            for name, place in planes.items()
        }

    def another_planner(self) -> Planner:
        """Returns a planner with its own backends over the same pools."""
        return self._make_planner(self._make_workspace())

    def _make_workspace(self) -> Workspace:
        if self.setting.memory is Memory.ZEROS:
            return _ZeroedWorkspace(self.device, 1 << 34)
        return Workspace(self.device, 1 << 34, poison=True)

    def _make_planner(self, workspace: Workspace) -> Planner:
        setting = self.setting
        limits = StepLimits(
            setting.max_rows, setting.max_step_tokens, setting.max_seq_len, setting.lanes, setting.max_rollout
        )
        bindings = [
            GroupBinding.alone(
                group,
                cache := self.store.cache(group.owner),
                self.subject.backend(
                    BackendContext(
                        group.name,
                        group.spec,
                        cache,
                        workspace,
                        limits,
                        setting.dtype,
                        self.device,
                        inline_launcher(),
                        self._coordinator(group, cache, limits),
                    )
                ),
                self.subject.capability,
            )
            for group in self.groups
        ]
        planner = self.subject.planner(bindings, limits, self.store.lengths, workspace, paranoid=setting.paranoid)
        workspace.seal()
        return planner

    def _coordinator(self, group: LayerGroup, cache: GroupCache, limits: StepLimits) -> EntryCoordinator:
        top_k, count = group.spec.top_k, self.setting.hot_per_choice
        if not cache.is_on_host or top_k is None:
            return ResidentEntries(cache)
        return HotEntries(cache, top_k, limits, count * top_k, copies_for(self.subject.device), poison=True)

    def open_rows(self, rows: Sequence[Row], shared_pages: int = 0, owner: int = 0) -> list[int]:
        """Opens page-table rows with pages for each row. If pages are shuffled, rows grow in turn, to interleave them.

        All rows begin with `shared_pages` pages of the row with index `owner`.
        """
        table_rows = [self.store.open_row() for _ in rows]
        if shared_pages:
            self.store.grow_row(table_rows[owner], rows[owner].seq_len)
            self.store.fill_row(table_rows[owner], shared_pages * self.setting.page_size)
            bundles = [self.store.committed_bundle(table_rows[owner], index) for index in range(shared_pages)]
            for table_row in (each for each in table_rows if each != table_rows[owner]):
                self.store.adopt(table_row, bundles)
        self._grow(rows, table_rows)
        if self._is_large:
            self._fill_pages(table_rows)
        return table_rows

    def _fill_pages(self, table_rows: Sequence[int]) -> None:
        """Fills the pages of rows with NaN, in pools that are too large to be filled."""
        for pool in self.store.pools:
            pages = sorted({page for row in table_rows for page in pool.table.owned(row)})
            size = pool.entries_per_page
            slots = torch.tensor([page * size + slot for page in pages for slot in range(size)])
            for plane in pool.spec.planes:
                entries = as_bytes(pool.plane(plane.name))
                nan = torch.full((1, *plane.shape), torch.nan).to(plane.dtype).view(torch.uint8).to(entries.device)
                for layer in entries:
                    layer[slots.to(entries.device)] = nan

    def _grow(self, rows: Sequence[Row], table_rows: Sequence[int]) -> None:
        longest = max((row.num_entries for row in rows), default=0)
        step = self.setting.page_size if self.setting.layout is Layout.SHUFFLED else max(longest, 1)
        growing = list(zip(table_rows, rows, strict=True))
        for length in range(step, longest + step, step):
            for table_row, row in growing:
                self.store.grow_row(table_row, min(length, row.num_entries))
            growing = [(table_row, row) for table_row, row in growing if row.num_entries > length]

    @property
    def state_table(self) -> StateTable:
        """The states of all rows. Only a rig of layers with states has one."""
        table = self.store.main.states
        assert table is not None, "layers with states have a table of them"
        return table

    def batch(self, rows: Sequence[Row], table_rows: Sequence[int]) -> Batch:
        return assemble(row_work(rows, table_rows), self.store)

    def place_of(self, layer: int) -> tuple[Pool, int]:
        """Returns the pool that a layer reads, and the index of its entries there."""
        for group in self.groups:
            if layer in group.layers:
                [pool] = self.store.cache(group.owner).pools.values()
                return pool, group.pool_layers[group.layers.index(layer)]
        raise ValueError(f"expected a layer below {len(self.specs)}, got {layer}")

    def entries_of(self, layer: int) -> Pool | None:
        """Returns the pool of a layer's own entries; None if it has none."""
        [group] = [group for group in self.groups if layer in group.layers]
        return next(iter(self.store.cache(group.name).pools.values()), None)

    def states_of(self, layer: int) -> tuple[StatePool, int]:
        """Returns the states of a layer's group, and the index of the layer there."""
        for group in self.groups:
            if layer in group.layers:
                return self.store.cache(group.name).states, group.layers.index(layer)
        raise ValueError(f"expected a layer below {len(self.specs)}, got {layer}")


def _groups(specs: Sequence[AttentionSpec], lenders: Lenders | None) -> tuple[LayerGroup, ...]:
    """The groups of layers, or of indexers. Choices that layers read are given, and need no indexers."""
    indexers = {layer: spec for layer, spec in enumerate(specs) if isinstance(spec, IndexSpec | CompressedIndexSpec)}
    if indexers:
        return group_layers([None] * len(specs), indexers=indexers)
    assumed: dict[int, IndexingSpec] = {}
    for layer, spec in enumerate(specs):
        match spec:
            case CompressedSpec(top_k=int() as top_k, compression=Compression() as compression):
                assumed[layer] = CompressedIndexSpec(1, spec.head_dim, top_k, compression)
            case LatentSpec(top_k=int() as top_k):
                assumed[layer] = IndexSpec(1, 1, top_k)
    return tuple(group for group in group_layers(specs, lenders=lenders, indexers=assumed) if not group.chooses)


def row_work(rows: Sequence[Row], table_rows: Sequence[int]) -> list[RowWork]:
    """Returns the rows as the runner's batching takes them."""
    return [
        RowWork(
            table_row,
            [1] * row.query_len,
            row.context_len,
            row.query_len > 0,
            row.mask,
            row.positions,
            num_candidates=row.candidates,
        )
        for row, table_row in zip(rows, table_rows, strict=True)
    ]


def fill_pools(store: CacheStore, unused: Unused) -> None:
    """Fills every slot of every pool, the padding page included."""
    generator = torch.Generator().manual_seed(11)
    for pool in store.pools:
        for plane in pool.spec.planes:
            entries = pool.plane(plane.name)
            if unused is Unused.NAN:
                entries.fill_(torch.nan)
                continue
            # A few different entries, repeated, are enough to tell slots apart.
            noise = torch.randn(_NOISE_ENTRIES, *entries.shape[2:], generator=generator)
            noise = noise * 2 if plane.name in _GIVES_KEYS else noise.sign() * GARBAGE_VALUE
            chosen = torch.arange(entries.shape[1], device=entries.device) % _NOISE_ENTRIES
            for layer, scale in enumerate(pool.scales(plane.name)):
                stored = stored_entries(noise, entries.dtype, scale).to(entries.device)
                as_bytes(entries[layer]).copy_(as_bytes(stored).index_select(0, chosen))


def fill_states(store: CacheStore, unused: Unused) -> None:
    """Fills every state slot but slot 0, unless they are so many that filling them would take long."""
    generator = torch.Generator().manual_seed(13)
    for states in [group.states for network in store.networks for group in network.groups]:
        if states.num_bytes > _FILLED_BYTES:
            continue
        for plane in states.spec.planes:
            numbers = states.plane(plane.name)[:, PADDING_SLOT + 1 :]
            if unused is Unused.NAN:
                numbers.fill_(torch.nan)
                continue
            noise = torch.randn(_NOISE_ENTRIES, *plane.shape, generator=generator).sign() * GARBAGE_VALUE
            chosen = torch.arange(numbers.shape[1], device=numbers.device) % _NOISE_ENTRIES
            numbers.copy_(noise.to(numbers.device)[chosen])


def as_bytes(plane: Tensor) -> Tensor:
    """Returns a view of a plane as bytes, so that entries can be moved whatever their dtype."""
    return plane.view(torch.uint8)
