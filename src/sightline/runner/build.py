"""The composition root: device, model, specs, groups, pools, workspace, backends, planner, runner, graphs, in order.

Every object gets all it needs in its constructor; nothing is bound later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar

import torch

from sightline.attention.backends import registry
from sightline.attention.groups import LayerGroup
from sightline.attention.proof import ProofBook
from sightline.attention.selection import Candidate, no_doubt, select_backend
from sightline.attention.workspace import Workspace
from sightline.cache.blocks import BlockStore
from sightline.cache.host import HostBlocks
from sightline.cache.pages import PageAllocator
from sightline.cache.pools import CacheLimits
from sightline.cache.spec import ScalesByPlane
from sightline.cache.store import CacheStore
from sightline.cache.tier import LowerTier
from sightline.cache.watcher import UNWATCHED, CacheWatcher
from sightline.core.batch import CAUSAL, CONTEXT, MaskKind, RowMask
from sightline.core.command_line import prove_words
from sightline.core.config import EngineConfig, LayerKernels
from sightline.core.device import Device, DeviceKind, allocated_bytes, detect_device, single_threaded
from sightline.core.environment import proof_folder
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.core.resolution import ResolvedConfig, resolve
from sightline.distributed.collectives import NO_LINKS, Links
from sightline.kernels.cpu.program import CpuLauncher
from sightline.models.cache_scales import load_cache_scales
from sightline.models.contract import NO_TAPS, Definition, EmbedderDefinition, Model, Taps
from sightline.models.decoder import Decoder
from sightline.models.drafting import NO_DRAFT, DraftSource, LoadedDraft
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.registry import define_embedder, define_model
from sightline.models.weights import WeightReader
from sightline.runner.backend_choice import GroupSelection, import_chosen, make_offers, offer_for, tell_choices
from sightline.runner.compute import linear_maker, make_launcher, make_operations
from sightline.runner.demand import AttentionUsage, requirement
from sightline.runner.memory import tell_excess
from sightline.runner.networks import (
    DraftRuntime,
    NetworkParts,
    Shared,
    assemble_network,
    owns_entries,
)
from sightline.runner.parts import agreed, part_of_rank
from sightline.runner.progress import BuildPhase, BuildStep, BuildTimes, OnBuildStep, ignore
from sightline.runner.quantised import (
    counted_as,
    expert_compute,
    kept_weights,
    model_facts,
    note_keep,
)
from sightline.runner.recording import CpuRecorder, CudaRecorder, Recorder
from sightline.runner.roles import ALONE_ROLE, NOBODY, Role
from sightline.runner.runtime import Runtime
from sightline.runner.warm_up import StepKind, WarmUp, embedding_kinds, few_kinds, paged_kinds

ModelT = TypeVar("ModelT", bound=Model)
NO_ENTRIES = torch.device("meta")
"""The device of a cache of which a process knows rows and pages, and whose entries another one has."""
ReaderOf: TypeAlias = Callable[[Checkpoint], WeightReader]
"""Makes the reader of a checkpoint's weights."""


@dataclass(frozen=True)
class Blueprint:
    """The decisions about what will run for a model, before anything is built."""

    config: ResolvedConfig
    groups: tuple[LayerGroup, ...]
    usage: AttentionUsage
    prove_words: tuple[str, ...]
    """The arguments of the `sightline` command that proves attention for this engine."""
    draft: DraftSource | None = None
    """The networks that draft for the model."""
    draft_groups: tuple[tuple[LayerGroup, ...], ...] = ()
    """The groups of each of them."""

    def select(self, candidates: Sequence[Candidate]) -> tuple[GroupSelection, ...]:
        """Chooses the backends of each group from the candidates."""
        return select_backends(self.config, self.groups, candidates, self.usage, self.prove_words)

    def select_for_drafts(self, candidates: Sequence[Candidate]) -> tuple[tuple[GroupSelection, ...], ...]:
        """Chooses the backends of each network that drafts. There may be a setting for them alone."""
        own = None if self.config.speculation is None else self.config.speculation.attention_backend
        # Networks that draft never see trees of guesses.
        config = replace(self.config, speculation=None)
        if own is not None:
            config = replace(
                config, attention_backend=own, prefill_attention_backend=None, decode_attention_backend=None
            )
        return tuple(select_backends(config, groups, candidates, self.usage) for groups in self.draft_groups)


