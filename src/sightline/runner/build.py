"""The composition root: device, model, specs, groups, pools, workspace, backends, planner, runner, graphs, in order.

Every object gets all it needs in its constructor; nothing is bound later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sightline.attention.backends import registry
from sightline.attention.capability import Requirement, Work
from sightline.attention.contract import BackendContext, StepLimits
from sightline.attention.planner import GroupBinding, PartBackend, Planner
from sightline.attention.proof import ProofBook
from sightline.attention.selection import Candidate, no_doubt, select_backend
from sightline.attention.spec import LayerGroup, group_layers
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.cache.pages import PageAllocator
from sightline.cache.pools import CacheLimits, CacheStore
from sightline.cache.spec import ScalesByPlane
from sightline.core.batch import CAUSAL, MaskKind, RowMask
from sightline.core.command_line import prove_words
from sightline.core.config import EngineConfig, LayerKernels, Quantization
from sightline.core.device import DeviceKind, allocated_bytes, detect_device, single_threaded
from sightline.core.environment import proof_folder
from sightline.core.ledger import Ledger
from sightline.core.memory import MemoryTaken
from sightline.core.resolution import ResolvedConfig, resolve
from sightline.kernels.cpu.program import CpuLauncher, inline_launcher
from sightline.layers.linear import Linear
from sightline.layers.operations import Operations
from sightline.layers.scratch import Activations
from sightline.layers.torch_operations import TorchOperations
from sightline.models.cache_scales import load_cache_scales
from sightline.models.contract import Definition, EmbedderDefinition, Model
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.registry import define_embedder, define_model
from sightline.models.weights import WeightReader
from sightline.runner.backend_choice import GroupSelection, import_chosen, make_offers, tell_choices
from sightline.runner.demand import AttentionUsage, demands_of
from sightline.runner.graphs import Graphs
from sightline.runner.memory import tell_excess
from sightline.runner.progress import BuildPhase, BuildStep, BuildTimes, OnBuildStep, ignore
from sightline.runner.quantised import (
    counted_as,
    expert_compute,
    has_cpu_kernels,
    kept_weights,
    model_facts,
    note_keep,
)
from sightline.runner.recording import CpuRecorder, CudaRecorder, Recorder
from sightline.runner.runner import Runner
from sightline.runner.warm_up import StepKind, WarmUp, embedding_kinds, few_kinds, paged_kinds


@dataclass(frozen=True)
class Runtime:
    """All objects that run steps."""

    config: ResolvedConfig
    definition: Definition
    store: CacheStore
    workspace: Workspace
    bindings: tuple[GroupBinding, ...]
    selections: tuple[GroupSelection, ...]
    """For each group, the chosen backends and why the others were refused."""
    planner: Planner
    runner: Runner
    graphs: Graphs
    operations: Operations
    """Operations with the kernels of the device."""
    launcher: CpuLauncher
    """Runs the kernels of a CPU."""
    times: BuildTimes
    weight_bytes: int
    """What the weights take on a card, measured; 0 if nobody measured it, as on a CPU."""

    @property
    def memory_taken(self) -> MemoryTaken:
        """What the parts take of a card."""
        cache_bytes = sum(pool.num_bytes for pool in self.store.pools)
        return MemoryTaken(self.weight_bytes, cache_bytes, self.workspace.num_bytes, self.graphs.num_bytes)


@dataclass(frozen=True)
class Blueprint:
    """The decisions about what will run for a model, before anything is built."""

    config: ResolvedConfig
    groups: tuple[LayerGroup, ...]
    usage: AttentionUsage
    prove_words: tuple[str, ...]
    """The arguments of the `sightline` command that proves attention for this engine."""

    def select(self, candidates: Sequence[Candidate]) -> tuple[GroupSelection, ...]:
        """Chooses the backends of each group from the candidates."""
        return select_backends(self.config, self.groups, candidates, self.usage, self.prove_words)


def build_runtime(
    config: EngineConfig,
    checkpoint: Checkpoint,
    ledger: Ledger,
    on_step: OnBuildStep = ignore,
) -> Runtime:
    """Builds a runtime for a checkpoint. Raises before the weights are read if something cannot work.

    `on_step` is told how many tensors are read, first that none is, when nothing is left but to read them; then, on a
    GPU, what is compiled and captured. No step that is served later compiles anything.
    """
    definition = define_model(checkpoint.config, ledger)
    blueprint = draw_up(config, checkpoint, definition, AttentionUsage.GENERATE, ledger)
    runtime = _build(blueprint, checkpoint, ledger, on_step, definition, definition.load)
    _warm_up(runtime, paged_kinds(runtime.config), CAUSAL, on_step)
    _capture_graphs(runtime, ledger, on_step)
    tell_excess(runtime.config, runtime.memory_taken, ledger)
    return runtime


def build_embedding_runtime(
    config: EngineConfig,
    checkpoint: Checkpoint,
    ledger: Ledger,
    on_step: OnBuildStep = ignore,
) -> tuple[Runtime, EmbedderDefinition]:
    """Like `build_runtime`, for a network without its output projection."""
    definition = define_embedder(checkpoint.config, ledger)
    blueprint = draw_up(config, checkpoint, definition, usage_of(definition), ledger)
    runtime = _build(blueprint, checkpoint, ledger, on_step, definition, definition.load_states)
    _warm_up(runtime, embedding_kinds(runtime.config), definition.mask, on_step)
    tell_excess(runtime.config, runtime.memory_taken, ledger)
    return runtime, definition


def usage_of(definition: EmbedderDefinition) -> AttentionUsage:
    """How an embedding model calls attention."""
    return AttentionUsage.EMBED_WHOLE if definition.mask.kind is MaskKind.FULL else AttentionUsage.EMBED


def draw_up(
    config: EngineConfig, checkpoint: Checkpoint, definition: Definition, usage: AttentionUsage, ledger: Ledger
) -> Blueprint:
    """Decides what will run, from the checkpoint's headers: no weight is read and nothing is built."""
    groups = group_layers(definition.attention_specs())
    device = detect_device(config.device)
    facts = model_facts(counted_as(config, device), checkpoint, definition, groups)
    takes_texts_whole = usage is AttentionUsage.EMBED_WHOLE
    resolved = resolve(config, replace(facts, takes_texts_whole=takes_texts_whole), device, ledger)
    model = str(checkpoint.location) if config.model is None else config.model
    return Blueprint(resolved, groups, usage, prove_words(config, model))


