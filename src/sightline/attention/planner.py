"""Planning: the only place that makes a `PlannedBatch`, and the only place that decides whether one may run.

    Batch ──plan──▶ PlannedBatch ──ensure──▶ PlannedBatch (proven current) ──▶ forward
                         ▲                        │
                         └── re-planned where only derived state moved; raised where the batch itself is stale

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

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability, HostLengths
from sightline.attention.contract import (
    AttentionBackend,
    AttentionInputs,
    AttentionPlan,
    CachePolicy,
    Limits,
    Lse,
    StepView,
)
from sightline.attention.fingerprint import Fingerprint, changed_parts, fingerprint_tensors
from sightline.attention.spec import Feature, LayerGroup
from sightline.attention.workspace import MAIN_LANE, Lane
from sightline.cache.pools import GroupCache, Pool
from sightline.core.batch import Batch, BatchId, MaskKind
from sightline.core.errors import PlanError, StalePlanError, UnplannedBatchError

REBUILD_BATCH = "Build a new batch from the current page tables."

_MASK_FEATURES = {MaskKind.FULL: Feature.NON_CAUSAL, MaskKind.TREE: Feature.TREE_MASK}


@dataclass(frozen=True)
class GroupBinding:
    """A layer group with the cache and the backend that serve it."""

    group: LayerGroup
    cache: GroupCache
    backend: AttentionBackend[Any, Any]
    capability: Capability
    """The row by which the backend was chosen."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """What a plan was made from; compared at every forward, integers and identities only."""

    batch_id: BatchId
    num_rows: int
    num_tokens: int
    lane: Lane
    page_versions: Mapping[str, tuple[int, ...]]
    """By pool key: the version of each page-table row that the plan reads."""
    buffer_epochs: tuple[Mapping[str, int], ...]
    """By group: the epoch of each plan buffer that the plan filled."""
    backends: tuple[AttentionBackend[Any, Any], ...]
    """By group: the instances that planned."""
    fingerprint: Fingerprint | None
    """Of the contents, under `--paranoid`."""


class LayerPlace(NamedTuple):
    """Where a model layer stands."""

    group: int
    layer: int
    """Within the group."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step of every group, decided, with the certificate of what it was made from."""

    certificate: Certificate
    policy: CachePolicy
    needs: frozenset[Feature]
    groups: tuple[AttentionPlan[Any], ...]
    """Every group is planned, always."""
    places: tuple[LayerPlace, ...]
    """By model layer."""


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """A batch with a plan. Only `Planner` makes one, and `Planner.ensure` proves that the plan is the batch's own."""

    batch: Batch
    plan: StepPlan

    def prepare(self) -> None:
        """Device work that all layers share; once a step."""
        for group in self.plan.groups:
            group.prepare()

    def attend(self, layer: int, inputs: AttentionInputs, out: Tensor) -> Lse | None:
        """Runs one model layer's attention, cache write included."""
        place = self.plan.places[layer]
        return self.plan.groups[place.group].run(place.layer, inputs, out)


class Staleness(NamedTuple):
    """What changed since a plan was made."""

    batch: tuple[str, ...]
    """Changes that no new plan can mend: the batch speaks of pages that are not its own."""
    plan: tuple[str, ...]
    """Changes to what the plan derived: planning again mends them."""


