"""What runs the steps of one network: the model itself, or one that drafts for it.

Every network has a planner and a runner of its own, on its own part of the store. They share the scratch arena, the
operations and the limits of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from sightline.attention.bindings import GroupBinding, PartBackend
from sightline.attention.capability import Work
from sightline.attention.contract import BackendContext, EntryCoordinator, StepLimits
from sightline.attention.groups import LayerGroup
from sightline.attention.kinds import Feature
from sightline.attention.planner import Planner
from sightline.attention.workspace import MAIN_LANE, SECOND_LANE, Lane, Workspace
from sightline.cache.store import CacheStore, NetworkCache
from sightline.core.device import DeviceKind
from sightline.core.ledger import Ledger
from sightline.core.lengths import moved
from sightline.core.resolution import ResolvedConfig
from sightline.distributed.collectives import NO_LINKS, Links
from sightline.kernels.cpu.program import CpuLauncher
from sightline.layers.operations import Operations
from sightline.layers.scratch import Activations
from sightline.models.contract import Model
from sightline.models.drafting import LoadedDraft
from sightline.runner.backend_choice import GroupSelection
from sightline.runner.coordinators import make_coordinator
from sightline.runner.graphs import Graphs
from sightline.runner.progress import OnBuildStep
from sightline.runner.recording import Recorder
from sightline.runner.roles import NOBODY, Companions
from sightline.runner.runner import Runner
from sightline.runner.sampling.sampler import RowSampling, choose


@dataclass(frozen=True)
class NetworkParts:
    """A network that is loaded, and the backends chosen for it."""

    name: str
    """Distinguishes its leases from those of other networks."""
    model: Model
    groups: tuple[LayerGroup, ...]
    selections: tuple[GroupSelection, ...]
    """For each group, the chosen backends and why the others were refused."""
    max_rollout: int = 0
    """Steps that may be planned at once, one behind the other."""


@dataclass(frozen=True)
class NetworkRuntime:
    """A network that can run."""

    cache: NetworkCache
    bindings: tuple[GroupBinding, ...]
    coordinators: tuple[EntryCoordinator, ...]
    """For each group: what tells its backends where entries are."""
    selections: tuple[GroupSelection, ...]
    planner: Planner
    runner: Runner
    graphs: Graphs
    max_step_tokens: int
    max_rollout: int
    """Steps that are planned at once, one behind the other; 0 if each is planned when its turn comes."""

    @property
    def only_borrows(self) -> bool:
        """True if it reads another network's cache and has none. Its tokens see the context alone."""
        return not owns_entries([binding.group for binding in self.bindings])

    def capture(self, recorder: Recorder, ledger: Ledger, on_step: OnBuildStep) -> None:
        """Records the steps of every bucket."""
        if not self.only_borrows:
            self.graphs.capture(self.runner, recorder, ledger, on_step)
            return
        told = ("cuda_graph_sizes", "steps of a drafter that reads the model's cache run eagerly")
        if recorder.is_essential:
            ledger.degrade(*told, "use another drafter if guessing is slow")
        else:
            ledger.note(*told)


def owns_entries(groups: Sequence[LayerGroup]) -> bool:
    """True if a network of these groups writes a cache. One that only borrows has its lender's rows and lengths."""
    return any(group.loan is None for group in groups)


@dataclass(frozen=True)
class DraftRuntime:
    """The networks that draft for a model, ready to run."""

    loaded: LoadedDraft
    networks: tuple[NetworkRuntime, ...]
    """One for each model of `loaded`, in the same order."""
    operations: Operations

    def retire(self) -> None:
        """Says that the networks run no more, so that the model's entries are shared without theirs."""
        for each in self.networks:
            each.cache.retire()

    def fuse(self, states: Tensor) -> Tensor:
        """The states that the first network takes, from those of the model."""
        return self.loaded.fuse(states, self.operations)

    def choose(self, logits: Tensor, drawn: Sequence[RowSampling | None]) -> Tensor:
        """The model's tokens [num_rows] int64 that a network chooses.

        If the tokens of a row's sequence are drawn, its guess is drawn too, with the noise that the model will draw
        with at the same place: where both think alike, they choose alike. Other rows take the likeliest token.
        """
        likeliest = self.loaded.choose(logits, self.operations)
        rows = [(index, each) for index, each in enumerate(drawn) if each is not None]
        if not rows:
            return likeliest
        [places] = moved([[index for index, _ in rows]], logits.device)
        some = self.loaded.spread(logits.index_select(0, places))
        chosen = choose(some, [each for _, each in rows], best=self.operations.best_tokens)
        return likeliest.index_copy(0, places, chosen.tokens)


