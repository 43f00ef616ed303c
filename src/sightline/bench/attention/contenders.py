"""Contenders: whatever computes a shape. Makes one of a backend of Sightline; `peers` does so for other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from sightline.attention.bindings import GroupBinding
from sightline.attention.capability import Capability, GraphLevel, Requirement, Work, decode_work
from sightline.attention.contract import BackendContext, StepLimits
from sightline.attention.planner import Planner
from sightline.attention.selection import Candidate, Offer, select_backend
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.bench.attention.data import ShapeData
from sightline.bench.attention.shapes import RowKind, Shape
from sightline.core.device import Device
from sightline.core.errors import NoBackendError
from sightline.kernels.cpu.program import inline_launcher

_SCRATCH_BYTES = 1 << 36


class Origin(Enum):
    """Where a contender comes from."""

    OURS = "backend"
    PEER = "peer"


@dataclass(frozen=True, eq=False)
class Contender:
    """A planned computation of a shape."""

    name: str
    origin: Origin
    layer: Callable[[int], Tensor]
    """Runs a whole layer, including the cache write, and returns its output."""
    kernel: Callable[[int], Tensor] | None
    """Runs attention alone, if it can be separated."""
    plan: Callable[[], object] | None
    """Host work per step."""
    prepare: Callable[[], object] | None
    """Device work per step."""
    no_graph: str | None
    """Why a CUDA graph cannot contain it; None if it can."""


def requirement(shape: Shape, device: Device) -> Requirement:
    """What a backend must support to serve the shape."""
    return Requirement(shape.spec, device, shape.dtype, shape.dtype, shape.page_size)


def work_of(shape: Shape) -> Work:
    """The kind of work for which selection chooses a backend."""
    if shape.row_kind is RowKind.PREFILL:
        return Work.PREFILL
    return decode_work(shape.num_rows)


def selected(candidates: Sequence[Candidate], shape: Shape, device: Device) -> str | None:
    """The name of the backend that an engine would use for such rows, or None."""
    offered = Offer(tuple(candidate for candidate in candidates if candidate.by_default))
    try:
        return select_backend(offered, requirement(shape, device), shape.name, work=work_of(shape)).candidate.name
    except NoBackendError:
        return None


def build_ours(candidate: Candidate, capability: Capability, data: ShapeData) -> Contender:
    """Builds a backend of Sightline and plans the shape's batch with it."""
    planner = _planner(candidate, capability, data)
    planned, out = planner.plan(data.batch), data.new_out()

    def layer(index: int) -> Tensor:
        planned.attend(index, data.inputs[index], out)
        return out

    planned.prepare()
    return Contender(
        name=candidate.name,
        origin=Origin.OURS,
        layer=layer,
        kernel=None,
        plan=lambda: planner.plan(data.batch),
        prepare=planned.prepare,
        no_graph=_no_graph(capability, data.shape),
    )


def _no_graph(capability: Capability, shape: Shape) -> str | None:
    is_served = {
        GraphLevel.NONE: False,
        GraphLevel.DECODE: shape.row_kind is RowKind.DECODE,
        GraphLevel.FULL: True,
    }[capability.graph]
    return None if is_served else f"declares graph level {capability.graph.value}"


def _planner(candidate: Candidate, capability: Capability, data: ShapeData) -> Planner:
    shape, target = data.shape, data.device.torch_device
    limits = StepLimits(shape.num_rows, shape.num_tokens, shape.length, (MAIN_LANE,), max_rollout=0)
    workspace = Workspace(target, _SCRATCH_BYTES)
    [cache] = data.store.groups
    context = BackendContext(
        data.group.name,
        shape.spec,
        cache,
        workspace,
        limits,
        shape.dtype,
        target,
        inline_launcher(),
        ResidentEntries(cache),
    )
    backend = candidate.load()(context)
    binding = GroupBinding.alone(data.group, cache, backend, capability)
    planner = Planner([binding], limits, data.store.lengths, workspace)
    workspace.seal()
    return planner
