"""Recurrent layers with fla-core, behind our own convolution.

Serves prompts and rows of a few tokens alike. States are copied from their slots and to others, which costs a decode
step twice the traffic of its states: kernels that read slots are faster there.
"""

from __future__ import annotations

from typing import ClassVar

from sightline.attention.backends.fla.call import FlaRecurrence
from sightline.attention.backends.fla.rows import RECURRENT_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend, BackendContext, RecurrentInputs, StepView
from sightline.attention.recurrent.waves import WavePlan, WavePlanner
from sightline.attention.spec import RecurrentSpec


class FlaRecurrentBackend(AttentionBackend[RecurrentSpec, RecurrentInputs]):
    """Runs on NVIDIA GPUs."""

    capabilities: ClassVar[tuple[Capability, ...]] = RECURRENT_ROWS

    def __init__(self, context: BackendContext[RecurrentSpec]) -> None:
        self._planner = WavePlanner(context, FlaRecurrence(context.spec), values_first=False)

    def plan(self, step: StepView, buffers: PlanBuffers) -> WavePlan:
        return self._planner.plan(step, buffers)