def build_runtime(
    config: EngineConfig,
    checkpoint: Checkpoint,
    ledger: Ledger,
    on_step: OnBuildStep = ignore,
    taps: Taps = NO_TAPS,
    draft: DraftSource | None = None,
    role: Role = ALONE_ROLE,
) -> Runtime:
    """Builds a runtime for a checkpoint. Raises before the weights are read if something cannot work.

    `on_step` is told how many tensors are read, beginning with 0 once everything before is done; then, on a GPU, what
    is compiled and captured. No step that is served later compiles anything. `taps` are the states that a drafter
    takes, `draft` are its networks, if it has any. `role` says whether this process has a part of the
    model, and which.
    """
    whole = define_model(checkpoint.config, ledger)
    definition, part = part_of_rank(whole, checkpoint, role.links.place, config, ledger)
    drawn = draw_up(config, part, definition, AttentionUsage.GENERATE, ledger, draft)
    blueprint = replace(drawn, config=agreed(drawn.config, role.links.everyone))
    load_model, load_draft = partial(definition.load, taps=taps), partial(_load_draft, draft)
    runtime = _build(blueprint, part, ledger, on_step, definition, load_model, load_draft, role)
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
    runtime = _build(blueprint, checkpoint, ledger, on_step, definition, definition.load_states, lambda *_: NO_DRAFT)
    _warm_up(runtime, embedding_kinds(runtime.config), definition.mask, on_step)
    tell_excess(runtime.config, runtime.memory_taken, ledger)
    return runtime, definition


def usage_of(definition: EmbedderDefinition) -> AttentionUsage:
    """Returns how an embedding model calls attention."""
    return AttentionUsage.EMBED_WHOLE if definition.mask.kind is MaskKind.FULL else AttentionUsage.EMBED


def draw_up(
    config: EngineConfig,
    checkpoint: Checkpoint,
    definition: Definition,
    usage: AttentionUsage,
    ledger: Ledger,
    draft: DraftSource | None = None,
    device: Device | None = None,
) -> Blueprint:
    """Decides what will run, from the checkpoint's headers: no weight is read and nothing is built.

    Without `device`, it is the one that the config names. A device that is not here counts as having every package.
    """
    groups = definition.groups()
    device = detect_device(config.device) if device is None else device
    facts = model_facts(counted_as(config, device), checkpoint, definition, groups)
    draft_groups: tuple[tuple[LayerGroup, ...], ...] = ()
    if draft is not None:
        networks = draft.definition.networks
        draft_groups = tuple(each.groups(draft_name(number), groups) for number, each in enumerate(networks))
        its_groups = tuple(itertools.chain(*draft_groups))
        if any(group.is_recurrent for group in its_groups):
            raise ConfigError(
                "expected a drafter that keeps no state of a sequence, got one that does: states cannot go back behind "
                "a refused guess; use another drafter, or ngram"
            )
        its_facts = model_facts(counted_as(config, device), draft.checkpoint, networks[0], its_groups)
        facts = facts.with_drafter(its_facts, shares_weights=draft.checkpoint.location == checkpoint.location)
    takes_texts_whole = usage is AttentionUsage.EMBED_WHOLE
    resolved = resolve(config, replace(facts, takes_texts_whole=takes_texts_whole), device, ledger)
    for each in () if draft is None else draft.definition.networks:
        if each.max_positions < resolved.max_model_len:
            raise ConfigError(
                f"expected a drafter for {resolved.max_model_len} positions, as the engine has, got one for "
                f"{each.max_positions}; lower max_model_len"
            )
    model = str(checkpoint.location) if config.model is None else config.model
    return Blueprint(resolved, groups, usage, prove_words(config, model), draft, draft_groups)


def choose(
    blueprint: Blueprint, checkpoint: Checkpoint, definition: Definition, ledger: Ledger
) -> tuple[tuple[GroupSelection, ...], tuple[tuple[GroupSelection, ...], ...]]:
    """Chooses among the installed backends, for the model and each network that drafts, and tells what is forgone."""
    candidates = registry.installed()
    selections, drafts = blueprint.select(candidates), blueprint.select_for_drafts(candidates)
    tell_choices(blueprint.config, blueprint.groups, selections, ledger)
    note_keep(blueprint.config, checkpoint, definition, blueprint.groups, ledger)
    return selections, drafts


def draft_name(number: int) -> str:
    """Returns the beginning of the names of a drafting network's parts."""
    return f"draft{number}."


