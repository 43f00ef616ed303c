"""Planning: the only place that makes a `PlannedBatch`, and the only place that decides whether one may run.

    Batch ──plan──▶ PlannedBatch ──ensure──▶ PlannedBatch (proven current) ──launch──▶ forward
                         ▲                        │
                         └── re-planned if only derived state changed; raises if the batch itself is stale

Both `plan` and `ensure` check the batch against the cache: a row's context must be what was launched before.

Knows groups, backends and page tables. Does not know models or schedules.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from sightline.attention.bindings import GroupBinding, check_part, divide, mask_features, part_of, policy_of
from sightline.attention.buffers import PlanMemory
from sightline.attention.contents import check_contents
from sightline.attention.contract import (
    AttentionBackend,
    AttentionInputs,
    AttentionPlan,
    CachePolicy,
    Lse,
    StepLimits,
    StepView,
)
from sightline.attention.fingerprint import Fingerprint, changed_parts, fingerprint_tensors
from sightline.attention.lanes import Depth, LaneGuard
from sightline.attention.spec import Feature
from sightline.attention.workspace import MAIN_LANE, Lane, Workspace
from sightline.cache.lengths import RowLengths
from sightline.cache.pools import Pool
from sightline.core.batch import Batch, BatchId
from sightline.core.batch_memory import BatchMemory, StaticMemory
from sightline.core.errors import PlanError, StalePlanError, UnplannedBatchError

REBUILD_BATCH = "Build a new batch from the current page tables."


@dataclass(frozen=True, eq=False)
class PartRecord:
    """What one part of one group was planned with."""

    group: int
    place: int
    """Index among the group's backends."""
    backend: AttentionBackend[Any, Any]
    """The instance that planned."""


class StepContents(NamedTuple):
    """Fingerprints of the contents that must not change between planning and running."""

    batch: Fingerprint
    """Tensors of the batch and its page-table rows: a change needs a new batch."""
    plan: Fingerprint
    """Plan buffers: planning again fixes a change."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """What a plan was made from. Compared at every forward; integers and identities only."""

    batch_id: BatchId
    num_rows: int
    num_tokens: int
    lane: Lane
    epoch: int
    """Epoch of the plan buffers."""
    page_versions: Mapping[str, tuple[int, ...]]
    """Per pool key: the version of each page-table row that the plan reads."""
    parts: tuple[PartRecord, ...]
    """Parts of every group, in order."""
    contents: StepContents | None
    """Fingerprints of the contents; None unless `--paranoid`."""


class LayerPlace(NamedTuple):
    """The position of a model layer."""

    group: int
    layer: int
    """Index in the pools of the group's cache."""


@dataclass(frozen=True, eq=False)
class PartPlan:
    """The rows of a group's plan that one backend serves."""

    plan: AttentionPlan[Any]
    tokens: slice
    """The tokens of these rows, contiguous."""


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """A planned step of one group."""

    policy: CachePolicy
    parts: tuple[PartPlan, ...]
    """One, or two: decode rows, then the others."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A planned step of every group, with the certificate of what it was made from."""

    certificate: Certificate
    asked: frozenset[Feature]
    """Features requested beyond those that masks need."""
    groups: tuple[GroupPlan, ...]
    """Always all of them."""
    places: tuple[LayerPlace, ...]
    """Per model layer."""


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """A batch with a plan. Only `Planner` makes one, and `Planner.ensure` proves that the plan belongs to the batch."""

    batch: Batch
    plan: StepPlan

    def prepare(self) -> None:
        """Runs the device work that all layers share; called once per step."""
        for group in self.plan.groups:
            for part in group.parts:
                part.plan.prepare()

    def attend(self, layer: int, inputs: AttentionInputs, out: Tensor) -> Lse | None:
        """Runs one model layer's attention, cache write included."""
        place = self.plan.places[layer]
        parts = self.plan.groups[place.group].parts
        if len(parts) == 1:
            return parts[0].plan.run(place.layer, inputs, out)
        found = [part.plan.run(place.layer, inputs.part(part.tokens), out[part.tokens]) for part in parts]
        return torch.cat([lse for lse in found if lse is not None]) if Feature.LSE in self.plan.asked else None