@dataclass(frozen=True)
class Shared:
    """What all networks of an engine share."""

    config: ResolvedConfig
    store: CacheStore
    workspace: Workspace
    operations: Operations
    launcher: CpuLauncher


def assemble_network(
    shared: Shared,
    parts: NetworkParts,
    cache: NetworkCache,
    companions: Companions = NOBODY,
    links: Links = NO_LINKS,
) -> NetworkRuntime:
    """Builds everything from the backends to the buckets of graphs. The workspace must not be sealed yet.

    `companions` run every step of the network too, and `links` are those of its layers.
    """
    config, workspace, operations, model = shared.config, shared.workspace, shared.operations, parts.model
    # Tokens that see the context alone are not captured.
    sizes = config.graph_sizes if owns_entries(parts.groups) else ()
    max_rollout = parts.max_rollout if _can_roll_out(sizes, parts.selections) else 0
    # Halves of a step that is cut in two have a lane each.
    lanes = (MAIN_LANE, SECOND_LANE) if config.enable_two_batch_overlap and not parts.name else (MAIN_LANE,)
    limits = step_limits(config, lanes, max_rollout)
    coordinators = tuple(
        make_coordinator(config, group, shared.store.cache(group.owner), limits) for group in parts.groups
    )
    bindings = tuple(map(partial(bind_group, shared, limits), parts.groups, parts.selections, coordinators))
    planner = Planner(
        bindings,
        limits,
        cache.lengths,
        workspace,
        name=f"{parts.name}planner",
        paranoid=config.paranoid,
        joins_lanes=len(lanes) > 1,
    )
    # Feature-major products are faster on a CPU only.
    turns = model.turns and operations.turns and config.device.kind is DeviceKind.CPU
    activations = {
        lane: Activations(
            workspace,
            lane,
            config.max_step_tokens,
            config.dtype,
            operations,
            turns=turns,
            network=parts.name,
            num_replicas=links.place.num_replicas,
        )
        for lane in limits.lanes
    }
    runner = Runner(model, planner, activations, companions, links)
    graphs = Graphs(sizes, shared.store, cache, planner, bindings)
    return NetworkRuntime(
        cache, bindings, coordinators, parts.selections, planner, runner, graphs, config.max_step_tokens, max_rollout
    )


def step_limits(config: ResolvedConfig, lanes: tuple[Lane, ...] = (MAIN_LANE,), max_rollout: int = 0) -> StepLimits:
    """The largest step of a network."""
    # A captured step is padded to as many rows as it has tokens.
    max_rows = max(config.max_rows, *config.graph_sizes, 0)
    return StepLimits(max_rows, config.max_step_tokens, config.max_model_len, lanes, max_rollout)


def bind_group(
    shared: Shared, limits: StepLimits, group: LayerGroup, selection: GroupSelection, coordinator: EntryCoordinator
) -> GroupBinding:
    """Builds the chosen backends of a group, which take their leases."""
    config, cache = shared.config, shared.store.cache(group.owner)
    device, launcher = config.device.torch_device, shared.launcher
    context: BackendContext[Any] = BackendContext(
        group.name, group.spec, cache, shared.workspace, limits, config.dtype, device, launcher, coordinator
    )
    return GroupBinding(group, cache, _serving(selection, context))


def _can_roll_out(sizes: Sequence[int], selections: Sequence[GroupSelection]) -> bool:
    """True if several plans may exist at once: every backend keeps what it derives in the plan, and no step is in a
    bucket, which holds one batch at a time. `sizes` are those of the buckets."""
    chosen = [each.capability.features for selection in selections for each in selection.values()]
    return not sizes and all(Feature.SEVERAL_PLANS in features for features in chosen)


def _serving(selection: GroupSelection, context: BackendContext[Any]) -> Mapping[Work, PartBackend]:
    """Builds each chosen backend once, however many kinds of rows it serves."""
    chosen = {each.candidate.name: each.candidate for each in selection.values()}
    built = {
        name: candidate.load()(replace(context, group=f"{context.group}.{name}")) for name, candidate in chosen.items()
    }
    return {work: PartBackend(built[each.candidate.name], each.capability) for work, each in selection.items()}
