"""Convolutions on a CPU with a compiled kernel. Lengths and slots are read from memory, so steps can be recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.numba.calls import address, launch_kernel
from sightline.attention.backends.numba.rows import CONVOLUTION_ROWS
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
from sightline.attention.spec import ConvolutionSpec
from sightline.cache.states import StatePool
from sightline.kernels.cpu.compiled import compiled
from sightline.kernels.cpu.compiler import CompiledKernel
from sightline.kernels.cpu.instructions import ELEMENTS
from sightline.kernels.cpu.record import Launcher
from sightline.kernels.cpu.recurrent import make_convolution


@dataclass(frozen=True, eq=False)
class _ConvolutionPlan(AttentionPlan[ConvolutionInputs]):
    kernel: CompiledKernel
    launcher: Launcher
    states: StatePool
    step: StepView
    scratch: Tensor
    """[channels] fp32."""

    def prepare(self) -> None:
        """Nothing to do: layers share no work."""

    def run(self, layer: int, inputs: ConvolutionInputs, out: Tensor) -> Lse | None:
        batch, slots, (weight, bias) = self.step.batch, self.step.states, inputs.conv
        tail = None if slots is None else self.states.plane("tail")[layer]
        arguments = (
            *(inputs.x.data_ptr(), inputs.x.stride(0), batch.num_rows, batch.query_lens.device.data_ptr()),
            *(inputs.x.shape[1], weight.data_ptr(), address(bias)),
            *(out.data_ptr(), out.stride(0), address(tail)),
            *((0, 0) if slots is None else (slots.read_slots.data_ptr(), slots.write_slots.data_ptr())),
            self.scratch.data_ptr(),
        )
        keeps = (inputs, weight, bias, out, tail, slots, batch.query_lens.device, self.scratch)
        launch_kernel(self.launcher, self.kernel, arguments, *keeps)
        return None


class NumbaConvolutionBackend(AttentionBackend[ConvolutionSpec, ConvolutionInputs]):
    """Computes convolutions on a CPU."""

    capabilities: ClassVar[tuple[Capability, ...]] = CONVOLUTION_ROWS

    def __init__(self, context: BackendContext[ConvolutionSpec]) -> None:
        self._launcher = context.launcher
        self._states = context.cache.states
        self._kernel = compiled(make_convolution, ELEMENTS[context.dtype], context.spec.width)
        self._scratch = {
            lane: context.workspace.lease(context.group, "numba results", lane, (context.spec.channels,), torch.float32)
            for lane in context.limits.lanes
        }

    def plan(self, step: StepView, buffers: PlanBuffers) -> _ConvolutionPlan:
        del buffers
        return _ConvolutionPlan(self._kernel, self._launcher, self._states, step, self._scratch[step.lane])
