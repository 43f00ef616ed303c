"""Steps of a draft that are planned at once compute what the same steps planned one by one do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sightline.attention.contract import StepLimits
from sightline.attention.kinds import ENTRY_KINDS, Feature
from sightline.attention.planner import Planner
from sightline.attention.rollout import following_steps
from sightline.attention.workspace import MAIN_LANE, Lane, Workspace
from sightline.core.batch import RowWork
from sightline.core.config import EngineConfig
from sightline.core.errors import BatchError, PlanError, StalePlanError
from sightline.runner.batching import assemble
from sightline.runner.runner import Runner
from sightline.testing.conformance.rig import Row, Subject
from support.case_marks import proofs
from support.rollouts import Draft, cpu_subjects, rig_for
from support.tiny_models import load_runtime, make_model, random_prompts

# Networks that draft have no recurrent layers.
SUBJECTS = [subject for subject in cpu_subjects() if subject.capability.spec_kinds <= ENTRY_KINDS]
TORCH = next(subject for subject in SUBJECTS if subject.name == "torch softmax")
ROWS = [Row(17, 1), Row(3, 1), Row(30, 1)]
EXTEND = [Row(17, 1), Row(3, 4), Row(0, 5)]
"""As the first step of a draft model, which reads the tokens that were accepted."""


def draft(steps: int = 4, **setting: object) -> Draft:
    return Draft(rig_for(TORCH, **setting), ROWS, steps)


def require_same(subject: Subject, rows: list[Row], steps: int, **setting: object) -> None:
    at_once, one_by_one = (Draft(rig_for(subject, **setting), rows, steps) for _ in range(2))
    found, expected = at_once.at_once(), one_by_one.one_by_one()
    assert found.tokens == expected.tokens
    for one, other in zip([*found.outs, *found.cache], [*expected.outs, *expected.cache], strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)
    assert at_once.rig.planner.num_rebuilt == 0


def test_all_kinds_of_backends_are_tried() -> None:
    names = {subject.name for subject in SUBJECTS}
    assert {f"{name} {kind}" for name in ("torch", "numba", "triton") for kind in ("softmax", "latent")} <= names


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("rows", [ROWS, *proofs(EXTEND)], ids=["decode", "extend"])
@pytest.mark.parametrize(
    "subject",
    [
        # Triton's interpreter takes seconds.
        pytest.param(subject, id=subject.name, marks=pytest.mark.prove if "triton" in subject.name else ())
        for subject in SUBJECTS
    ],
)
def test_a_rollout_is_the_same_steps_planned_one_by_one(subject: Subject, rows: list[Row]) -> None:
    require_same(subject, rows, 2 if "triton" in subject.name else 4)


@pytest.mark.parametrize("kind", ["softmax", "latent"])
def test_a_rollout_is_the_same_under_paranoid(kind: str) -> None:
    subject = next(subject for subject in SUBJECTS if subject.name == f"torch {kind}")
    require_same(subject, EXTEND, 4, paranoid=True)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_a_model_drafts_the_same_tokens(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    runtime = load_runtime(tmp_path, EngineConfig(cache_tokens=256, max_num_batched_tokens=64, page_size=4))
    limits = StepLimits(8, 64, 64, (MAIN_LANE,), max_rollout=5)
    planner = Planner(runtime.bindings, limits, runtime.store.lengths, Workspace(runtime.store.device, 1 << 28))
    runner = Runner(runtime.runner._model, planner, runtime.runner._activations)
    prompts = random_prompts([7, 3, 12])

    def opened() -> list[RowWork]:
        rows = [runtime.store.open_row() for _ in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            runtime.store.grow_row(row, len(prompt) + 4)
        return [RowWork(row, prompt, 0, 1) for row, prompt in zip(rows, prompts, strict=True)]

    plans = planner.rollout(following_steps(assemble(opened(), runtime.store), 5))
    drafted = []
    for place, planned in enumerate(plans):
        drafted.append(runner.forward(planned).argmax(1))
        if place + 1 < len(plans):
            plans[place + 1].batch.fill(drafted[-1])
    work, expected = opened(), []
    for _ in range(5):
        expected.append(runner.forward(planner.plan(assemble(work, runtime.store))).argmax(1))
        work = [
            RowWork(each.table_row, [token], each.context_len + len(each.tokens), 1)
            for each, token in zip(work, expected[-1].tolist(), strict=True)
        ]
    assert torch.stack(drafted).tolist() == torch.stack(expected).tolist()


def test_each_step_has_a_certificate_and_plan_buffers_of_its_own() -> None:
    steps = draft()
    made = steps.rig.planner.rollout(steps.batches())
    assert len({id(planned.plan.certificate.buffers) for planned in made}) == 4
    assert [planned.plan.certificate.batch_id for planned in made] == [planned.batch.batch_id for planned in made]


def test_plans_of_single_steps_leave_a_rollout_as_it_is() -> None:
    steps, expected = draft(), draft().one_by_one()
    plans = steps.rig.planner.rollout(steps.batches())
    other = Draft(steps.rig, [Row(9, 3)], 1)
    for step in range(4):
        # As verification is planned while the draft runs.
        steps.rig.planner.plan(other.first.batch)
        torch.testing.assert_close(steps.run(plans, step), expected.outs[step], atol=0, rtol=0)


def test_sets_are_counted_before_the_first_step() -> None:
    lanes = (MAIN_LANE, Lane(1))
    leases = [entry for entry in draft(lanes=lanes).rig.workspace.ledger() if "rollout step" in entry.name]
    assert [(entry.name[-1], entry.lane) for entry in leases] == [
        (f"{step}", lane) for lane in lanes for step in range(4)
    ]
    assert all(entry.num_bytes > 0 for entry in leases)


def test_a_rollout_of_more_steps_than_there_are_sets_is_refused() -> None:
    steps = draft(3, max_rollout=2)
    with pytest.raises(
        PlanError, match=r"expected a rollout of at most 2 steps.*got 3; raise `StepLimits.max_rollout`"
    ):
        steps.rig.planner.rollout(steps.batches())


def test_a_backend_that_keeps_one_plan_is_refused() -> None:
    features = TORCH.capability.features - {Feature.SEVERAL_PLANS}
    subject = replace(TORCH, capability=replace(TORCH.capability, features=features))
    steps = Draft(rig_for(subject), ROWS, 2)
    with pytest.raises(PlanError, match="TorchBackend serves group0 and lacks several-plans"):
        steps.rig.planner.rollout(steps.batches())
    assert steps.rig.planner.plan(steps.first.batch).batch is steps.first.batch


def test_a_step_that_runs_before_the_one_before_it_is_refused() -> None:
    steps = draft()
    plans = steps.rig.planner.rollout(steps.batches())
    plans[1].batch.fill(steps.chosen(0))
    with pytest.raises(BatchError, match="expected context_lens of row 0 to be 17, as was launched, got 18"):
        steps.attend(plans[1], 1)


def test_a_step_whose_tokens_nobody_filled_in_is_refused() -> None:
    steps = draft()
    plans = steps.rig.planner.rollout(steps.batches())
    steps.attend(plans[0], 0)
    with pytest.raises(BatchError, match="filled in before the step runs, got tokens that nobody chose yet"):
        steps.attend(plans[1], 1)
    plans[1].batch.fill(steps.chosen(0))
    torch.testing.assert_close(steps.attend(plans[1], 1), draft().one_by_one().outs[1], atol=0, rtol=0)


def test_steps_that_do_not_follow_each_other_are_refused_before_any_is_planned() -> None:
    steps = draft()
    batches = steps.batches()
    for wrong in ([batches[0], batches[2]], [batches[1]], [batches[0], batches[1], batches[1]]):
        with pytest.raises(BatchError, match="where the step before it stops"):
            steps.rig.planner.rollout(wrong)
    assert steps.rig.planner.num_plans == 0


def test_a_failed_step_stops_the_rollout() -> None:
    steps = draft()
    plans = steps.rig.planner.rollout(steps.batches())
    steps.run(plans, 0)
    steps.rig.planner.take_back(plans[0])
    with pytest.raises(BatchError, match="got 18"):
        steps.attend(plans[1], 1)


def test_a_row_may_end_before_the_others() -> None:
    steps, expected = draft(2), draft(2).one_by_one()
    first, second = steps.batches()
    plans = steps.rig.planner.rollout([first, second.take([0, 2])])
    steps.inputs[1] = replace(
        steps.inputs[1], **{name: vars(steps.inputs[1])[name][[0, 2]] for name in ("q", "k", "v")}
    )
    torch.testing.assert_close(steps.run(plans, 0), expected.outs[0], atol=0, rtol=0)
    assert plans[1].batch.tokens.tolist() == [10, 12]
    torch.testing.assert_close(steps.run(plans, 1), expected.outs[1][[0, 2]], atol=0, rtol=0)


def test_a_release_ends_a_rollout() -> None:
    steps = draft()
    plans = steps.rig.planner.rollout(steps.batches())
    steps.rig.planner.release()
    with pytest.raises(StalePlanError, match=r"plan buffers of lane 0 were filled again.*as a new rollout"):
        steps.attend(plans[0], 0)
