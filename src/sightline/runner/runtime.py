"""All objects that run steps, as `build` made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sightline.attention.bindings import GroupBinding
from sightline.attention.contract import EntryCoordinator
from sightline.attention.planner import PlannedBatch, Planner
from sightline.attention.workspace import SECOND_LANE, Workspace
from sightline.cache.store import CacheStore
from sightline.cache.tier import LowerTier
from sightline.core.batch import Batch
from sightline.core.memory import MemoryTaken
from sightline.core.resolution import ResolvedConfig
from sightline.kernels.cpu.program import CpuLauncher
from sightline.layers.operations import Operations
from sightline.models.contract import Definition
from sightline.runner.backend_choice import GroupSelection
from sightline.runner.graphs import Graphs
from sightline.runner.networks import DraftRuntime, NetworkRuntime
from sightline.runner.progress import BuildTimes
from sightline.runner.replicas import Beside
from sightline.runner.roles import Role
from sightline.runner.runner import Runner


@dataclass(frozen=True)
class Runtime:
    """All objects that run steps."""

    config: ResolvedConfig
    definition: Definition
    store: CacheStore
    workspace: Workspace
    network: NetworkRuntime
    """The model itself."""
    draft: DraftRuntime
    """The networks that draft for it."""
    operations: Operations
    """Operations with the kernels of the device."""
    launcher: CpuLauncher
    """Runs the kernels of a CPU."""
    times: BuildTimes
    weight_bytes: int
    """Card memory that the weights take, measured; 0 if it was not measured, as on a CPU."""
    role: Role
    """What this process is among the ranks that share the model."""
    others: tuple[CacheStore, ...]
    """For each other replica, the account of its cache: rows and pages, without entries. Empty if this process does not
    lead."""
    tiers: tuple[LowerTier, ...]
    """Keeps pages that the prefix cache evicts: one, or none if they are lost."""

    @property
    def bindings(self) -> tuple[GroupBinding, ...]:
        return self.network.bindings

    @property
    def selections(self) -> tuple[GroupSelection, ...]:
        """For each group, the chosen backends and why the others were refused."""
        return self.network.selections

    @property
    def planner(self) -> Planner:
        return self.network.planner

    @property
    def runner(self) -> Runner:
        return self.network.runner

    def plan_halves(self, batch: Batch, first_rows: int) -> tuple[PlannedBatch, PlannedBatch]:
        """Cuts a step in two and plans each half on its own, in a lane of its own."""
        first, second = batch.split(first_rows)
        return self.planner.plan(first), self.planner.plan(second, lane=SECOND_LANE)

    def take_back(self, planned: Sequence[PlannedBatch], beside: Sequence[Beside]) -> None:
        """Discards the entries of a launched step whose result nobody will read, on every replica."""
        for each in planned:
            self.planner.take_back(each)
        for store, other in zip(self.others, beside, strict=False):
            store.main.lengths.take_back(other.batch)

    @property
    def graphs(self) -> Graphs:
        return self.network.graphs

    @property
    def networks(self) -> tuple[NetworkRuntime, ...]:
        """The model, then those that draft for it."""
        return (self.network, *self.draft.networks)

    @property
    def memory_taken(self) -> MemoryTaken:
        """Returns the card memory that the parts take."""
        graph_bytes = sum(each.graphs.num_bytes for each in self.networks)
        host_bytes = sum(tier.usage().num_bytes for tier in self.tiers)
        cache_bytes = self.store.num_bytes + sum(each.num_bytes for each in self.coordinators)
        return MemoryTaken(
            self.weight_bytes,
            cache_bytes,
            self.workspace.num_bytes,
            graph_bytes,
            host_bytes,
            self.store.host_bytes,
        )

    @property
    def coordinators(self) -> tuple[EntryCoordinator, ...]:
        """The coordinators, which tell backends where entries are: one for each group of each network."""
        return tuple(each for network in self.networks for each in network.coordinators)
