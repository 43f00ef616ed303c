"""What is told of a request's phases and of the sizes of steps, on a device whose time is virtual."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sightline.core.metrics import STEP_TOKEN_BOUNDS, PhaseSeconds, StepSizes
from sightline.core.request import SamplingParams
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.faults import TICK
from sightline.testing.simulator.scenario import Scene
from sightline.testing.simulator.stage import Stage, set_stage


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_stage() -> Stage:
    scene = Scene(
        page_size=4,
        num_pages=128,
        max_rows=1,
        max_step_tokens=16,
        max_len=96,
        max_queued=8,
        prefix_caching=False,
        async_scheduling=False,
        paranoid=False,
        max_step_ticks=None,
    )
    return set_stage(scene, lambda replica, batch: None, EventCounts(), lambda finding: None)


def sampled(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def finish(stage: Stage, request_id: str) -> PhaseSeconds:
    while not stage.engine.is_finished(request_id):
        stage.engine.step()
    return stage.engine.pop_end(request_id).phases


def test_phases_follow_each_other_from_submission_to_end() -> None:
    stage = make_stage()
    clock, begun = stage.faults.clock, stage.faults.clock.now
    first = stage.engine.submit([4] * 40, sampled(6))
    second = stage.engine.submit([5] * 8, sampled(1))
    phases = finish(stage, first)
    assert (phases.prefill or 0) > 3 * TICK
    assert (phases.decode or 0) > 5 * TICK
    assert phases.queue + (phases.prefill or 0) + (phases.decode or 0) == pytest.approx(clock.now - begun)
    assert finish(stage, second).queue == pytest.approx(clock.now - begun, rel=0.5)


def test_a_request_that_never_ran_was_only_in_the_queue() -> None:
    stage = make_stage()
    stage.engine.submit([4] * 8, sampled(30))
    waiting = stage.engine.submit([5] * 8, sampled(1))
    stage.engine.step()
    stage.engine.cancel(waiting)
    phases = finish(stage, waiting)
    assert phases.queue > 0
    assert phases[1:] == (None, None)


def test_steps_are_counted_by_their_tokens() -> None:
    stage = make_stage()
    stage.engine.reset_counts()
    finish(stage, stage.engine.submit([4] * 40, sampled(3)))
    told = stage.engine.metrics()
    by_bound = dict(zip((*STEP_TOKEN_BOUNDS, None), told.iteration_tokens, strict=True))
    # 16 + 16 + 8 tokens of the prompt, then two of the three generated ones.
    assert {bound: count for bound, count in by_bound.items() if count} == {1: 2, 8: 1, 16: 2}
    assert (told.iteration_tokens_sum, sum(told.iteration_tokens)) == (42, told.steps)


def test_a_bound_counts_what_it_names() -> None:
    tokens = StepSizes()
    for count in (*STEP_TOKEN_BOUNDS, STEP_TOKEN_BOUNDS[-1] + 1):
        tokens.observe(count)
    assert tokens.counts == [1] * (len(STEP_TOKEN_BOUNDS) + 1)