def _build(
    blueprint: Blueprint,
    checkpoint: Checkpoint,
    ledger: Ledger,
    on_step: OnBuildStep,
    definition: Definition,
    load: Callable[[WeightReader], ModelT],
    load_draft: Callable[[ModelT, ReaderOf], LoadedDraft],
    role: Role = ALONE_ROLE,
) -> Runtime:
    resolved, groups, device = blueprint.config, blueprint.groups, blueprint.config.device
    selections, draft_selections = choose(blueprint, checkpoint, definition, ledger)
    everything = (*selections, *itertools.chain(*draft_selections))
    import_chosen(everything)
    times = BuildTimes()
    launcher = make_launcher(resolved, everything, ledger)
    before = allocated_bytes(device)
    with times.measured(BuildPhase.WEIGHTS):
        others = () if blueprint.draft is None else blueprint.draft.definition.target_tensors
        reader = _reader(resolved, checkpoint, launcher, ledger, on_step, others, role.links)
        scales = load_cache_scales(reader, groups, resolved.cache_dtype)
        with single_threaded():
            model = load(reader)
            draft = load_draft(model, lambda its: _reader(resolved, its, launcher, ledger, on_step, drafts=True))
    weight_bytes = allocated_bytes(device) - before
    store = make_store(resolved, groups, role.make_allocator, scales, blueprint.draft_groups, role.watcher(0))
    accounts = [
        make_store(resolved, groups, watcher=role.watcher(1 + other), device=NO_ENTRIES)
        for other in range(role.num_others)
    ]
    most = 0 if resolved.speculation is None else resolved.speculation.num_speculative_tokens
    drafting = [
        NetworkParts(draft_name(number), *each, max_rollout=most)
        for number, each in enumerate(zip(draft.models, blueprint.draft_groups, draft_selections, strict=True))
    ]
    with _compiling(resolved, times, on_step):
        runtime = assemble_runtime(
            resolved,
            definition,
            model,
            groups,
            selections,
            store,
            launcher,
            draft,
            drafting,
            identity=f"{checkpoint.identity} {resolved.dtype} {resolved.quantization.value}",
            role=role,
            others=accounts,
        )
    return replace(runtime, times=times, weight_bytes=weight_bytes)


def _load_draft(source: DraftSource | None, target: Decoder, reader_of: ReaderOf) -> LoadedDraft:
    return NO_DRAFT if source is None else source.definition.load(target, reader_of(source.checkpoint))


def _reader(
    config: ResolvedConfig,
    checkpoint: Checkpoint,
    launcher: CpuLauncher,
    ledger: Ledger,
    on_step: OnBuildStep,
    loaded_elsewhere: Sequence[str] = (),
    links: Links = NO_LINKS,
    *,
    drafts: bool = False,
) -> WeightReader:
    """Reads the weights of a checkpoint in the form that the chosen kernels take.

    Tensors whose names begin with one of `loaded_elsewhere` belong to networks that draft. The checkpoint of a network
    that `drafts` may have no quantised weights, even if those of the model are to stay quantised.
    """
    keeps = not drafts or any(info.is_quantised for info in checkpoint.tensors.values())

    def on_progress(done: int, total: int) -> None:
        on_step(BuildStep(BuildPhase.WEIGHTS, checkpoint.location.name, done, total))

    on_progress(0, len(checkpoint.tensors))
    return WeightReader(
        checkpoint,
        config.dtype,
        config.device.torch_device,
        ledger,
        on_progress,
        kept=kept_weights(config, launcher, ledger) if keeps else None,
        skip_check=config.skip_weight_check,
        expert_compute=expert_compute(config),
        make_linear=linear_maker(config, launcher),
        loaded_elsewhere=loaded_elsewhere,
        links=links,
    )


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
    if not runtime.role.leads:
        return
    if runtime.config.device.kind is not DeviceKind.CUDA:
        if runtime.config.layer_kernels is not LayerKernels.NUMBA:
            return
        kinds = few_kinds(kinds)
    with runtime.times.measured(BuildPhase.KERNELS):
        for number, network in enumerate(runtime.networks):
            # Only the model itself sees trees of guesses.
            own = [kind for kind in kinds if not (number and kind.is_tree)]
            its_mask = CONTEXT if network.only_borrows else mask
            WarmUp(runtime.config, runtime.store, network, its_mask).run(own, on_step)


