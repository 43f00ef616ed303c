"""Planning: the only place that makes a `PlannedBatch`, and the only place that decides whether one may run.

    Batch ──plan──▶ PlannedBatch ──ensure──▶ PlannedBatch (proven current) ──launch──▶ forward
                         ▲                        │
                         └── re-planned if only derived state changed; raises if the batch itself is stale

Both `plan` and `ensure` check the batch against the cache: a row's context must be what was launched before.

Knows groups, backends and page tables. Does not know models or schedules.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import add
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from sightline.attention.bindings import GroupBinding, check_part, divide, mask_features, part_of, policy_of
from sightline.attention.buffers import PlanMemory
from sightline.attention.certificate import Certificate, PartRecord, Staleness, StepContents, described_rows
from sightline.attention.contents import check_contents, planned_contents
from sightline.attention.contract import (
    AttentionInputs,
    AttentionPlan,
    CachePolicy,
    ChoiceInputs,
    Lse,
    StepLimits,
    StepView,
)
from sightline.attention.fingerprint import changed_parts, fingerprint_tensors
from sightline.attention.groups import LayerGroup
from sightline.attention.kinds import Feature
from sightline.attention.lanes import Depth, LaneGuard
from sightline.attention.places import LayerPlace, last_before, layer_places
from sightline.attention.rollout import REPEAT_ROLLOUT, LeasedSets, Renewal
from sightline.attention.streams import HERE, PlanStream
from sightline.attention.workspace import MAIN_LANE, Lane, Workspace
from sightline.cache.lengths import RowLengths
from sightline.cache.pools import Pool
from sightline.core.batch import Batch
from sightline.core.batch_memory import BatchMemory, StaticMemory
from sightline.core.errors import PlanError, StalePlanError, UnplannedBatchError
from sightline.core.pool_rows import PoolPages

REBUILD_BATCH = "Build a new batch from the current page tables."

_ALIVE = frozenset({Feature.SEVERAL_PLANS})
_SPARSE = frozenset({Feature.SPARSE})


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
    needs: frozenset[Feature]
    """See `StepView.needs`."""
    choice: Tensor | None
    """[max_step_tokens, top_k] int32: where indexers write, if these layers are some."""

    @property
    def is_sparse(self) -> bool:
        """See `StepView.is_sparse`."""
        return Feature.SPARSE in self.needs


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A planned step of every group, with the certificate of what it was made from."""

    certificate: Certificate
    asked: frozenset[Feature]
    """Features requested beyond those that masks need."""
    groups: tuple[GroupPlan, ...]
    """Always all of them."""
    places: Mapping[int, LayerPlace]
    """By model layer: those that are in a group."""
    indexers: Mapping[int, LayerPlace]
    """By model layer: the last indexer at or before it, if there is one."""
    renewal: Renewal


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """A batch with a plan. Only `Planner` makes one, and `Planner.ensure` proves that the plan belongs to the batch."""

    batch: Batch
    plan: StepPlan

    @contextmanager
    def in_stream_order(self) -> Iterator[None]:
        """Runs a step behind its planning, which may be on another stream, and before the next plan that fills the
        same buffers."""
        mark = self.plan.certificate.buffers.mark
        mark.wait()
        mark.keep(self.batch)
        try:
            yield
        finally:
            mark.record()

    def prepare(self) -> None:
        """Runs the device work that all layers share; called once per step."""
        for group in self.plan.groups:
            for part in group.parts:
                part.plan.prepare()

    def attend(self, layer: int, inputs: AttentionInputs, out: Tensor) -> Lse | None:
        """Runs one model layer's attention, cache write included."""
        return self._run(self.plan.places[layer], inputs, out)

    def choose(self, layer: int, inputs: ChoiceInputs) -> Tensor | None:
        """Runs one model layer's indexer, which keeps its keys.

        Returns what it chose, [num_tokens, top_k] int32, which is valid until an indexer of the same group chooses
        again; None if the step is not sparse.
        """
        place = self.plan.indexers[layer]
        self._run(place, inputs, self._choice(place))
        return self.chosen(layer)

    def chosen(self, layer: int) -> Tensor | None:
        """Returns the choice of the last indexer at or before a model layer; None if the step is not sparse.

        Layers run in order, so this is what the indexer wrote last to the room that the plan leased.
        """
        place = self.plan.indexers[layer]
        return self._choice(place) if self.plan.groups[place.group].is_sparse else None

    def _choice(self, place: LayerPlace) -> Tensor:
        choice = self.plan.groups[place.group].choice
        assert choice is not None, "a group of indexers has room for what they choose"
        return choice[: self.batch.num_tokens]

    def _run(self, place: LayerPlace, inputs: AttentionInputs, out: Tensor) -> Lse | None:
        parts = self.plan.groups[place.group].parts
        if len(parts) == 1:
            return parts[0].plan.run(place.layer, inputs, out)
        found = [part.plan.run(place.layer, inputs.part(part.tokens), out[part.tokens]) for part in parts]
        return torch.cat([lse for lse in found if lse is not None]) if Feature.LSE in self.plan.asked else None


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
        side: PlanStream = HERE,
        paranoid: bool = False,
        joins_lanes: bool = False,
    ) -> None:
        """`lengths` must belong to the store of the bindings' caches; `workspace` holds `name`'s plan buffers; `side`
        is where `plan_aside` plans. With `joins_lanes`, steps of all lanes end before the next one of any begins."""
        self._joins_lanes = joins_lanes
        self.lanes = LaneGuard()
        """Guards the lanes: everything that plans or runs in a lane goes through here."""
        self._lengths = lengths
        self._issued: WeakSet[StepPlan] = WeakSet()
        self._bindings = tuple(bindings)
        self._limits = limits
        self._paranoid = paranoid
        self._pools: dict[str, Pool] = {pool.key: pool for binding in bindings for pool in binding.cache.pools.values()}
        self._sources: dict[str, PoolPages] = dict(self._pools)
        if lengths.states is not None and any(binding.cache.states.is_used for binding in bindings):
            self._sources[lengths.states.key] = lengths.states
        self._has_hot_entries = any(binding.cache.is_on_host for binding in bindings)
        self._workspace = workspace
        self._name = name
        self.side = side
        self._memory = {lane: self._make_memory("plan buffers", lane) for lane in limits.lanes}
        self._sets = {
            lane: LeasedSets(
                [self._make_memory(f"plan buffers of rollout step {step}", lane) for step in range(limits.max_rollout)]
            )
            for lane in limits.lanes
        }
        self._static: dict[BatchMemory, PlanMemory] = {}
        """The plan buffers of batches at fixed addresses, which are at fixed addresses too."""
        self._places = layer_places(bindings, chooses=False)
        self._indexers = last_before(layer_places(bindings, chooses=True), self._places)
        self._choices = {
            (binding.group.name, lane): workspace.lease(
                name, f"choice of {binding.group.name}", lane, (limits.max_step_tokens, top_k), torch.int32
            )
            for binding in bindings
            for lane in limits.lanes
            if binding.group.chooses and (top_k := binding.group.spec.top_k) is not None
        }
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

    def plan_aside(
        self, batch: Batch, *, needs: frozenset[Feature] = frozenset(), lane: Lane = MAIN_LANE
    ) -> PlannedBatch:
        """Plans like `plan`, on the side stream, while steps run. Make the batch inside `side.enter()`.

        Backends must be able to keep several plans.
        """
        return self.lanes.run(lane, Depth.PLANNER, self._plan, batch, needs | _ALIVE, lane, self.side)

    def rollout(
        self, batches: Sequence[Batch], *, needs: frozenset[Feature] = frozenset(), lane: Lane = MAIN_LANE
    ) -> tuple[PlannedBatch, ...]:
        """Plans steps that follow each other, all of them before the first one runs.

        The plans are valid until the lane's next rollout or `release`, and are refused, never made again, if anything
        changed. Raises what `plan` does.
        """
        return self.lanes.run(lane, Depth.PLANNER, self._rollout, batches, needs | _ALIVE, lane)

    def release(self, lane: Lane = MAIN_LANE) -> None:
        """Ends the lane's rollout: its plans become stale."""
        self.lanes.run(lane, Depth.PLANNER, self._sets[lane].release)

    def _rollout(self, batches: Sequence[Batch], needs: frozenset[Feature], lane: Lane) -> tuple[PlannedBatch, ...]:
        for batch in batches:
            self._check_current(batch, lane)
        self._lengths.check_in_turn(batches, lane)
        sets = self._sets[lane].lease([self._static.get(batch.memory) for batch in batches])
        return tuple(
            self._make(batch, needs, lane, memory, HERE, Renewal.REFUSE)
            for batch, memory in zip(batches, sets, strict=True)
        )

    def _plan(self, batch: Batch, needs: frozenset[Feature], lane: Lane, stream: PlanStream = HERE) -> PlannedBatch:
        self._check_current(batch, lane)
        self._lengths.check(batch, self._order(lane))
        return self._make(batch, needs, lane, self._buffers(batch, lane), stream, Renewal.PLAN_AGAIN)

    def _check_current(self, batch: Batch, lane: Lane) -> None:
        """Raises if the batch is stale, or is no step that can be planned."""
        changes = self._batch_changes(batch, _versions(batch))
        if changes:
            raise StalePlanError(changes, REBUILD_BATCH)
        self._check_step(batch, lane)

    def _make(
        self,
        batch: Batch,
        needs: frozenset[Feature],
        lane: Lane,
        memory: PlanMemory,
        stream: PlanStream,
        renewal: Renewal,
    ) -> PlannedBatch:
        """Plans a batch that was checked, into `memory`."""
        started = time.perf_counter()
        if self._paranoid:
            check_contents(batch, self._pools)
        steps = self._views(batch, needs, lane)
        with stream.enter():
            memory.mark.wait()
            plans, records = self._plan_groups(steps, needs, memory)
            if memory.has_overflowed:
                # Plan again in the grown block: a graph must capture the addresses that the next plan will use.
                plans, records = self._plan_groups(steps, needs, memory)
            memory.mark.record()
        memory.require_pinned()
        certificate = Certificate(
            batch_id=batch.batch_id,
            num_rows=batch.num_rows,
            num_tokens=batch.num_tokens,
            lane=lane,
            buffers=memory,
            epoch=memory.epoch,
            page_versions=_versions(batch),
            parts=records,
            contents=self._contents(batch, memory) if self._paranoid else None,
        )
        plan = StepPlan(certificate, needs, plans, self._places, self._indexers, renewal)
        self._issued.add(plan)
        self.num_plans += 1
        self.plan_seconds += time.perf_counter() - started
        return PlannedBatch(batch, plan)

    def _views(self, batch: Batch, asked: frozenset[Feature], lane: Lane) -> tuple[StepView, ...]:
        """The step as each group's backends see it."""
        needs, groups = asked | mask_features(batch), [binding.group for binding in self._bindings]
        return tuple(
            [
                StepView(batch, policy_of(group, batch), lane, needs | group.needs | self._sparsity(group, batch))
                for group in groups
            ]
        )

    def _sparsity(self, group: LayerGroup, batch: Batch) -> frozenset[Feature]:
        """Decides whether a step is sparse: some query may see more entries than it reads. A captured step is sparse if
        any step could be: its launches must not depend on contexts. With entries in host memory, so is every step that
        reads a context, all of which a dense one would read from the host, and every step of entries of several tokens.
        """
        top_k, ratio, is_static = group.spec.top_k, group.spec.tokens_per_entry, batch.memory in self._static
        if top_k is None:
            return frozenset()
        if self._has_hot_entries and (is_static or ratio > 1 or max(batch.context_lens.bound, default=0) > 0):
            return _SPARSE
        if is_static:
            return _SPARSE if self._limits.max_seq_len // ratio > top_k else frozenset()
        longest = max(map(add, batch.context_lens.bound, batch.query_lens.bound), default=0)
        return _SPARSE if longest // ratio > top_k else frozenset()

    def _plan_groups(
        self, steps: Sequence[StepView], asked: frozenset[Feature], memory: PlanMemory
    ) -> tuple[tuple[GroupPlan, ...], tuple[PartRecord, ...]]:
        """The plan of every group, and what each part was planned with. `asked` excludes what masks need."""
        memory.begin()
        records: list[PartRecord] = []
        plans = [
            GroupPlan(
                step.policy,
                self._plan_group(group, step, asked, memory, records),
                step.needs,
                self._choices.get((self._bindings[group].group.name, step.lane)),
            )
            for group, step in enumerate(steps)
        ]
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
            always = asked | binding.group.needs | (step.needs & _SPARSE)
            part = step if whole else part_of(step, rows, tokens, always)
            check_part(serving, part, binding.group.name)
            plans.append(PartPlan(backend.plan(part, buffers), tokens))
            records.append(PartRecord(group, place, backend))
        return tuple(plans)

    def buffer_addresses(self, lane: Lane) -> Mapping[str, int]:
        """Addresses of the plan buffers of every backend of every group in the lane's last plan."""
        return self._memory[lane].addresses()

    def reserve(self, memory: StaticMemory) -> None:
        """Gives batches in this memory plan buffers of their own. Call before the workspace is sealed."""
        self._static[memory] = self._make_memory(f"plan buffers {len(self._static)}: {memory.shape}", MAIN_LANE)

    def _make_memory(self, name: str, lane: Lane) -> PlanMemory:
        lease = self._workspace.elastic(self._name, name, lane)
        return PlanMemory(lease, self.side.make_mark(), poison=self._paranoid)

    def pin(self, planned: PlannedBatch) -> None:
        """Fixes where the plan buffers of batches in this one's memory are: a plan that needs others is refused."""
        if planned.batch.memory not in self._static:
            raise PlanError("expected a batch in reserved memory, got one in memory of its own; run it eagerly")
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
                self._lengths.check(work.batch, self._order(work.plan.certificate.lane))
                if not stale.plan:
                    return work
                if work.plan.renewal is Renewal.REFUSE:
                    raise StalePlanError(stale.plan, REPEAT_ROLLOUT)
                self.num_rebuilt += 1
                return self._plan(work.batch, work.plan.asked, work.plan.certificate.lane)
            case _:
                raise UnplannedBatchError(
                    f"expected a Batch or a PlannedBatch, got {type(work).__name__}; assemble a Batch first"
                )

    def launch(self, planned: PlannedBatch) -> None:
        """Marks the batch as running, so that later steps in its lane may read what it writes.

        Raises `BatchError` if it still waits for tokens that an earlier step chooses.
        """
        planned.batch.late.require_filled()
        self._lengths.launch(planned.batch, self._order(planned.plan.certificate.lane))

    def _order(self, lane: Lane) -> Lane:
        """The lane in whose order a lane's steps are."""
        return MAIN_LANE if self._joins_lanes else lane

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
        if batch.pools and batch.pools.keys() != self._sources.keys():
            return (f"the batch speaks of pools {sorted(batch.pools)}, the planner has {sorted(self._sources)}",)
        changes = []
        for key, rows in batch.pools.items():
            table = self._sources[key]
            if rows.table_id != table.table_id:
                changes.append(f"pool {key} is page table {table.table_id}, the batch was made from {rows.table_id}")
            elif (current := table.versions(batch.rows)) != versions[key]:
                changes.append(described_rows(key, batch.rows, versions[key], current))
        return tuple(changes)

    def _staleness(self, planned: PlannedBatch) -> Staleness:
        batch, certificate = planned.batch, planned.plan.certificate
        same_batch = certificate.batch_id == batch.batch_id
        versions = certificate.page_versions if same_batch else _versions(batch)
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
        if certificate.buffers.epoch != certificate.epoch:
            changes.append(f"the plan buffers of lane {certificate.lane} were filled again")
        if changes or certificate.contents is None:
            return Staleness((), tuple(changes))
        before, after = certificate.contents, self._contents(batch, certificate.buffers)
        of_batch, of_plan = changed_parts(before.batch, after.batch), changed_parts(before.plan, after.plan)
        return Staleness(
            tuple(f"contents of batch {name} changed in place" for name in of_batch),
            tuple(f"contents of plan buffer {name} changed in place" for name in of_plan),
        )

    def _contents(self, batch: Batch, memory: PlanMemory) -> StepContents:
        of_batch = fingerprint_tensors(planned_contents(batch, self._pools))
        return StepContents(of_batch, fingerprint_tensors(memory.contents()))


def _versions(batch: Batch) -> dict[str, tuple[int, ...]]:
    """Per pool key: the versions of the page-table rows that the batch was made from."""
    return {key: rows.versions for key, rows in batch.pools.items()}
