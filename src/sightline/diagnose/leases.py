"""The leases of an engine's workspace, found without its device: backends and activations are built without memory.

Builds what an engine builds, on torch's meta device, where tensors have shapes only. What cannot be built so is named,
with the reason. Does not know what a lease is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sightline.attention.capability import lacks_package
from sightline.attention.contract import StepLimits
from sightline.attention.groups import LayerGroup
from sightline.attention.workspace import MAIN_LANE, LeaseEntry, Workspace
from sightline.cache.store import CacheStore
from sightline.core.config import LayerKernels
from sightline.core.errors import SightlineError
from sightline.core.resolution import ResolvedConfig
from sightline.kernels.cpu.program import inline_launcher
from sightline.layers.scratch import Activations
from sightline.layers.torch_operations import TorchOperations
from sightline.models.described_weights import load_without_memory
from sightline.opening import ModelDescription
from sightline.runner.backend_choice import GroupSelection
from sightline.runner.build import Blueprint, make_store
from sightline.runner.coordinators import make_coordinator
from sightline.runner.networks import Shared, bind_group, step_limits


@dataclass(frozen=True)
class Sketch:
    """What an engine would hold, as far as it can be found out without its device."""

    store: CacheStore
    """Pools without memory."""
    leases: tuple[LeaseEntry, ...]
    unknown: tuple[tuple[str, str], ...]
    """What takes leases too, and why they are not known."""


def without_memory(config: ResolvedConfig) -> ResolvedConfig:
    """The config on a device whose tensors have no memory."""
    device = replace(config.device, torch_device=torch.device("meta"))
    return replace(config, device=device, layer_kernels=LayerKernels.TORCH, graph_sizes=(), paranoid=False)


def sketch(description: ModelDescription, blueprint: Blueprint, selections: Sequence[GroupSelection]) -> Sketch:
    """Builds the pools, the backends and the activations of the model's own network."""
    # Hot entries are copied between two kinds of memory: their buffers need a device.
    config = replace(without_memory(blueprint.config), hot_buffer_size=0)
    store = make_store(config, blueprint.groups, drafting=blueprint.draft_groups)
    workspace = Workspace(config.device.torch_device, max(config.scratch_bytes, 1 << 40))
    shared = Shared(config, store, workspace, TorchOperations(), inline_launcher())
    limits, unknown = step_limits(config), list[tuple[str, str]]()
    for group, selection in zip(blueprint.groups, selections, strict=True):
        unknown += _build(shared, limits, group, selection)
    model, _ = load_without_memory(description.checkpoint, description.load)
    activations = Activations(
        workspace,
        MAIN_LANE,
        config.max_step_tokens,
        config.dtype,
        shared.operations,
        turns=False,
        num_replicas=description.config.data_parallel_size,
    )
    model.reserve(activations.shaped(config.max_step_tokens))
    if blueprint.draft_groups:
        unknown.append(("networks that draft", "they are leased for while they are built"))
    return Sketch(store, workspace.ledger(), tuple(unknown))


def _build(shared: Shared, limits: StepLimits, group: LayerGroup, selection: GroupSelection) -> list[tuple[str, str]]:
    """Builds the backends of a group one by one; returns those that cannot be built here, and why."""
    coordinator = make_coordinator(shared.config, group, shared.store.cache(group.owner), limits)
    refused = []
    for candidate, each in {id(each.candidate): (each.candidate, each) for each in selection.values()}.values():
        owner = f"{group.name}.{candidate.name}"
        if lacks_package(each.capability):
            refused.append((owner, f"{each.capability.package} is not installed here"))
            continue
        own = {work: other for work, other in selection.items() if other.candidate is candidate}
        try:
            bind_group(shared, limits, group, own, coordinator)
        except (SightlineError, RuntimeError) as error:
            # A library may insist on its device, or on values of tensors.
            refused.append((owner, " ".join(str(error).split())[:160]))
    return refused