def _capture_graphs(runtime: Runtime, ledger: Ledger, on_step: OnBuildStep) -> None:
    """Captures the graphs, or records the programs, that the config asks for."""
    if runtime.config.graph_sizes and runtime.role.leads:
        recorder = make_recorder(runtime)
        with runtime.times.measured(BuildPhase.GRAPHS):
            for network in runtime.networks:
                network.capture(recorder, ledger, on_step)
        if runtime.config.has_trees:
            ledger.note(
                "num_branches",
                "steps with trees of guesses run eagerly: no attention backend has tree masks in a captured step",
            )


def make_recorder(runtime: Runtime) -> Recorder:
    """What records steps on the runtime's device."""
    device = runtime.config.device
    return CudaRecorder(device.torch_device) if device.kind is DeviceKind.CUDA else CpuRecorder(runtime.launcher)


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
            work: select_backend(
                offer_for(offer, group, groups, candidates),
                requirement(config, group, work, usage),
                group.name,
                doubt,
                work,
            )
            for work, offer in offers.items()
        }
        for group in groups
    )


def make_store(
    config: ResolvedConfig,
    groups: Sequence[LayerGroup],
    make_allocator: Callable[[int], PageAllocator] = PageAllocator,
    scales: ScalesByPlane | None = None,
    drafting: Sequence[Sequence[LayerGroup]] = (),
    watcher: CacheWatcher = UNWATCHED,
    device: torch.device | None = None,
) -> CacheStore:
    """Creates the pools of every group. `scales` are those of all layers, None if the cache's dtype has none.

    `drafting` are the groups of each network that drafts; their scales are 1. `watcher` hears of copies. Entries are on
    the `device`, if there is one, instead of the config's.
    """
    is_hot = config.hot_buffer_size > 0
    return CacheStore(
        [group.cache_spec(config.cache_dtype, scales, with_hot_entries=is_hot) for group in groups],
        CacheLimits(
            config.num_pages,
            config.page_size,
            config.max_rows,
            config.max_model_len,
            config.states_per_row,
            config.max_checkpoints,
        ),
        config.device.torch_device if device is None else device,
        drafting=[
            [group.cache_spec(config.cache_dtype, with_hot_entries=is_hot) for group in network]
            for network in drafting
            if owns_entries(network)
        ],
        poison=config.paranoid,
        make_allocator=make_allocator,
        watcher=watcher,
    )


def assemble_runtime(
    config: ResolvedConfig,
    definition: Definition,
    model: Model,
    groups: Sequence[LayerGroup],
    selections: Sequence[GroupSelection],
    store: CacheStore,
    launcher: CpuLauncher,
    loaded: LoadedDraft = NO_DRAFT,
    drafting: Sequence[NetworkParts] = (),
    make_blocks: Callable[[CacheStore, int], BlockStore] = HostBlocks,
    identity: str = "",
    role: Role = ALONE_ROLE,
    others: Sequence[CacheStore] = (),
) -> Runtime:
    """Builds everything from the workspace to the runner, for the model and the networks `loaded` that draft for it.

    `drafting` are the parts of each of them. `make_blocks` makes the store of evicted pages, given its size in
    bytes, if the config asks for one; `identity` names the weights in it. `others` are the accounts of the caches of
    other replicas.
    """
    device = config.device.torch_device
    workspace = Workspace(device, config.scratch_bytes, poison=config.paranoid)
    operations = make_operations(config.layer_kernels, device, config.dtype, launcher)
    shared = Shared(config, store, workspace, operations, launcher)
    parts = (NetworkParts("", model, tuple(groups), tuple(selections)), *drafting)
    owned = iter(store.networks)
    beside = role.companions((store, *others), exchanges_rows=definition.exchanges_rows)
    companions = itertools.chain((beside,), itertools.repeat(NOBODY))
    networks = [
        assemble_network(
            shared,
            each,
            next(owned) if owns_entries(each.groups) else store.main.lent({group.owner for group in each.groups}),
            next(companions),
            role.links,
        )
        for each in parts
    ]
    workspace.seal()
    blocks = make_blocks(store, config.host_cache_bytes) if config.host_cache_bytes else None
    return Runtime(
        config=config,
        definition=definition,
        store=store,
        workspace=workspace,
        network=networks[0],
        draft=DraftRuntime(loaded, tuple(networks[1:]), operations),
        operations=operations,
        launcher=launcher,
        times=BuildTimes(),
        weight_bytes=0,
        role=role,
        others=tuple(others),
        tiers=() if blocks is None else (LowerTier(store, blocks, identity),),
    )
