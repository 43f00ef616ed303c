"""Contenders for tests of the measurement: right ones, planted faults, and peers that do as they are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from sightline.attention.backends.torch.backend import TorchBackend
from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, Lse, SoftmaxInputs, StepView
from sightline.attention.selection import Candidate
from sightline.attention.spec import SoftmaxSpec
from sightline.bench.attention import surroundings as surroundings_module
from sightline.bench.attention.data import ShapeData
from sightline.bench.attention.measure import Field, measure_attention
from sightline.bench.attention.peers import AttentionPeer, PeerKernel
from sightline.bench.attention.report import lines
from sightline.bench.attention.results import AttentionReport
from sightline.bench.attention.shapes import SHAPE_SETS, find_shapes
from sightline.bench.attention.timing import Clock, Rates, TimingBudget
from sightline.core.device import detect_device

CPU = detect_device("cpu")
QUICK = TimingBudget(rounds=2, sample_seconds=1e-4)
MEASURED = Rates(bytes_per_second=4.28e12, operations_per_second=694e12)
"""Of the machine that the peers were first measured on."""


class VirtualClock(Clock):
    """A clock that only moves when a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def seconds(self, work: Callable[[], object]) -> float:
        start = self.now
        work()
        return self.now - start


class _Changed(AttentionPlan[SoftmaxInputs]):
    """A plan with a fault."""

    def __init__(self, plan: AttentionPlan[SoftmaxInputs], fault: Callable[..., None]) -> None:
        self._plan, self._fault = plan, fault

    def prepare(self) -> None:
        self._plan.prepare()

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Lse | None:
        self._fault(self._plan, layer, inputs, out)
        return None


def planted(name: str, fault: Callable[..., None]) -> Candidate:
    """The torch backend with a fault."""

    class Planted(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
        capabilities = TorchBackend.capabilities

        def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
            self._right = TorchBackend(context)

        def plan(self, step: StepView, buffers: PlanBuffers) -> AttentionPlan[SoftmaxInputs]:
            return _Changed(self._right.plan(step, buffers), fault)

    return Candidate.of(name, Planted, "tests", by_default=False)


def give_garbage(plan: AttentionPlan[Any], layer: int, inputs: SoftmaxInputs, out: Tensor) -> None:
    plan.run(layer, inputs, out)
    out.mul_(1.01)


def forget_the_write(plan: AttentionPlan[Any], layer: int, inputs: SoftmaxInputs, out: Tensor) -> None:
    plan.run(layer, replace(inputs, v=inputs.v * 0), out)


def stumble(plan: AttentionPlan[Any], layer: int, inputs: SoftmaxInputs, out: Tensor) -> None:
    raise RuntimeError("no such kernel")


TORCH = Candidate.of("torch", TorchBackend, "sightline", by_default=True)
TORCH_LATENT = Candidate.of("torch-latent", TorchLatentBackend, "sightline", by_default=True)


class StubPeer(AttentionPeer):
    """A peer on the CPU that computes with whatever a test gives it."""

    forms = frozenset((shape.spec.kind, shape.row_kind) for shape in SHAPE_SETS["tiny"])
    devices = frozenset({CPU.kind})

    def __init__(self, name: str, run: Callable[[int], Tensor], missing: str | None = None) -> None:
        self.name, self._run, self._missing = name, run, missing

    def missing(self) -> str | None:
        return self._missing

    def kernel(self, data: ShapeData, surroundings: surroundings_module.Surroundings) -> PeerKernel:
        return PeerKernel(self._run)


def measured(
    shapes: str, *candidates: Candidate, peers: tuple[AttentionPeer, ...] = (), max_pool_bytes: int | None = None
) -> AttentionReport:
    everybody = Field(CPU, candidates, (TORCH, TORCH_LATENT), peers, QUICK, max_pool_bytes)
    return measure_attention(find_shapes(shapes.split(",")), everybody, lambda report, shape, seconds: None)


def text_of(report: AttentionReport) -> str:
    return "\n".join(lines(report))
