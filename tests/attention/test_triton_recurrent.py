"""The Triton backends of recurrent layers and of convolutions, in the interpreter, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from sightline.attention.backends.triton.convolution_backend import TritonConvolutionBackend
from sightline.attention.backends.triton.recurrent_backend import TritonRecurrentBackend
from sightline.attention.spec import RecurrentSpec
from support.case_marks import proofs, routine
from support.extend_cases import DEVICE
from support.recurrent_cases import CONVOLUTION, EVERYTHING, SPECS, make_convolution_inputs, make_inputs
from support.recurrent_rig import StateCase, StateRig, StateStep, assert_step

TOLERANCE = 2e-5
STEPS = {
    "decode": [StateCase(1), StateCase(1, begins=True), StateCase(1)],
    "decode of many rows": [StateCase(1)] * 9,
    "verification": [StateCase(4, frozenset(range(4))), StateCase(1), StateCase(3, frozenset(range(3)))],
    "chunks": [StateCase(1), StateCase(11, frozenset({0, 7})), StateCase(2, begins=True)],
    "empty rows": [StateCase(1), StateCase(0), StateCase(5, begins=True), StateCase(0)],
    "nothing": [],
}
LONG = [StateCase(1), StateCase(66, frozenset({0, 40})), StateCase(18, begins=True)]


def rig_for(backend: type[Any], spec: Any) -> StateRig:
    return StateRig(backend, spec, num_slots=40, device=torch.device(DEVICE))


@pytest.mark.parametrize(
    "case",
    routine(
        {f"{name}, {spec}": (SPECS[spec], name) for spec in SPECS for name in ("decode", "chunks")},
        "decode, gated delta",
        "decode, everything",
    ),
)
def test_a_step_equals_the_oracle(case: tuple[RecurrentSpec, str]) -> None:
    spec, name = case
    step = StateStep(rig_for(TritonRecurrentBackend, spec), STEPS[name], padding=(2, 3))
    assert_step(step, make_inputs(spec, step.num_tokens), TOLERANCE)


@pytest.mark.parametrize("name", ["verification", "nothing", *proofs("decode of many rows", "empty rows")])
def test_any_step_equals_the_oracle(name: str) -> None:
    step = StateStep(rig_for(TritonRecurrentBackend, EVERYTHING), STEPS[name], padding=(2, 3))
    assert_step(step, make_inputs(EVERYTHING, step.num_tokens), TOLERANCE)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "transient"),
    [
        ("gated delta", False),
        pytest.param(*("mamba", False), marks=pytest.mark.slow),
        pytest.param(*("lightning", True), marks=pytest.mark.prove),
        pytest.param(*("everything", False), marks=pytest.mark.prove),
        pytest.param(*("everything", True), marks=pytest.mark.slow),
        pytest.param(*("channels without the delta rule", False), marks=pytest.mark.slow),
    ],
)
def test_long_rows_are_computed_in_chunks(name: str, transient: bool) -> None:
    spec = replace(SPECS[name], num_heads=2, num_key_heads=1, key_dim=32, value_dim=16)
    step = StateStep(
        rig_for(TritonRecurrentBackend, spec), LONG, padding=(0, 0 if transient else 2), transient=transient
    )
    assert type(step.plan()).__name__ == "_ChunkPlan"
    assert_step(step, make_inputs(spec, step.num_tokens, decay=0.2), 1e-4)


@pytest.mark.parametrize("name", ["decode", *proofs("chunks")])
def test_a_step_without_a_cache_equals_the_oracle(name: str) -> None:
    step = StateStep(rig_for(TritonRecurrentBackend, EVERYTHING), STEPS[name], transient=True)
    assert_step(step, make_inputs(EVERYTHING, step.num_tokens), TOLERANCE)


@pytest.mark.parametrize("transient", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_a_convolution_equals_the_oracle(name: str, transient: bool) -> None:
    rig = rig_for(TritonConvolutionBackend, CONVOLUTION)
    step = StateStep(rig, STEPS[name], padding=(0 if transient else 2, 3), transient=transient)
    assert_step(step, make_convolution_inputs(CONVOLUTION, step.num_tokens), TOLERANCE)


@pytest.mark.parametrize("name", ["decode", *proofs("chunks")])
def test_a_convolution_has_no_bias_if_it_is_given_none(name: str) -> None:
    step = StateStep(rig_for(TritonRecurrentBackend, EVERYTHING), STEPS[name])
    assert_step(step, make_inputs(EVERYTHING, step.num_tokens, bias=False), TOLERANCE)


@pytest.mark.prove
def test_a_step_that_runs_twice_gives_the_same() -> None:
    """Nothing that a step reads is written by it."""
    step = StateStep(rig_for(TritonRecurrentBackend, EVERYTHING), STEPS["verification"])
    inputs = make_inputs(EVERYTHING, step.num_tokens)
    first = step.run(inputs)
    kept = {name: step.rig.pool.plane(name).clone() for name in ("state", "tail")}
    assert torch.equal(step.run(inputs), first)
    for name, plane in kept.items():
        assert torch.equal(plane.nan_to_num(7.0), step.rig.pool.plane(name).nan_to_num(7.0))