class Staleness(NamedTuple):
    """What changed since a plan was made."""

    batch: tuple[str, ...]
    """Changes that a new plan cannot fix: the batch refers to pages that it no longer owns."""
    plan: tuple[str, ...]
    """Changes to derived state, fixed by planning again."""


class Planner:
    """Plans every group of every batch. One thread at a time may plan or run in a lane; a second one is refused."""

    def __init__(
        self,
        bindings: Sequence[GroupBinding],
        limits: StepLimits,
        lengths: RowLengths,
        workspace: Workspace,
        *,
        name: str = "planner",
        paranoid: bool = False,
    ) -> None:
        """`lengths` must belong to the store of the bindings' caches; `workspace` holds `name`'s plan buffers."""
        self.lanes = LaneGuard()
        """Guards the lanes: everything that plans or runs in a lane goes through here."""
        self._lengths = lengths
        self._issued: WeakSet[StepPlan] = WeakSet()
        self._bindings = tuple(bindings)
        self._limits = limits
        self._paranoid = paranoid
        self._pools: dict[str, Pool] = {pool.key: pool for binding in bindings for pool in binding.cache.pools.values()}
        self._workspace = workspace
        self._name = name
        self._memory = {
            lane: PlanMemory(workspace.elastic(name, "plan buffers", lane), poison=paranoid) for lane in limits.lanes
        }
        self._static: dict[BatchMemory, PlanMemory] = {}
        """The plan buffers of batches at fixed addresses, which are at fixed addresses too."""
        places = {
            layer: LayerPlace(group, index)
            for group, binding in enumerate(bindings)
            for layer, index in zip(binding.group.layers, binding.group.pool_layers, strict=True)
        }
        self._places = tuple(places[layer] for layer in range(len(places)))
        self.num_plans = 0
        self.plan_seconds = 0.0
        """Host time of all plans."""
        self.num_rebuilt = 0
        """Plans that `ensure` made again because derived state had changed."""

    def plan(self, batch: Batch, *, needs: frozenset[Feature] = frozenset(), lane: Lane = MAIN_LANE) -> PlannedBatch:
        """Plans every group.

        Raises `StalePlanError` if the batch's pages or tensors changed owner since it was made, `BatchError` if it
        contradicts the cache, and `LaneBusyError` if another thread is in the lane.
        """
        return self.lanes.run(lane, Depth.PLANNER, self._plan, batch, needs, lane)

    def _plan(self, batch: Batch, needs: frozenset[Feature], lane: Lane) -> PlannedBatch:
        started = time.perf_counter()
        versions = {key: rows.versions for key, rows in batch.pools.items()}
        changes = self._batch_changes(batch, versions)
        if changes:
            raise StalePlanError(changes, REBUILD_BATCH)
        self._check_step(batch, lane)
        self._lengths.check(batch, lane)
        if self._paranoid:
            check_contents(batch, self._pools)
        memory = self._buffers(batch, lane)
        plans, records = self._plan_groups(batch, needs, lane, memory)
        if memory.has_overflowed:
            # Plan again in the grown block: a graph must capture the addresses that the next plan will use.
            plans, records = self._plan_groups(batch, needs, lane, memory)
        memory.require_pinned()
        certificate = Certificate(
            batch_id=batch.batch_id,
            num_rows=batch.num_rows,
            num_tokens=batch.num_tokens,
            lane=lane,
            epoch=memory.epoch,
            page_versions=versions,
            parts=records,
            contents=self._contents(batch, lane) if self._paranoid else None,
        )
        plan = StepPlan(certificate, needs, plans, self._places)
        self._issued.add(plan)
        self.num_plans += 1
        self.plan_seconds += time.perf_counter() - started
        return PlannedBatch(batch, plan)

    def _plan_groups(
        self, batch: Batch, asked: frozenset[Feature], lane: Lane, memory: PlanMemory
    ) -> tuple[tuple[GroupPlan, ...], tuple[PartRecord, ...]]:
        """The plan of every group, and what each part was planned with. `asked` excludes what masks need."""
        memory.begin()
        records: list[PartRecord] = []
        needs, plans = asked | mask_features(batch), []
        for group, binding in enumerate(self._bindings):
            step = StepView(batch, policy_of(binding.group, batch), lane, needs | binding.group.needs)
            plans.append(GroupPlan(step.policy, self._plan_group(group, step, asked, memory, records)))
        return tuple(plans), tuple(records)

    def _plan_group(
        self, group: int, step: StepView, asked: frozenset[Feature], memory: PlanMemory, records: list[PartRecord]
    ) -> tuple[PartPlan, ...]:
        """The group's parts; adds what each was planned with to `records`."""
        binding, plans = self._bindings[group], []
        for serving, rows, tokens in divide(step.batch, binding.serving):
            backend = serving.backend
            place = binding.place(backend)
            buffers = memory.part(f"{binding.group.name}[{place}]")
            whole = rows == slice(0, step.batch.num_rows)
            part = step if whole else part_of(step, rows, tokens, asked | binding.group.needs)
            check_part(serving, part, binding.group.name)
            plans.append(PartPlan(backend.plan(part, buffers), tokens))
            records.append(PartRecord(group, place, backend))
        return tuple(plans)

    def buffer_addresses(self, lane: Lane) -> Mapping[str, int]:
        """Addresses of the plan buffers of every backend of every group in the lane's last plan."""
        return self._memory[lane].addresses()

    def reserve(self, memory: StaticMemory) -> None:
        """Gives batches in this memory plan buffers of their own. Call before the workspace is sealed."""
        lease = self._workspace.elastic(self._name, f"plan buffers of {memory.shape}", MAIN_LANE)
        self._static[memory] = PlanMemory(lease, poison=self._paranoid)

    def pin(self, planned: PlannedBatch) -> None:
        """Fixes where the plan buffers of batches in this one's memory are: a plan that needs others is refused."""
        self._static[planned.batch.memory].pin()

    def _buffers(self, batch: Batch, lane: Lane) -> PlanMemory:
        return self._static.get(batch.memory, self._memory[lane])

    def ensure(self, work: Batch | PlannedBatch) -> PlannedBatch:
        """Returns a current plan: plans a `Batch`; verifies a `PlannedBatch`, and plans it again if needed.

        Raises `LaneBusyError` if another thread is in the lane.
        """
        lane = work.plan.certificate.lane if isinstance(work, PlannedBatch) else MAIN_LANE
        return self.lanes.run(lane, Depth.PLANNER, self._ensure, work)

    def _ensure(self, work: Batch | PlannedBatch) -> PlannedBatch:
        match work:
            case Batch():
                return self._plan(work, frozenset(), MAIN_LANE)
            case PlannedBatch():
                stale = self._staleness(work)
                if stale.batch:
                    raise StalePlanError(stale.batch, REBUILD_BATCH)
                self._check_step(work.batch, work.plan.certificate.lane)
                self._lengths.check(work.batch, work.plan.certificate.lane)
                if not stale.plan:
                    return work
                self.num_rebuilt += 1
                return self._plan(work.batch, work.plan.asked, work.plan.certificate.lane)
            case _:
                raise UnplannedBatchError(
                    f"expected a Batch or a PlannedBatch, got {type(work).__name__}; assemble a Batch first"
                )

    def launch(self, planned: PlannedBatch) -> None:
        """Marks the batch as running, so that later steps in its lane may read what it writes."""
        self._lengths.launch(planned.batch, planned.plan.certificate.lane)

    def take_back(self, planned: PlannedBatch) -> None:
        """Discards the entries of a launched step that failed or whose result nobody will read."""
        self._lengths.take_back(planned.batch)

    def _check_step(self, batch: Batch, lane: Lane) -> None:
        """Rejects unsupported steps before planning any part of them."""
        if lane not in self._memory:
            raise PlanError(f"expected a lane out of {sorted(self._memory)}, got {lane}")
        if batch.num_rows > self._limits.max_rows or batch.num_tokens > self._limits.max_step_tokens:
            raise PlanError(
                f"expected at most {self._limits.max_rows} rows and {self._limits.max_step_tokens} tokens in a "
                f"step, got {batch.num_rows} and {batch.num_tokens}"
            )

    def _batch_changes(self, batch: Batch, versions: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
        """Why the batch itself cannot run: its pools are not ours, or its tensors or pages changed owner."""
        if batch.is_overwritten:
            return (f"the tensors of batch {batch.batch_id} were overwritten by a batch in the same memory",)
        if batch.pools and batch.pools.keys() != self._pools.keys():
            return (f"the batch speaks of pools {sorted(batch.pools)}, the planner has {sorted(self._pools)}",)
        changes = []
        for key, rows in batch.pools.items():
            table = self._pools[key].table
            if rows.table_id != table.table_id:
                changes.append(f"pool {key} is page table {table.table_id}, the batch was made from {rows.table_id}")
            elif (current := table.versions(batch.rows)) != versions[key]:
                changes.append(_describe_rows(key, batch.rows, versions[key], current))
        return tuple(changes)

    def _staleness(self, planned: PlannedBatch) -> Staleness:
        batch, certificate = planned.batch, planned.plan.certificate
        same_batch = certificate.batch_id == batch.batch_id
        versions = (
            certificate.page_versions if same_batch else {key: rows.versions for key, rows in batch.pools.items()}
        )
        batch_changes = self._batch_changes(batch, versions)
        if batch_changes:
            return Staleness(batch_changes, ())
        if planned.plan not in self._issued:
            return Staleness((), ("the plan was not made by this planner",))
        if not same_batch:
            return Staleness((), (f"the plan is batch {certificate.batch_id}'s, the batch is {batch.batch_id}",))
        changes = []
        for record in certificate.parts:
            binding = self._bindings[record.group]
            if binding.parts[record.place].backend is not record.backend:
                changes.append(f"the backend of {binding.group.name} was replaced")
        if self._buffers(batch, certificate.lane).epoch != certificate.epoch:
            changes.append(f"the plan buffers of lane {certificate.lane} were filled again")
        if changes or certificate.contents is None:
            return Staleness((), tuple(changes))
        before, after = certificate.contents, self._contents(batch, certificate.lane)
        of_batch, of_plan = changed_parts(before.batch, after.batch), changed_parts(before.plan, after.plan)
        return Staleness(
            tuple(f"contents of batch {name} changed in place" for name in of_batch),
            tuple(f"contents of plan buffer {name} changed in place" for name in of_plan),
        )

    def _contents(self, batch: Batch, lane: Lane) -> StepContents:
        tensors = {
            "query_lens": batch.query_lens.device,
            "context_lens": batch.context_lens.device,
            "positions": batch.positions,
            "tokens": batch.tokens,
            "logit_indices": batch.logit_indices,
            "table rows": batch.table_rows,
        }
        for row, mask in enumerate(batch.masks):
            if mask.tree is not None:
                tensors[f"tree of row {row}"] = mask.tree
        for key, rows in batch.pools.items():
            tensors[f"write_slots of {key}"] = rows.write_slots
            tensors[f"page-table rows of {key}"] = _pages_of(batch, self._pools[key])
        return StepContents(fingerprint_tensors(tensors), fingerprint_tensors(self._buffers(batch, lane).contents()))


def _pages_of(batch: Batch, pool: Pool) -> Tensor:
    """The pages that the batch's rows read and write, row after row."""
    lengths = zip(batch.context_lens.bound, batch.query_lens.bound, strict=True)
    counts = [min(-(-sum(each) // pool.page_size), pool.table.max_pages) for each in lengths]
    pages = [pool.table.pages[row, :count] for row, count in zip(batch.rows, counts, strict=True)]
    return torch.cat(pages) if pages else pool.table.pages[0, :0]


def _describe_rows(key: str, rows: Sequence[int], expected: Sequence[int], current: Sequence[int]) -> str:
    moved = [
        f"row {row} was version {was}, is {now}"
        for row, was, now in zip(rows, expected, current, strict=True)
        if was != now
    ]
    return f"page table of pool {key} changed: {', '.join(moved)}"
