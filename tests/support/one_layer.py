"""A runner whose model is one attention layer, so that a forward's answer is the oracle's or wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from sightline.attention.contract import SoftmaxInputs
from sightline.attention.planner import PlannedBatch, Planner
from sightline.layers.scratch import Scratch
from sightline.models.contract import Model
from sightline.runner.runner import Runner
from sightline.testing.conformance.steps import Step
from support.layers import activations


class OneLayer(Model):
    """A model that is one attention layer over fixed inputs."""

    def __init__(self, layer: int, inputs: SoftmaxInputs) -> None:
        self.layer = layer
        self.inputs = inputs

    @property
    def turns(self) -> bool:
        return False

    def reserve(self, scratch: Scratch) -> None:
        """It needs no memory."""

    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        out = torch.full_like(self.inputs.q, torch.nan)
        planned.attend(self.layer, self.inputs, out)
        return out


def runner_for(step: Step, planner: Planner | None = None, inputs: SoftmaxInputs | None = None) -> Runner:
    """Over the step's own planner and inputs, unless others are given."""
    setting = step.bench.setting
    memory = {lane: activations(setting.max_step_tokens) for lane in setting.lanes}
    return Runner(OneLayer(step.layer, inputs or step.inputs), planner or step.bench.planner, memory)


def check_forward(step: Step, planned: PlannedBatch) -> None:
    """The forward gives the oracle's answer for the step."""
    torch.testing.assert_close(runner_for(step).forward(planned), step.expected().out, atol=3e-5, rtol=3e-5)