def _build(
    blueprint: Blueprint,
    checkpoint: Checkpoint,
    ledger: Ledger,
    on_step: OnBuildStep,
    definition: Definition,
    load: Callable[[WeightReader], Model],
) -> Runtime:
    resolved, groups, device = blueprint.config, blueprint.groups, blueprint.config.device
    selections = blueprint.select(registry.installed())
    tell_choices(resolved, groups, selections, ledger)
    import_chosen(selections)
    note_keep(resolved, checkpoint, definition, groups, ledger)

    def on_progress(done: int, total: int) -> None:
        on_step(BuildStep(BuildPhase.WEIGHTS, checkpoint.location.name, done, total))

    on_progress(0, len(checkpoint.tensors))
    times = BuildTimes()
    launcher = make_launcher(resolved, selections, ledger)
    reader = WeightReader(
        checkpoint,
        resolved.dtype,
        device.torch_device,
        ledger,
        on_progress,
        kept=kept_weights(resolved, launcher, ledger),
        skip_check=resolved.skip_weight_check,
        expert_compute=expert_compute(resolved),
        make_linear=_linear_maker(resolved, launcher),
    )
    before = allocated_bytes(device)
    with times.measured(BuildPhase.WEIGHTS):
        scales = load_cache_scales(reader, groups, resolved.cache_dtype)
        with single_threaded():
            model = load(reader)
    weight_bytes = allocated_bytes(device) - before
    store = make_store(resolved, groups, scales=scales)
    with _compiling(resolved, times, on_step):
        runtime = assemble_runtime(resolved, definition, model, groups, selections, store, launcher)
    return replace(runtime, times=times, weight_bytes=weight_bytes)


