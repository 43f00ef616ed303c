"""What must hold of plans that are made ahead, as checks that a planted fault can fail.

Each raises `AssertionError`, or what the planner raises by itself, if something is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from sightline.attention.planner import Planner
from sightline.attention.rollout import following_steps
from sightline.core.errors import BatchError, StalePlanError
from sightline.runner.recording import Recorder
from sightline.testing.conformance.rig import AttentionRig, Row, tree_row
from sightline.testing.conformance.steps import Step
from support import attention_cases as cases
from support.late_stream import LateMark, LateStream
from support.one_layer import runner_for
from support.plan_sites import ROLLOUTS, STEPS, Bench, Outcome, buffers_filled_again, padded, verdict
from support.rollouts import SOFTMAX, Draft, cpu_subjects, rig_for

ROWS = [Row(17, 1), Row(3, 1)]


def _drafts(steps: int) -> tuple[Draft, Draft]:
    subject = next(subject for subject in cpu_subjects() if subject.name == "torch softmax")
    one, other = (Draft(rig_for(subject), ROWS, steps) for _ in range(2))
    return one, other


def a_rollout_is_the_steps_planned_one_by_one() -> None:
    at_once, one_by_one = _drafts(3)
    found, expected = at_once.at_once(), one_by_one.one_by_one()
    assert found.tokens == expected.tokens, "a step has other tokens"
    for one, other in zip(found.outs, expected.outs, strict=True):
        assert torch.equal(one, other), "a step planned at once computes something else"


def a_stale_step_of_a_draft_is_refused() -> None:
    for name in ("draft", "multi_step"):
        ahead = ROLLOUTS[name](Bench())
        found = verdict(ahead, buffers_filled_again(ahead))
        assert found is Outcome.STALE, f"{name} ran on plan buffers of the next rollout: {found.value}"


def a_padded_step_of_a_draft_is_refused() -> None:
    for name in ("draft", "multi_step"):
        ahead = ROLLOUTS[name](Bench())
        found = verdict(ahead, padded(ahead))
        assert found is Outcome.STALE, f"{name} was padded after it was planned: {found.value}"


def a_release_ends_a_rollout() -> None:
    ahead = ROLLOUTS["draft"](Bench())
    ahead.planner.release()
    found = verdict(ahead, ahead.planned)
    assert found is Outcome.STALE, f"a step ran on plan buffers that were released: {found.value}"


def each_round_is_verified_with_its_own_tree() -> None:
    """Rounds of the same rows and tokens, of which the second is given the plan of the first."""
    bench = cases.bench([SOFTMAX], page_size=4)
    rounds = [Step(bench, [tree_row(9, parents), Row(5, 4)], seed=5) for parents in ((-1, 0, 1, 2), (-1, 0, 0, 0))]
    first, second = rounds
    planned = first.plan()
    runner_for(first).forward(planned)
    out = runner_for(second).forward(replace(planned, batch=second.batch))
    assert torch.allclose(out, second.expected().out, atol=3e-5, rtol=3e-5), "verified with the tree of another round"


def steps_wait_for_plans_on_a_side_stream() -> None:
    device = LateStream()
    step = Step(aside_rig(device), [Row(17, 3), Row(3, 3)])
    with step.bench.planner.side.enter():
        planned = step.bench.planner.plan_aside(step.batch)
    out = runner_for(step).forward(planned)
    assert torch.allclose(out, step.expected().out, atol=3e-5, rtol=3e-5), "the step ran before it was planned"


def plans_on_a_side_stream_wait_for_steps() -> None:
    device = LateStream()
    step = Step(aside_rig(device), [Row(17, 3), Row(3, 3)])
    for _ in range(2):
        runner_for(step).forward(step.bench.planner.plan_aside(step.batch))
    expected = ["side waits", "side records", "main waits", "main records"] * 2
    assert device.log == expected, f"the streams are not ordered: {device.log}"


def captured_drafts_are_the_eager_ones(bench: Bench, recorder: Recorder) -> None:
    """Each step is in a bucket of its own."""
    eager = bench.planner.rollout(following_steps(bench.batch([1, 1]), STEPS))
    expected = bench.drafted(eager)
    bench.take_back(eager)
    for planned in (plans := bench.planner.rollout(bench.steps_in_buckets())):
        # A step can be captured once those before it have run.
        bench.runner.capture(planned, recorder)
        bench.runner.forward(planned)
        if planned is not plans[-1]:
            plans[plans.index(planned) + 1].batch.fill(torch.tensor([5, 6], device=bench.store.device))
    bench.take_back(plans)
    for _ in range(3):
        replayed = bench.planner.rollout(bench.steps_in_buckets())
        before = bench.runner.num_replayed
        found = bench.drafted(replayed)
        bench.take_back(replayed)
        assert bench.runner.num_replayed - before == STEPS
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, atol=1e-4, rtol=1e-4), "a replayed step of a draft is not the eager one"


def aside_rig(device: LateStream) -> AttentionRig:
    """Plans on a late stream."""

    class Aside(Planner):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, side=device.stream(), **options)

    rig = AttentionRig(
        replace(cases.subject_for("torch", torch.float32), planner=Aside),
        [SOFTMAX],
        replace(cases.bench([SOFTMAX]).setting, page_size=4),
    )
    for memory in rig.planner._memory.values():
        mark: Any = memory.mark
        assert isinstance(mark, LateMark)
        mark.memory = memory
    return rig


def a_step_that_waits_for_tokens_is_refused() -> None:
    draft, _ = _drafts(2)
    plans = draft.rig.planner.rollout(draft.batches())
    draft.attend(plans[0], 0)
    try:
        draft.attend(plans[1], 1)
    except BatchError:
        return
    raise AssertionError("a step ran with tokens that nobody chose")


def steps_that_write_the_same_entries_are_refused() -> None:
    draft, _ = _drafts(2)
    first, second = draft.batches()
    work = replace(second.work, context_lens=first.work.context_lens)
    frozen = replace(second, work=work)
    try:
        plans = draft.rig.planner.rollout([first, frozen])
        draft.run(plans, 0)
        draft.attend(plans[1], 1)
    except (BatchError, StalePlanError):
        return
    raise AssertionError("two steps of a draft wrote the same position")


CHECKS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        check.__name__: check
        for check in (
            a_rollout_is_the_steps_planned_one_by_one,
            a_stale_step_of_a_draft_is_refused,
            a_padded_step_of_a_draft_is_refused,
            a_release_ends_a_rollout,
            each_round_is_verified_with_its_own_tree,
            steps_wait_for_plans_on_a_side_stream,
            plans_on_a_side_stream_wait_for_steps,
            a_step_that_waits_for_tokens_is_refused,
            steps_that_write_the_same_entries_are_refused,
        )
    }
)
