"""Convolutions with Sightline's own Triton kernel: one launch per layer, whatever the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sightline.attention.backends.triton.rows import CONVOLUTION_ROWS
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
from sightline.attention.recurrent.planned_tokens import PlannedTokens
from sightline.attention.spec import ConvolutionSpec
from sightline.kernels.triton.overlap import overlaps_on
from sightline.kernels.triton.short_convolution import Convolution, convolve


@dataclass(frozen=True, eq=False)
class _ConvolutionPlan(AttentionPlan[ConvolutionInputs]):
    tokens: PlannedTokens
    tails: tuple[Tensor, ...] | None
    """Per layer: [slots, channels, width - 1]; None under `TRANSIENT`."""
    overlaps: bool

    def prepare(self) -> None:
        self.tokens.prepare()

    def run(self, layer: int, inputs: ConvolutionInputs, out: Tensor) -> Lse | None:
        convolution = Convolution(*inputs.conv, None if self.tails is None else self.tails[layer])
        slots, rows = self.tokens.slots, self.tokens.rows
        convolve(inputs.x, convolution, slots, rows, out.squeeze(1), overlaps=self.overlaps)
        return None


class TritonConvolutionBackend(AttentionBackend[ConvolutionSpec, ConvolutionInputs]):
    """Runs on NVIDIA GPUs."""

    capabilities: ClassVar[tuple[Capability, ...]] = CONVOLUTION_ROWS

    def __init__(self, context: BackendContext[ConvolutionSpec]) -> None:
        self._tails = context.cache.states.plane("tail").unbind(0)
        self._overlaps = overlaps_on(context.device)

    def plan(self, step: StepView, buffers: PlanBuffers) -> _ConvolutionPlan:
        tokens = PlannedTokens.of(step, buffers)
        return _ConvolutionPlan(tokens, None if tokens.slots is None else self._tails, self._overlaps)
