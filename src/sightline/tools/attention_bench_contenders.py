"""Who is measured: Sightline's backends on a shape, each with a plan of its own over the shape's pools.

Owns what a contender is and how a backend becomes one. Does not know other people's kernels: `attention_peers` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from sightline.attention.capability import Capability, GraphLevel, Requirement, refusals
from sightline.attention.contract import BackendContext, Limits
from sightline.attention.planner import GroupBinding, Planner
from sightline.attention.selection import Candidate
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.core.device import Device
from sightline.tools.attention_bench_data import ShapeData
from sightline.tools.attention_bench_shapes import Shape

_SCRATCH_BYTES = 1 << 36


class Origin(Enum):
    """Whose contender it is."""

    OURS = "backend"
    PEER = "peer"


@dataclass(frozen=True, eq=False)
class Contender:
    """Something that computes a shape, planned and ready."""

    name: str
    origin: Origin
    layer: Callable[[int], Tensor]
    """Runs a whole layer, cache write included, and gives its output."""
    kernel: Callable[[int], Tensor] | None
    """Runs attention alone, where that can be had."""
    plan: Callable[[], object] | None
    """Host work, once a step."""
    prepare: Callable[[], object] | None
    """Device work, once a step."""
    no_graph: str | None
    """Why a graph cannot hold it."""


def requirement(shape: Shape, device: Device) -> Requirement:
    """What the shape needs of a backend."""
    return Requirement(shape.spec, device, shape.dtype, shape.dtype, shape.page_size)


def fitting_row(candidate: Candidate, shape: Shape, device: Device) -> tuple[Capability | None, tuple[str, ...]]:
    """The first capability row that serves the shape, or the reasons of the row that comes nearest."""
    need = requirement(shape, device)
    refused = []
    for capability in candidate.load().capabilities:
        reasons = refusals(capability, need)
        if not reasons:
            return capability, ()
        refused.append(reasons)
    return None, min(refused, key=len, default=("declares no capability",))


def selected(candidates: Sequence[Candidate], shape: Shape, device: Device) -> str | None:
    """The backend that an engine would use for such rows."""
    for candidate in candidates:
        if candidate.by_default and fitting_row(candidate, shape, device)[0] is not None:
            return candidate.name
    return None


def build_ours(candidate: Candidate, capability: Capability, data: ShapeData) -> Contender:
    """A backend of Sightline, planned for the shape's batch."""
    planner = _planner(candidate, capability, data)
    planned, out = planner.plan(data.batch), data.new_out()

    def layer(index: int) -> Tensor:
        planned.attend(index, data.inputs[index], out)
        return out

    planned.prepare()
    no_graph = None if capability.graph is GraphLevel.FULL else f"declares graph level {capability.graph.value}"
    return Contender(
        candidate.name, Origin.OURS, layer, None, lambda: planner.plan(data.batch), planned.prepare, no_graph
    )


def _planner(candidate: Candidate, capability: Capability, data: ShapeData) -> Planner:
    shape, target = data.shape, data.device.torch_device
    limits = Limits(shape.num_rows, shape.num_tokens, shape.length, (MAIN_LANE,))
    workspace = Workspace(target, _SCRATCH_BYTES)
    [cache] = data.store.groups
    context = BackendContext(data.group.name, shape.spec, cache, workspace, limits, shape.dtype, target)
    backend = candidate.load()(context)
    workspace.seal()
    return Planner([GroupBinding(data.group, cache, backend, capability)], limits, target)
