"""Explains an engine before anything is built: what would run, why, and what it would take.

Asks the code that an engine is built with; decides nothing itself. Does not know how the answer is printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby

import torch

from sightline.attention.backends import registry
from sightline.attention.capability import Requirement, Work
from sightline.attention.declared_rows import row_labels
from sightline.attention.dimensions import Dimension
from sightline.attention.groups import LayerGroup
from sightline.attention.proof import ProofBook, dtype_name
from sightline.attention.selection import Selection, nearest_miss, serving_row
from sightline.core.command_line import flag
from sightline.core.config import EngineConfig
from sightline.core.device import Device, DeviceKind, DeviceMemory
from sightline.core.environment import proof_folder
from sightline.core.errors import ConfigError, ModelTooLargeError
from sightline.core.ledger import Ledger
from sightline.core.resolution import ResolvedConfig
from sightline.diagnose.explanation import (
    NO_REMEDY,
    Capacity,
    ExplainedChoice,
    ExplainedGroup,
    ExplainedMemory,
    Explanation,
    PlannedMemory,
    RefusedBackend,
)
from sightline.diagnose.leases import Sketch, sketch
from sightline.diagnose.planned_step import RowLength, plan_steps
from sightline.opening import ModelDescription, describe_model
from sightline.runner.backend_choice import GroupSelection
from sightline.runner.build import Blueprint, choose, draft_name
from sightline.runner.demand import requirement
from sightline.runner.graphs import captured_shapes

_AMPLE = DeviceMemory(1 << 60, 1 << 60, 0)
"""Memory that any model fits: what would be chosen is told even if the model does not fit."""
_SETTING = {Work.PREFILL: "prefill_attention_backend"}
"""The setting that names the backend for a kind of rows, where it is not that for decode."""


@dataclass(frozen=True)
class _Plan:
    """Everything that was decided."""

    description: ModelDescription
    blueprint: Blueprint
    selections: tuple[GroupSelection, ...]
    draft_selections: tuple[tuple[GroupSelection, ...], ...]
    shortage: str


def explain(config: EngineConfig, device: Device, rows: Sequence[RowLength] = ()) -> Explanation:
    """Explains the engine of a config on a device, which need not be here, and a step of these rows.

    Raises `NoBackendError`, which lists every backend and its reasons, if a group has none.
    """
    ledger = Ledger(strict=config.strict)
    if not device.is_here:
        config = replace(config, device=device.kind.value)
    description = describe_model(config, ledger)
    plan = _decide(description, device, ledger)
    resolved = plan.blueprint.config
    steps = plan_steps(plan.blueprint, plan.selections, rows) if rows and not plan.shortage else ()
    _note_unknown(device, plan, ledger)
    return Explanation(
        model=config.model or description.checkpoint.location.name,
        device=device.name,
        compute_capability=device.compute_capability,
        is_here=device.is_here,
        dtype=dtype_name(resolved.dtype),
        settings=_settings(resolved),
        groups=tuple(_explained_groups(plan, device)),
        memory=_memory(plan, device, sketch(description, plan.blueprint, plan.selections)),
        capacity=_capacity(resolved) if not plan.shortage else Capacity(0, 0, resolved.page_size, 0, 0, 0),
        captured=tuple(_captured(resolved, plan.selections)),
        steps=steps,
        degradations=ledger.degradations,
        notes=ledger.notes,
    )


def _decide(description: ModelDescription, device: Device, ledger: Ledger) -> _Plan:
    """Draws the engine up. A model that does not fit is drawn up with ample memory, and the shortage is told."""
    shortage = ""
    try:
        blueprint = description.draw_up(ledger, device)
    except ModelTooLargeError as error:
        shortage = str(error)
        ledger.degrade("memory", f"the engine cannot start: {error}", "see what the message says")
        blueprint = description.draw_up(ledger, replace(device, memory=_AMPLE))
    chosen = choose(blueprint, description.checkpoint, description.definition, ledger)
    return _Plan(description, blueprint, *chosen, shortage)


def _note_unknown(device: Device, plan: _Plan, ledger: Ledger) -> None:
    """Notes what is assumed about a machine that is not here."""
    if device.is_here:
        return
    every = (*plan.selections, *(each for network in plan.draft_selections for each in network))
    packages = sorted(
        {each.capability.package for group in every for each in group.values() if each.capability.package}
    )
    assumed = f"with {', '.join(packages)} installed, " if packages else ""
    ledger.note(
        device.name, f"is not here: the engine is explained for an empty one, {assumed}and nothing is proven there"
    )


def _settings(config: ResolvedConfig) -> dict[str, object]:
    """Every resolved setting, as JSON data."""
    told = {field.name: vars(config)[field.name] for field in fields(config)}
    told |= {"device": config.device.name, "memory": asdict(config.memory)}
    return {name: _plain(value) for name, value in told.items()}


def _plain(value: object) -> object:
    match value:
        case None | bool() | int() | float() | str() | dict():
            return value
        case torch.dtype():
            return dtype_name(value)
        case tuple():
            return [_plain(each) for each in value]
        case _:
            return str(vars(value).get("_value_", value))


def _capacity(config: ResolvedConfig) -> Capacity:
    return Capacity(
        config.cache_tokens,
        config.num_pages,
        config.page_size,
        config.max_rows,
        config.max_step_tokens,
        config.max_model_len,
    )


def _captured(config: ResolvedConfig, selections: Sequence[GroupSelection]) -> Iterator[str]:
    """Yields the steps that would be captured."""
    decoded = [size for size in config.graph_sizes if size <= config.max_rows]
    rows = [{work: each.capability for work, each in selection.items()} for selection in selections]
    yield from map(str, captured_shapes(config.graph_sizes, decoded, rows))


def _explained_groups(plan: _Plan, device: Device) -> Iterator[ExplainedGroup]:
    """Yields the groups of the model, then those of each network that drafts for it."""
    blueprint = plan.blueprint
    networks = [("", blueprint.groups, plan.selections)]
    networks += [
        (draft_name(number).removesuffix("."), *each)
        for number, each in enumerate(zip(blueprint.draft_groups, plan.draft_selections, strict=True))
    ]
    for network, groups, selections in networks:
        for group, selection in zip(groups, selections, strict=True):
            yield _explained(blueprint, network, group, selection, device)


def _explained(
    blueprint: Blueprint, network: str, group: LayerGroup, selection: GroupSelection, device: Device
) -> ExplainedGroup:
    config, spec = blueprint.config, group.spec
    needs = {work: requirement(config, group, work, blueprint.usage) for work in selection}
    demands = [demand for need in needs.values() for demand in need.demands]
    policies = {str(policy) for demand in demands for policy in demand.values.get(Dimension.POLICY, ())}
    pools = group.cache_spec(config.cache_dtype).pools if config.num_pages else ()
    choices = [_choice(blueprint, each, work, needs[work], device) for work, each in selection.items()]
    return ExplainedGroup(
        network=network,
        name=group.name,
        layers=group.layers,
        label=spec.label,
        kind=spec.kind.value,
        spec={name: _plain(value) for name, value in vars(spec).items()},
        features=tuple(sorted({each.value for need in needs.values() for each in need.features})),
        page_size=config.page_size,
        cache_dtype=dtype_name(group.cache_dtype(config.cache_dtype)),
        policies=tuple(sorted(policies)),
        borrows_from=None if group.loan is None else group.loan.lender,
        bytes_per_token=int(sum(pool.bytes_per_token for pool in pools)),
        choices=tuple(_joined(choices)),
    )


def _joined(choices: Sequence[ExplainedChoice]) -> Iterator[ExplainedChoice]:
    """Joins neighbouring kinds of rows about which the same is told, but for the name of the kind."""

    def told(choice: ExplainedChoice) -> tuple[object, ...]:
        [work] = choice.works
        reasons = [tuple(each.replace(f" at {work}", "") for each in refused.reasons) for refused in choice.refused]
        nameless = [replace(refused, reasons=()) for refused in choice.refused]
        return (choice.name, choice.row, choice.unproven, reasons, nameless)

    for _, same in groupby(choices, key=told):
        several = list(same)
        yield replace(several[0], works=tuple(work for each in several for work in each.works))


def _choice(
    blueprint: Blueprint, selection: Selection, work: Work, need: Requirement, device: Device
) -> ExplainedChoice:
    candidate, capability = selection.candidate, selection.capability
    rows = candidate.rows()
    return ExplainedChoice(
        works=(work.value,),
        name=candidate.name,
        row=row_labels(rows)[rows.index(capability)],
        unproven=_doubts(blueprint, selection, need, device),
        graph=capability.graph.value,
        refused=tuple(_refused(selection, work, need)),
    )


def _doubts(blueprint: Blueprint, selection: Selection, need: Requirement, device: Device) -> tuple[str, ...]:
    """Why the chosen row is not proven."""
    if not device.is_here:
        return ("declared: proofs are made on the machine itself",)
    doubt = ProofBook(proof_folder()).doubting(blueprint.prove_words)
    return doubt(selection.candidate, selection.capability, need)


def _refused(selection: Selection, work: Work, need: Requirement) -> Iterator[RefusedBackend]:
    """Yields every backend that was not chosen, with what would make it serve."""
    misses = {miss.name: miss for miss in selection.misses}
    candidates = {each.name: each for each in registry.installed()}
    by_name = flag(_SETTING.get(work, "decode_attention_backend"))
    for name, told in selection.refused:
        reasons, serves_kind = told, True
        try:
            serves_kind = any(need.spec.kind in row.spec_kinds for row in candidates[name].rows())
            miss = misses.get(name)
            if miss is None and serving_row(candidates[name], need, work) is None:
                # It was not asked for, and could not serve either.
                miss = nearest_miss(candidates[name], need, work)
                reasons = (*told, *miss.reasons)
            remedy = f"{by_name} {name}" if miss is None else _remedy(miss.remedies)
        except ConfigError as error:
            reasons, remedy = (*told, str(error)), "mend or uninstall the package that has it"
        yield RefusedBackend(name, reasons, remedy, serves_kind)


def _remedy(remedies: Sequence[str]) -> str:
    return NO_REMEDY if not remedies or "" in remedies else "; ".join(remedies)


def _memory(plan: _Plan, device: Device, found: Sketch) -> ExplainedMemory:
    """The memory ledger before anything is taken."""
    config = plan.blueprint.config
    budget, is_card = config.memory, config.device.kind is DeviceKind.CUDA
    parts = [PlannedMemory("weights", budget.weight_bytes)]
    if not plan.shortage:
        parts += _cache_parts(config, found)
        leases = sorted(_by_owner(found).items(), key=lambda each: -each[1])
        unknown = "; ".join(f"{what} is not known: {why}" for what, why in found.unknown)
        parts.append(PlannedMemory("workspace", sum(size for _, size in leases), details=tuple(leases), remark=unknown))
        left = budget.scratch_bytes - sum(size for _, size in leases)
        parts.append(PlannedMemory("plan buffers and the rest of scratch", max(0, left), is_limit=True))
    if is_card and not plan.shortage:
        parts += [
            PlannedMemory("CUDA graphs", budget.graph_bytes, is_limit=True, remark="the logits that they keep"),
            PlannedMemory("logits, drawing, in steps", budget.output_bytes, is_limit=True),
            PlannedMemory("kernels, libraries", budget.kernel_bytes, is_limit=True),
        ]
    memory = budget.start if not plan.shortage else (device.memory or DeviceMemory(0, 0, 0))
    allowed = budget.allowed_bytes if not plan.shortage else 0
    return ExplainedMemory(memory.total_bytes, allowed, tuple(parts), plan.shortage)


def _by_owner(found: Sketch) -> dict[str, int]:
    """Bytes of leases by owner: what a backend or the activations take."""
    sizes = dict[str, int]()
    for lease in found.leases:
        sizes[lease.owner] = sizes.get(lease.owner, 0) + lease.num_bytes
    return sizes


def _cache_parts(config: ResolvedConfig, found: Sketch) -> Iterator[PlannedMemory]:
    """Yields the pools, and the states of recurrent layers."""
    caches = [cache for network in found.store.networks for cache in network.groups]
    pools = {f"{each.group}.{name}": pool.num_bytes for each in caches for name, pool in each.pools.items()}
    states = {each.group: each.states.num_bytes for each in caches if each.states.num_bytes}
    if pools:
        remark = f"{config.cache_tokens:,} tokens in {config.num_pages:,} pages of {config.page_size}"
        if config.hot_buffer_size:
            remark += "; HiSparse keeps entries that are chosen from in host memory, which is not divided here"
        yield PlannedMemory("cache pools", sum(pools.values()), details=tuple(pools.items()), remark=remark)
    if states:
        remark = f"{config.states_per_row} for each row, {config.max_checkpoints:,} checkpoints"
        yield PlannedMemory("recurrent states", sum(states.values()), details=tuple(states.items()), remark=remark)
