"""On an NVIDIA GPU: steps of a draft planned at once, captured, and plans that are made on a side stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sightline.attention.backends.triton.backend import TritonBackend
from sightline.attention.backends.triton.latent_backend import TritonLatentBackend
from sightline.attention.planner import Planner
from sightline.attention.streams import PlanStream
from sightline.core.device import detect_device
from sightline.runner.recording import CudaRecorder
from sightline.testing.conformance.given_inputs import to_device
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Row, Subject, tree_row
from sightline.testing.conformance.steps import Step
from support.plan_checks import captured_drafts_are_the_eager_ones
from support.plan_sites import PAGE, SPEC, Bench
from support.rollouts import SOFTMAX, Draft, rig_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
KINDS = pytest.mark.parametrize("kind", [TritonBackend, TritonLatentBackend], ids=["softmax", "latent"])
TREES = [(-1, 0, 1, 2), (-1, 0, 0, 0), (-1, -1, 0, 1), (-1, -1, -1, -1)]
ROUNDS = 12
DECODE, EXTEND = [Row(17, 1), Row(3, 1)], [Row(17, 1), Row(3, 4), Row(0, 5)]


def subject_for(kind: type[Any], planner: type[Planner] = Planner) -> Subject:
    row = next(row for row in kind.capabilities if torch.float32 in row.dtypes)
    return Subject("triton", kind, row, detect_device("cuda"), planner)


@KINDS
@pytest.mark.parametrize(
    "rows", [[Row(17, 1), Row(3, 1)], [Row(17, 1), Row(3, 4), Row(0, 5)]], ids=["decode", "extend"]
)
def test_a_rollout_is_the_same_steps_planned_one_by_one(kind: type[Any], rows: list[Row]) -> None:
    at_once, one_by_one = (Draft(rig_for(subject_for(kind)), rows, 4) for _ in range(2))
    found, expected = at_once.at_once(), one_by_one.one_by_one()
    assert found.tokens == expected.tokens
    for one, other in zip(found.outs, expected.outs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_a_draft_whose_steps_are_captured_is_the_eager_one() -> None:
    rig = AttentionRig(subject_for(TritonBackend), [SPEC], RigSetting(max_seq_len=64, max_rows=8, page_size=PAGE))
    captured_drafts_are_the_eager_ones(Bench(rig), CudaRecorder(rig.device))


def test_a_step_reads_what_a_busy_side_stream_planned_and_none_is_planned_over() -> None:
    """Both streams are kept busy: a plan is late for its step, and a step is late for the next plan."""
    device = torch.device("cuda")
    side = PlanStream.beside(device)

    class Aside(Planner):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, side=side, **options)

    rig = AttentionRig(subject_for(TritonBackend, Aside), [SOFTMAX], RigSetting(page_size=4))
    steps = [Step(rig, [tree_row(9 + place, parents), Row(5, 4)], seed=place) for place, parents in enumerate(TREES)]
    inputs = [to_device(step.inputs, rig.device) for step in steps]
    busy = torch.randn(4096, 4096, device=device)
    others = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    outs = []
    for number in range(ROUNDS):
        step = steps[number % len(steps)]
        with side.enter():
            others = others @ others
            batch = replace(step.batch)
            planned = rig.planner.plan_aside(batch)
        out = step.empty_out()
        current = rig.planner.ensure(planned)
        assert current is planned
        with torch.inference_mode(), current.in_stream_order():
            busy = busy @ busy
            current.prepare()
            current.attend(0, inputs[number % len(steps)], out)
        outs.append(out)
        del batch, planned, current
    for number, out in enumerate(outs):
        expected = steps[number % len(steps)].expected().out
        torch.testing.assert_close(out.cpu(), expected, atol=1e-4, rtol=1e-4, msg=f"round {number}")