@contextmanager
def _compiling(config: ResolvedConfig, times: BuildTimes, on_step: OnBuildStep) -> Iterator[None]:
    """Tells that CPU kernels are compiled, and how long it takes. Later starts load them from the disk."""
    if config.layer_kernels is not LayerKernels.NUMBA:
        yield
        return
    on_step(BuildStep(BuildPhase.KERNELS, "for this processor, or loading those of earlier starts", 0, 1))
    with times.measured(BuildPhase.KERNELS):
        yield


def _warm_up(runtime: Runtime, kinds: Sequence[StepKind], mask: RowMask, on_step: OnBuildStep) -> None:
    """Runs a step of each kind on a GPU, and of a few on a CPU that compiles kernels: no request waits for that."""
    if runtime.config.device.kind is not DeviceKind.CUDA:
        if runtime.config.layer_kernels is not LayerKernels.NUMBA:
            return
        kinds = few_kinds(kinds)
    with runtime.times.measured(BuildPhase.KERNELS):
        WarmUp(runtime.config, runtime.store, runtime.planner, runtime.runner, mask).run(kinds, on_step)


def _capture_graphs(runtime: Runtime, ledger: Ledger, on_step: OnBuildStep) -> None:
    """Captures the graphs, or records the programs, that the config asks for."""
    if runtime.config.graph_sizes:
        device = runtime.config.device
        is_card = device.kind is DeviceKind.CUDA
        recorder: Recorder = CudaRecorder(device.torch_device) if is_card else CpuRecorder(runtime.launcher)
        with runtime.times.measured(BuildPhase.GRAPHS):
            runtime.graphs.capture(runtime.runner, recorder, ledger, on_step)


def select_backends(
    config: ResolvedConfig,
    groups: Sequence[LayerGroup],
    candidates: Sequence[Candidate],
    usage: AttentionUsage = AttentionUsage.GENERATE,
    prove_words: Sequence[str] = (),
) -> tuple[GroupSelection, ...]:
    """Chooses a backend for each group and each kind of rows that steps may have.

    If the config requires proof, unproven backends are refused, and the reason names the command `prove_words`.
    """
    doubt = ProofBook(proof_folder()).doubting(prove_words) if config.require_proof else no_doubt
    offers = make_offers(config, candidates)
    return tuple(
        {
            work: select_backend(offer, requirement(config, group, work, usage), group.name, doubt, work)
            for work, offer in offers.items()
        }
        for group in groups
    )


def requirement(config: ResolvedConfig, group: LayerGroup, work: Work, usage: AttentionUsage) -> Requirement:
    """The features that a backend must support to serve this kind of rows of the group."""
    return Requirement(
        group.spec,
        config.device,
        config.dtype,
        config.cache_dtype,
        config.page_size,
        usage.needs,
        demands_of(config, group, work, usage),
    )


def make_store(
    config: ResolvedConfig,
    groups: Sequence[LayerGroup],
    make_allocator: Callable[[int], PageAllocator] = PageAllocator,
    scales: ScalesByPlane | None = None,
) -> CacheStore:
    """Creates the pools of every group. `scales` are those of all layers, None if the cache's dtype has none."""
    return CacheStore(
        [group.cache_spec(config.cache_dtype, scales) for group in groups],
        CacheLimits(config.num_pages, config.page_size, config.max_rows, config.max_model_len),
        config.device.torch_device,
        poison=config.paranoid,
        make_allocator=make_allocator,
    )


