"""What is the compiled recurrent kernels' own: threads, recorded steps, and rows that do not depend on others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sightline.attention.backends.numba.convolution_backend import NumbaConvolutionBackend
from sightline.attention.backends.numba.recurrent_backend import NumbaRecurrentBackend
from sightline.attention.contract import CachePolicy
from sightline.attention.spec import ConvolutionSpec, RecurrentSpec
from sightline.kernels.cpu.program import CallingThread
from support.cpu_launchers import CheckedLauncher, SerialLauncher
from support.recurrent_cases import CONVOLUTION, EVERYTHING, GATED_DELTA, make_convolution_inputs, make_inputs
from support.recurrent_rig import StateCase, StateRig, StateStep, assert_step, expected

TOLERANCE = 2e-5
ROWS = [StateCase(1), StateCase(9, frozenset({0, 3})), StateCase(0), StateCase(1), StateCase(4, frozenset(range(4)))]


def inputs_of(spec: RecurrentSpec | ConvolutionSpec, num_tokens: int, seed: int = 0) -> Any:
    if isinstance(spec, ConvolutionSpec):
        return make_convolution_inputs(spec, num_tokens, seed)
    return make_inputs(spec, num_tokens, seed)


both = pytest.mark.parametrize(
    ("backend", "spec"),
    [
        pytest.param(NumbaRecurrentBackend, GATED_DELTA, id="gated delta"),
        pytest.param(NumbaRecurrentBackend, EVERYTHING, id="everything", marks=pytest.mark.prove),
        pytest.param(NumbaConvolutionBackend, CONVOLUTION, id="convolution"),
    ],
)


@both
@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_oracles_results(backend: Any, spec: Any, num_threads: int) -> None:
    step = StateStep(StateRig(backend, spec, launcher=SerialLauncher(num_threads)), ROWS, padding=(1, 2))
    assert_step(step, inputs_of(spec, step.num_tokens), TOLERANCE)


@both
def test_a_recorded_step_serves_other_lengths_and_slots(backend: Any, spec: Any) -> None:
    launcher = CheckedLauncher(CallingThread())
    rig = StateRig(backend, spec, launcher=launcher)
    first = StateStep(rig, [StateCase(3), StateCase(2)], seed=1)
    batch = first.batch()
    inputs, other = inputs_of(spec, first.num_tokens, 1), inputs_of(spec, first.num_tokens, 2)
    out = torch.full((first.num_tokens, spec.num_q_heads, spec.out_dim), torch.nan)
    plan = rig.plan(batch, CachePolicy.PAGED)
    with launcher.recording() as tape:
        plan.run(1, inputs, out)
    assert out.isnan().all()
    second = StateStep(rig, [StateCase(2), StateCase(1)], seed=5, padding=(0, 2))
    answer = expected(second, other)
    second.batch().placed_in(batch)
    for target, source in zip(tensors(inputs), tensors(other), strict=True):
        target.copy_(source)
    launcher.run(tape.program())
    torch.testing.assert_close(out, answer.out, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)
    for slot, planes in answer.kept.items():
        for name, plane in planes.items():
            torch.testing.assert_close(rig.pool.plane(name)[1, slot], plane, atol=TOLERANCE, rtol=TOLERANCE)


def tensors(inputs: Any) -> list[torch.Tensor]:
    """All tensors of a layer's inputs."""
    found = [each for each in vars(inputs).values() if isinstance(each, torch.Tensor)]
    return [*found, inputs.conv.weight, inputs.conv.bias]


@both
def test_a_row_has_the_same_bits_alone_and_among_others(backend: Any, spec: Any) -> None:
    rig = StateRig(backend, spec, launcher=SerialLauncher(2))
    step = StateStep(rig, [StateCase(5, begins=True), StateCase(9, begins=True), StateCase(1, begins=True)])
    inputs = inputs_of(spec, step.num_tokens)
    together = step.run(inputs)
    alone = StateStep(rig, [StateCase(9, begins=True)], seed=3).run(inputs.part(slice(5, 14)))
    assert torch.equal(alone, together[5:14])
