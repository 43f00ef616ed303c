"""A second thread in a lane is refused, whether it plans or runs; one thread may come again, and hand over."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import pytest
from torch import Tensor

from sightline.attention.contract import AttentionPlan, StepView
from sightline.attention.lanes import Depth, LaneGuard
from sightline.attention.planner import PlannedBatch
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import MAIN_LANE, Lane
from sightline.core.errors import LaneBusyError
from sightline.layers.scratch import Scratch
from sightline.runner.runner import Runner
from sightline.testing.conformance.rig import Row
from sightline.testing.conformance.steps import Step
from support import attention_cases as cases
from support.layers import activations
from support.one_layer import OneLayer, check_forward, runner_for
from support.threads import Background, Hold, together, until

SPEC = SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, scale=0.35)
OTHER_LANE = Lane(1)
pytestmark = pytest.mark.timeout(120)


class HeldLayer(OneLayer):
    """A model that stops in the middle of its first forward."""

    def __init__(self, step: Step, hold: Hold) -> None:
        super().__init__(step.layer, step.inputs)
        self._hold = hold

    def forward(self, planned: PlannedBatch, scratch: Scratch) -> Tensor:
        self._hold()
        return super().forward(planned, scratch)


def held_plan(step: Step, monkeypatch: pytest.MonkeyPatch, hold: Hold) -> None:
    """The backend stops in the middle of its first plan."""
    [binding] = step.bench.planner._bindings
    backend = binding.parts[0].backend
    plan = backend.plan

    def held(view: StepView, buffers: Any) -> AttentionPlan[Any]:
        hold()
        return plan(view, buffers)

    monkeypatch.setattr(backend, "plan", held)


def two_steps() -> tuple[Step, Step]:
    """Of one bench with two lanes."""
    bench = cases.bench([SPEC], lanes=(MAIN_LANE, OTHER_LANE))
    return Step(bench, [Row(17, 1), Row(3, 4)]), Step(bench, [Row(30, 1), Row(31, 1)], seed=1)


def test_a_second_thread_cannot_plan_while_one_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two_steps()
    planner, hold = first.bench.planner, Hold()
    old = planner.plan(second.batch)
    held_plan(first, monkeypatch, hold)
    planning = Background(lambda: planner.plan(first.batch), "the first")
    hold.until_entered()
    refused: list[Callable[[], object]] = [
        lambda: planner.plan(second.batch),
        lambda: planner.ensure(second.batch),
        lambda: planner.ensure(old),
        lambda: runner_of(second).forward(old),
    ]
    for work in refused:
        with pytest.raises(LaneBusyError, match=r"one thread at a time in lane 0, got MainThread while the first is"):
            work()
    check_forward(second, planner.plan(second.batch, lane=OTHER_LANE))
    hold.let_go()
    check_forward(first, planning.result())


def runner_of(step: Step, hold: Hold | None = None) -> Runner:
    memory = {lane: activations(step.bench.setting.max_step_tokens) for lane in step.bench.setting.lanes}
    model = OneLayer(step.layer, step.inputs) if hold is None else HeldLayer(step, hold)
    return Runner(model, step.bench.planner, memory)


def test_a_second_thread_can_neither_plan_nor_run_while_one_runs() -> None:
    first, second = two_steps()
    planner, hold = first.bench.planner, Hold()
    elsewhere = planner.plan(second.batch, lane=OTHER_LANE)
    old, mine = planner.plan(second.batch), planner.plan(first.batch)
    running = Background(lambda: runner_of(first, hold).forward(mine), "the first")
    hold.until_entered()
    for work in (
        lambda: planner.plan(second.batch),
        lambda: planner.ensure(old),
        lambda: runner_of(second).forward(old),
    ):
        with pytest.raises(LaneBusyError, match="got MainThread while the first is in it; let one thread do"):
            cast("Callable[[], object]", work)()
    check_forward(second, elsewhere)
    hold.let_go()
    cases_close(running.result(), first)
    check_forward(second, old)


def cases_close(found: Tensor, step: Step) -> None:
    assert (found - step.expected().out).abs().max() < 3e-5


def test_a_plan_between_another_threads_plan_and_forward_is_found_by_the_certificate() -> None:
    first, second = two_steps()
    planner = first.bench.planner
    mine = planner.plan(first.batch)
    theirs = Background(lambda: planner.plan(second.batch)).result()
    cases_close(runner_of(first).forward(mine), first)
    assert planner.num_rebuilt == 1, "the other thread's plan had filled the buffers"
    cases_close(Background(lambda: runner_of(second).forward(theirs)).result(), second)
    assert planner.num_rebuilt == 2


def test_many_threads_in_one_lane_are_right_or_refused() -> None:
    bench = cases.bench([SPEC], lanes=(MAIN_LANE,))
    steps = [Step(bench, [Row(5 + seed, 2), Row(seed, 1)], seed=seed) for seed in range(3)]

    def work(step: Step) -> tuple[int, int]:
        right = refused = 0
        runner = runner_of(step)
        while right < 20:
            try:
                found = runner.forward(bench.planner.plan(step.batch))
            except LaneBusyError:
                refused += 1
            else:
                cases_close(found, step)
                right += 1
        return right, refused

    counts = together([lambda step=step: work(step) for step in steps])  # type: ignore[misc]
    assert [right for right, _ in counts] == [20] * 3
    assert bench.planner.lanes._claims == {}


def test_an_error_inside_leaves_the_lane_free() -> None:
    first, second = two_steps()
    unknown = first.batch.bounded(first.batch.query_lens.bound, first.batch.context_lens.bound, known=False)
    with pytest.raises(Exception, match="needs exact host lengths"):
        first.bench.planner.plan(unknown)
    Background(lambda: check_forward(second, second.bench.planner.plan(second.batch))).result()


def test_a_thread_may_go_deeper_in_a_lane_that_it_is_in_and_leaves_it_once() -> None:
    guard = LaneGuard()

    def inner() -> str:
        return guard.run(MAIN_LANE, Depth.RUNNER, lambda: "inner")

    def outer() -> str:
        found = inner()
        with pytest.raises(LaneBusyError):
            Background(inner).result()
        return found

    assert guard.run(MAIN_LANE, Depth.ENGINE, outer) == "inner"
    assert Background(inner).result() == "inner"


@pytest.mark.parametrize("outer", Depth)
@pytest.mark.parametrize("inner", Depth)
def test_a_call_within_a_step_leads_deeper_or_is_refused_in_the_same_thread_too(outer: Depth, inner: Depth) -> None:
    """A signal handler that began a step within a step gave wrong vectors without an error."""
    guard = LaneGuard()

    def within() -> str:
        return guard.run(MAIN_LANE, inner, lambda: "within")

    if inner > outer:
        assert guard.run(MAIN_LANE, outer, within) == "within"
    else:
        with pytest.raises(LaneBusyError, match="expected no call in lane 0 from within a step"):
            guard.run(MAIN_LANE, outer, within)
    assert guard._claims == {}


def test_a_forward_within_a_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two_steps()
    runner = runner_for(second, planner=first.bench.planner)
    planned = first.bench.planner.plan(second.batch)

    def call(_batch: object) -> None:
        runner.forward(planned)

    planned_first = first.bench.planner.plan(first.batch)
    with monkeypatch.context() as patch:
        patch.setattr(PlannedBatch, "prepare", call)
        with pytest.raises(LaneBusyError, match="from within a step"):
            runner_for(first).forward(planned_first)
    check_forward(first, planned_first)


def test_a_lane_whose_thread_is_dead_is_free() -> None:
    guard = LaneGuard()
    dead = threading.Thread(target=lambda: None)
    dead.start()
    dead.join()
    guard._claims[MAIN_LANE] = (dead, Depth.RUNNING)
    assert guard.run(MAIN_LANE, Depth.ENGINE, lambda: "taken over") == "taken over"
    assert guard._claims == {}


def test_ctrl_c_never_leaves_a_lane_taken() -> None:
    """A handler that raises wherever in `run` it is called, thousands of times."""
    guard, raised, stop = LaneGuard(), 0, threading.Event()

    def interrupt(_number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is LaneGuard.run.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    def send() -> None:
        while not stop.wait(0.0002):
            os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGINT, interrupt)
    sender = Background(send)
    try:
        for _ in range(300_000):
            try:
                guard.run(MAIN_LANE, Depth.ENGINE, int)
            except KeyboardInterrupt:
                raised += 1
                assert guard._claims == {}
            if raised == 300:
                break
    finally:
        stop.set()
        until(lambda: sender.is_done)
        signal.signal(signal.SIGINT, previous)
    assert raised > 10
