"""On an NVIDIA GPU: recurrent layers and convolutions against the oracle, eager and captured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from sightline.attention.backends.triton.convolution_backend import TritonConvolutionBackend
from sightline.attention.backends.triton.recurrent_backend import TritonRecurrentBackend
from sightline.attention.contract import CachePolicy
from sightline.attention.spec import RecurrentSpec
from support.recurrent_cases import CONVOLUTION, SPECS, make_convolution_inputs, make_inputs
from support.recurrent_rig import StateCase, StateRig, StateStep, assert_step, expected, on_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
TOLERANCE = 2e-4
WIDE = {name: replace(spec, key_dim=128, value_dim=64) for name, spec in SPECS.items() if name != "delta rule alone"}
STEPS = {
    "decode": [StateCase(1), StateCase(1, begins=True), StateCase(1)],
    "decode of many rows": [StateCase(1)] * 30,
    "verification": [StateCase(4, frozenset(range(4))), StateCase(1), StateCase(3, frozenset(range(3)))],
    "prompts": [StateCase(length, begins=True) for length in (70, 9, 64, 65, 1, 130)],
    "chunks": [StateCase(1), StateCase(90, frozenset({0, 1, 40, 63, 64})), StateCase(20), StateCase(2), StateCase(0)],
}


def rig_for(backend: type[Any], spec: Any, dtype: torch.dtype = torch.float32) -> StateRig:
    return StateRig(backend, spec, dtype=dtype, num_slots=100, device=torch.device("cuda"))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("spec", WIDE.values(), ids=WIDE.keys())
def test_a_step_equals_the_oracle(spec: RecurrentSpec, name: str) -> None:
    step = StateStep(rig_for(TritonRecurrentBackend, spec), STEPS[name], padding=(1, 3))
    assert_step(step, make_inputs(spec, step.num_tokens, decay=0.2), TOLERANCE)


@pytest.mark.parametrize("spec", WIDE.values(), ids=WIDE.keys())
def test_half_precision_is_near_the_oracle(spec: RecurrentSpec) -> None:
    spec = replace(spec, scale=0.1)
    step = StateStep(rig_for(TritonRecurrentBackend, spec, torch.bfloat16), STEPS["chunks"])
    inputs = make_inputs(spec, step.num_tokens, decay=0.2, dtype=torch.bfloat16)
    answer = expected(step, inputs)
    found = step.run(inputs).float()
    assert (found - answer.out).norm() / answer.out.norm() < 1e-2
    state = step.rig.pool.plane("state")[1].cpu()
    for slot, planes in answer.kept.items():
        assert (state[slot] - planes["state"]).norm() / planes["state"].norm() < 1e-2


@pytest.mark.parametrize("name", STEPS)
def test_a_convolution_equals_the_oracle(name: str) -> None:
    step = StateStep(rig_for(TritonConvolutionBackend, CONVOLUTION), STEPS[name], padding=(1, 3))
    assert_step(step, make_convolution_inputs(CONVOLUTION, step.num_tokens), TOLERANCE)


@pytest.mark.parametrize("longest", [1, 4])
@pytest.mark.parametrize("name", ["gated delta", "kimi delta", "mamba"])
def test_a_captured_step_serves_other_lengths_and_slots(name: str, longest: int) -> None:
    """A graph is captured over static memory, and replayed after other lengths and slots were copied there."""
    spec, num_rows, device = WIDE[name], 4, torch.device("cuda")
    rig = rig_for(TritonRecurrentBackend, spec)
    captured = StateStep(rig, [StateCase(longest, frozenset(range(longest)))] * num_rows, seed=1)
    static = captured.batch().bounded((longest,) * num_rows, (3,) * num_rows, known=True)
    inputs = on_device(make_inputs(spec, captured.num_tokens), device)
    out = torch.full((captured.num_tokens, spec.num_q_heads, spec.out_dim), torch.nan, device=device)
    plan = rig.plan(static, CachePolicy.PAGED)
    with torch.inference_mode():
        for _ in range(2):
            plan.prepare()
            plan.run(1, inputs, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan.prepare()
            plan.run(1, inputs, out)
    rows = [StateCase(longest), StateCase(1), StateCase(1, begins=True)]
    rig.pool.fill(range(1, rig.num_slots), torch.nan)
    later = StateStep(rig, rows, seed=2, padding=(1, num_rows * longest - longest - 2))
    given = make_inputs(spec, later.num_tokens, seed=5)
    answer = expected(later, given)
    later.batch().placed_in(static)
    for name_of, moved in vars(on_device(given, device)).items():
        if isinstance(moved, torch.Tensor):
            getattr(inputs, name_of).copy_(moved)
    assert given.conv is not None
    assert given.conv.bias is not None
    inputs.conv.weight.copy_(given.conv.weight)
    inputs.conv.bias.copy_(given.conv.bias)
    out.fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(out.cpu(), answer.out, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)
    state = rig.pool.plane("state")
    for slot, planes in answer.kept.items():
        torch.testing.assert_close(state[1, slot].cpu(), planes["state"], atol=TOLERANCE, rtol=TOLERANCE)
    assert not state[:, 0].any()
    untouched = [slot for slot in range(1, rig.num_slots) if slot not in answer.kept and slot not in later.slots.read]
    assert state[1, untouched].isnan().all()