class Planner:
    """Plans every group of every batch."""

    def __init__(
        self,
        bindings: Sequence[GroupBinding],
        limits: Limits,
        device: torch.device,
        *,
        paranoid: bool = False,
    ) -> None:
        self._issued: WeakSet[StepPlan] = WeakSet()
        self._bindings = tuple(bindings)
        self._limits = limits
        self._paranoid = paranoid
        self._pools: dict[str, Pool] = {pool.key: pool for binding in bindings for pool in binding.cache.pools.values()}
        self._buffers = {lane: tuple(PlanBuffers(device, poison=paranoid) for _ in bindings) for lane in limits.lanes}
        places = {
            layer: LayerPlace(group, index)
            for group, binding in enumerate(bindings)
            for index, layer in enumerate(binding.group.layers)
        }
        self._places = tuple(places[layer] for layer in range(len(places)))
        self.num_plans = 0
        self.plan_seconds = 0.0
        """On the host, for all plans."""
        self.num_rebuilt = 0
        """Plans that `ensure` made again because derived state had moved."""

    def plan(self, batch: Batch, *, needs: frozenset[Feature] = frozenset(), lane: Lane = MAIN_LANE) -> PlannedBatch:
        """Plans every group. Raises `StalePlanError` where the batch's pages changed owner since it was made."""
        started = time.perf_counter()
        versions = {key: rows.versions for key, rows in batch.pools.items()}
        changes = self._batch_changes(batch, versions)
        if changes:
            raise StalePlanError(changes, REBUILD_BATCH)
        needs = needs | {_MASK_FEATURES[mask.kind] for mask in batch.masks if mask.kind in _MASK_FEATURES}
        self._check_step(batch, needs, lane)
        policy = CachePolicy.PAGED if batch.pools else CachePolicy.TRANSIENT
        step = StepView(batch, policy, lane, needs)
        plans, epochs = [], []
        for binding, buffers in zip(self._bindings, self._buffers[lane], strict=True):
            buffers.begin()
            plans.append(binding.backend.plan(step, buffers))
            epochs.append(buffers.stamp())
        certificate = Certificate(
            batch_id=batch.batch_id,
            num_rows=batch.num_rows,
            num_tokens=batch.num_tokens,
            lane=lane,
            page_versions=versions,
            buffer_epochs=tuple(epochs),
            backends=tuple(binding.backend for binding in self._bindings),
            fingerprint=self._fingerprint(batch, lane, epochs) if self._paranoid else None,
        )
        plan = StepPlan(certificate, policy, needs, tuple(plans), self._places)
        self._issued.add(plan)
        self.num_plans += 1
        self.plan_seconds += time.perf_counter() - started
        return PlannedBatch(batch, plan)

    def buffer_addresses(self, lane: Lane) -> Mapping[str, int]:
        """Where the plan buffers of every group lie in a lane."""
        return {
            f"{binding.group.name}.{name}": address
            for binding, buffers in zip(self._bindings, self._buffers[lane], strict=True)
            for name, address in buffers.addresses().items()
        }

    def ensure(self, work: Batch | PlannedBatch) -> PlannedBatch:
        """A plan that is current: planned where there is none, proven or planned again where there is one."""
        match work:
            case Batch():
                return self.plan(work)
            case PlannedBatch():
                stale = self._staleness(work)
                if stale.batch:
                    raise StalePlanError(stale.batch, REBUILD_BATCH)
                if not stale.plan:
                    return work
                self.num_rebuilt += 1
                return self.plan(work.batch, needs=work.plan.needs, lane=work.plan.certificate.lane)
            case _:
                raise UnplannedBatchError(
                    f"expected a Batch or a PlannedBatch, got {type(work).__name__}; assemble a Batch first"
                )

    def _check_step(self, batch: Batch, needs: frozenset[Feature], lane: Lane) -> None:
        """A step that a backend cannot serve is refused here, before any of it runs."""
        if lane not in self._buffers:
            raise PlanError(f"expected a lane out of {sorted(self._buffers)}, got {lane}")
        for binding in self._bindings:
            missing = needs - binding.capability.features
            if missing:
                names = ", ".join(sorted(feature.value for feature in missing))
                raise PlanError(f"{type(binding.backend).__name__} serves {binding.group.name} and lacks {names}")
            exact = batch.query_lens.host is not None and batch.context_lens.host is not None
            if binding.capability.host_lengths is HostLengths.EXACT and not exact:
                raise PlanError(
                    f"{type(binding.backend).__name__} serves {binding.group.name} and needs exact host lengths, "
                    "got a batch whose lengths only the device knows"
                )
        if batch.num_rows > self._limits.max_rows or batch.num_tokens > self._limits.max_step_tokens:
            raise PlanError(
                f"expected at most {self._limits.max_rows} rows and {self._limits.max_step_tokens} tokens in a "
                f"step, got {batch.num_rows} and {batch.num_tokens}"
            )
        if not batch.pools and any(batch.context_lens.bound):
            raise PlanError("expected context lengths of 0 in a batch without pools, got a context to read")

    def _batch_changes(self, batch: Batch, versions: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
        """Why the batch itself cannot run: its pools are not ours, or its pages changed owner."""
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
        for binding, backend, buffers, epochs in zip(
            self._bindings,
            certificate.backends,
            self._buffers[certificate.lane],
            certificate.buffer_epochs,
            strict=True,
        ):
            if binding.backend is not backend:
                changes.append(f"the backend of {binding.group.name} was replaced")
            refilled = buffers.changed_since(epochs)
            if refilled:
                changes.append(f"plan buffers of {binding.group.name} were filled again: {', '.join(refilled)}")
        if changes or certificate.fingerprint is None:
            return Staleness((), tuple(changes))
        return self._content_changes(batch, certificate, certificate.fingerprint)

    def _fingerprint(self, batch: Batch, lane: Lane, epochs: Sequence[Mapping[str, int]]) -> Fingerprint:
        """Contents that must not move between planning and running, by name."""
        tensors = {
            "batch query_lens": batch.query_lens.device,
            "batch context_lens": batch.context_lens.device,
            "batch positions": batch.positions,
        }
        for row, mask in enumerate(batch.masks):
            if mask.tree is not None:
                tensors[f"batch tree of row {row}"] = mask.tree
        for key, rows in batch.pools.items():
            tensors[f"batch write_slots of {key}"] = rows.write_slots
            tensors[f"batch page-table rows of {key}"] = self._pools[key].table.pages[list(batch.rows)]
        for binding, buffers, stamp in zip(self._bindings, self._buffers[lane], epochs, strict=True):
            names = tuple(stamp)
            for name, tensor in zip(names, buffers.contents(names), strict=True):
                tensors[f"plan buffer {binding.group.name}.{name}"] = tensor
        return fingerprint_tensors(tensors)

    def _content_changes(self, batch: Batch, certificate: Certificate, before: Fingerprint) -> Staleness:
        after = self._fingerprint(batch, certificate.lane, certificate.buffer_epochs)
        changed = changed_parts(before, after)
        return Staleness(
            tuple(f"contents of {name} changed in place" for name in changed if name.startswith("batch ")),
            tuple(f"contents of {name} changed in place" for name in changed if name.startswith("plan ")),
        )


def _describe_rows(key: str, rows: Sequence[int], expected: Sequence[int], current: Sequence[int]) -> str:
    moved = [
        f"row {row} was version {was}, is {now}"
        for row, was, now in zip(rows, expected, current, strict=True)
        if was != now
    ]
    return f"page table of pool {key} changed: {', '.join(moved)}"