def assemble_runtime(
    config: ResolvedConfig,
    definition: Definition,
    model: Model,
    groups: Sequence[LayerGroup],
    selections: Sequence[GroupSelection],
    store: CacheStore,
    launcher: CpuLauncher,
) -> Runtime:
    """Builds everything from the workspace to the runner."""
    device = config.device.torch_device
    limits = StepLimits(config.max_rows, config.max_step_tokens, config.max_model_len, (MAIN_LANE,), max_rollout=0)
    workspace = Workspace(device, config.scratch_bytes, poison=config.paranoid)
    bindings = tuple(
        GroupBinding(
            group,
            cache,
            _serving(
                selection,
                BackendContext(group.name, group.spec, cache, workspace, limits, config.dtype, device, launcher),
            ),
        )
        for group, cache, selection in zip(groups, store.groups, selections, strict=True)
    )
    planner = Planner(bindings, limits, store.lengths, workspace, paranoid=config.paranoid)
    operations = make_operations(config.layer_kernels, device, config.dtype, launcher)
    # Feature-major products are faster on a CPU only.
    turns = model.turns and operations.turns and config.device.kind is DeviceKind.CPU
    activations = {
        lane: Activations(workspace, lane, config.max_step_tokens, config.dtype, operations, turns=turns)
        for lane in limits.lanes
    }
    runner = Runner(model, planner, activations)
    graphs = Graphs(config.graph_sizes, store, planner, bindings)
    workspace.seal()
    return Runtime(
        config=config,
        definition=definition,
        store=store,
        workspace=workspace,
        bindings=bindings,
        selections=tuple(selections),
        planner=planner,
        runner=runner,
        graphs=graphs,
        operations=operations,
        launcher=launcher,
        times=BuildTimes(),
        weight_bytes=0,
    )


def make_launcher(config: ResolvedConfig, selections: Sequence[GroupSelection], ledger: Ledger) -> CpuLauncher:
    """The threads that run compiled CPU kernels: as many as torch's, if anything is computed with such kernels."""
    chosen = [each.capability.package for selection in selections for each in selection.values()]
    keeps_codes = config.quantization is Quantization.KEEP and has_cpu_kernels()
    computes = config.layer_kernels is LayerKernels.NUMBA or LayerKernels.NUMBA.value in chosen or keeps_codes
    if config.device.kind is not DeviceKind.CPU or not computes:
        return inline_launcher()
    # Imported here: numba is an extra.
    from sightline.kernels.cpu.compiler import note_folder
    from sightline.kernels.cpu.team import Team

    note_folder(ledger)
    return CpuLauncher(Team(torch.get_num_threads()))


def make_operations(
    kernels: LayerKernels, device: torch.device, dtype: torch.dtype, launcher: CpuLauncher
) -> Operations:
    """The operations with the chosen kernels."""
    if kernels is LayerKernels.TORCH:
        return TorchOperations()
    # Imported here: a CPU install has no triton, and numba is an extra.
    if kernels is LayerKernels.NUMBA:
        # They get addresses, and would read those of a GPU's memory as their own.
        if device.type != "cpu":
            raise ValueError(f"expected the device cpu for kernels of a CPU, got {device}")
        from sightline.layers.cpu_operations import CpuOperations

        return CpuOperations(launcher, dtype)
    from sightline.kernels.triton.overlap import overlaps_on
    from sightline.layers.triton_operations import TritonOperations

    return TritonOperations(overlaps=overlaps_on(device))


def _linear_maker(config: ResolvedConfig, launcher: CpuLauncher) -> Callable[[Tensor, Tensor | None], Linear]:
    """What makes projections with dense weights for the chosen kernels."""
    if config.layer_kernels is LayerKernels.TORCH:
        return Linear
    if config.layer_kernels is LayerKernels.NUMBA:
        from sightline.layers.cpu_compute import CpuCompute
        from sightline.layers.cpu_linear import CpuLinear

        return partial(CpuLinear, compute=CpuCompute.on(launcher))
    from sightline.kernels.triton.overlap import overlaps_on
    from sightline.layers.thin_linear import ThinLinear

    return partial(ThinLinear, overlaps=overlaps_on(config.device.torch_device))


def _serving(selection: GroupSelection, context: BackendContext[Any]) -> Mapping[Work, PartBackend]:
    """Builds each chosen backend once, however many kinds of rows it serves."""
    chosen = {each.candidate.name: each.candidate for each in selection.values()}
    built = {
        name: candidate.load()(replace(context, group=f"{context.group}.{name}")) for name, candidate in chosen.items()
    }
    return {work: PartBackend(built[each.candidate.name], each.capability) for work, each in selection.items()}
