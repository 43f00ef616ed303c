"""Backends that are right as long as nobody asks for much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sightline.attention.backends.torch.backend import TorchBackend
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    Lse,
    SoftmaxInputs,
    StepView,
)
from sightline.attention.selection import Candidate
from sightline.attention.spec import SoftmaxSpec

IsWrong = Callable[[StepView, int], bool]
"""Of a step and a layer of the group."""


@dataclass(frozen=True, eq=False)
class _WrongPlan(AttentionPlan[SoftmaxInputs]):
    inner: AttentionPlan[SoftmaxInputs]
    step: StepView
    is_wrong: IsWrong

    def prepare(self) -> None:
        self.inner.prepare()

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Lse | None:
        lse = self.inner.run(layer, inputs, out)
        if self.is_wrong(self.step, layer):
            out.neg_()
        return lse


def wrong_backend(is_wrong: IsWrong) -> type[AttentionBackend[SoftmaxSpec, SoftmaxInputs]]:
    """The torch backend, with the sign of outputs turned where `is_wrong` says so."""

    class Wrong(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
        capabilities: ClassVar[tuple[Capability, ...]] = TorchBackend.capabilities

        def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
            self._inner = TorchBackend(context)

        def plan(self, step: StepView, buffers: PlanBuffers) -> _WrongPlan:
            return _WrongPlan(self._inner.plan(step, buffers), step, is_wrong)

    return Wrong


def wrong_candidate(name: str, is_wrong: IsWrong) -> Candidate:
    return Candidate.of(name, wrong_backend(is_wrong), "a-package", by_default=True)
