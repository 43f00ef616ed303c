"""The oracle of convolutions as a backend: token by token, in fp32. Slow on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    ConvolutionInputs,
    Lse,
    StepView,
)
from sightline.attention.kinds import CONVOLUTION_FEATURES, SpecKind
from sightline.attention.oracle.recurrent import convolve_row, empty_tail
from sightline.attention.oracle.rows import StateRow, reference_capability, state_rows
from sightline.attention.spec import ConvolutionSpec
from sightline.cache.states import StatePool


@dataclass(frozen=True, eq=False)
class _ReferencePlan(AttentionPlan[ConvolutionInputs]):
    spec: ConvolutionSpec
    states: StatePool
    rows: tuple[StateRow, ...]

    def prepare(self) -> None:
        """Nothing to do: layers share no work."""

    def run(self, layer: int, inputs: ConvolutionInputs, out: Tensor) -> Lse | None:
        for row in self.rows:
            tail = row.read(self.states, "tail", layer, empty_tail(self.spec))
            found = convolve_row(inputs.x[row.tokens], inputs.conv, tail.to(out.device))
            out[row.tokens, 0] = found.out.to(out.dtype)
            row.write(self.states, "tail", layer, found.tails)
        return None


class ReferenceConvolutionBackend(AttentionBackend[ConvolutionSpec, ConvolutionInputs]):
    """Serves every convolution, slowly."""

    capabilities: ClassVar[tuple[Capability, ...]] = (reference_capability(SpecKind.CONVOLUTION, CONVOLUTION_FEATURES),)

    def __init__(self, context: BackendContext[ConvolutionSpec]) -> None:
        self._spec = context.spec
        self._states = context.cache.states

    def plan(self, step: StepView, buffers: PlanBuffers) -> _ReferencePlan:
        del buffers
        return _ReferencePlan(self._spec, self._states, state_rows(step))
