"""Recurrent layers on a CPU with a compiled kernel: token by token, each head's state in the cache of its thread.

Lengths and slots are read from memory, and launches depend on numbers of rows only. So a recorded step serves any
lengths and slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.numba.calls import address, launch_kernel
from sightline.attention.backends.numba.rows import RECURRENT_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, Lse, RecurrentInputs, StepView
from sightline.attention.spec import UNIT_EPSILON, RecurrentSpec
from sightline.cache.states import StatePool
from sightline.kernels.cpu.compiled import compiled
from sightline.kernels.cpu.compiler import CompiledKernel
from sightline.kernels.cpu.instructions import ELEMENTS
from sightline.kernels.cpu.record import Launcher, float_bits
from sightline.kernels.cpu.recurrent import make_recurrence, thread_floats


@dataclass(frozen=True, eq=False)
class _RecurrentPlan(AttentionPlan[RecurrentInputs]):
    spec: RecurrentSpec
    kernel: CompiledKernel
    launcher: Launcher
    states: StatePool
    step: StepView
    scratch: Tensor
    """[num_threads, floats of a thread] fp32."""

    def prepare(self) -> None:
        """Nothing to do: layers share no work."""

    def run(self, layer: int, inputs: RecurrentInputs, out: Tensor) -> Lse | None:
        spec, batch, slots = self.spec, self.step.batch, self.step.states
        weight, bias = (None, None) if inputs.conv is None else inputs.conv
        state = tail = None
        if slots is not None:
            state = self.states.plane("state")[layer]
            tail = self.states.plane("tail")[layer] if spec.conv_width else None
        arguments = (
            *(inputs.mixed.data_ptr(), inputs.mixed.stride(0), batch.num_rows, batch.query_lens.device.data_ptr()),
            *(spec.num_heads, spec.group_size, spec.key_dim, spec.value_dim, address(weight), address(bias)),
            *(inputs.decay.data_ptr(), *inputs.decay.stride()[:2], inputs.beta.data_ptr(), *inputs.beta.stride()),
            *(address(inputs.skip), float_bits(spec.scale), float_bits(UNIT_EPSILON), out.data_ptr(), out.stride(0)),
            *(address(state), address(tail)),
            *((0, 0) if slots is None else (slots.read_slots.data_ptr(), slots.write_slots.data_ptr())),
            *(self.scratch.data_ptr(), self.scratch.stride(0)),
        )
        keeps = (inputs, weight, bias, out, state, tail, slots, batch.query_lens.device, self.scratch)
        launch_kernel(self.launcher, self.kernel, arguments, *keeps)
        return None


class NumbaRecurrentBackend(AttentionBackend[RecurrentSpec, RecurrentInputs]):
    """Computes recurrent layers on a CPU."""

    capabilities: ClassVar[tuple[Capability, ...]] = RECURRENT_ROWS

    def __init__(self, context: BackendContext[RecurrentSpec]) -> None:
        self._spec = spec = context.spec
        self._launcher = context.launcher
        self._states = context.cache.states
        features = (spec.delta_rule, spec.channel_decay, spec.unit_keys)
        self._kernel = compiled(make_recurrence, ELEMENTS[context.dtype], spec.conv_width, *features)
        size = (context.launcher.num_threads, thread_floats(spec.key_dim, spec.value_dim))
        self._scratch = {
            lane: context.workspace.lease(context.group, "numba threads", lane, size, torch.float32)
            for lane in context.limits.lanes
        }

    def plan(self, step: StepView, buffers: PlanBuffers) -> _RecurrentPlan:
        del buffers
        return _RecurrentPlan(self._spec, self._kernel, self._launcher, self._states, step, self._scratch[step.lane])
