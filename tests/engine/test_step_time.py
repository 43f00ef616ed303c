"""Steps take no longer than they may while rows generate, on a device whose time is virtual."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from sightline.core.request import SamplingParams
from sightline.engine import measuring
from sightline.engine.measuring import LEAST_SECONDS, STEPS_PER_LIMIT, choose_limit
from sightline.scheduler.costs import LEAST_TOKENS
from sightline.scheduler.sequence import ScheduledRow
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.faults import STEP_TICKS, TICK
from sightline.testing.simulator.scenario import Scene
from sightline.testing.simulator.stage import Stage, set_stage

STREAM = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
LIMIT = STEP_TICKS + 50


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_stage(ticks: int | None, *, in_flight: bool = False, max_len: int = 96) -> Stage:
    """Steps of 8 ticks, one more per token, and with a limit four more per token that needs logits."""
    scene = Scene(
        page_size=4,
        num_pages=128,
        max_rows=4,
        max_step_tokens=64,
        max_len=max_len,
        max_queued=8,
        prefix_caching=True,
        async_scheduling=in_flight,
        paranoid=False,
        max_step_ticks=ticks,
    )
    return set_stage(scene, lambda replica, batch: None, EventCounts(), lambda finding: None)


def run_steps(stage: Stage, request_id: str) -> list[tuple[int, int]]:
    """The tokens and the ticks of each step until a request ends."""
    seen, engine, clock = [], stage.engine, stage.faults.clock
    while not engine.is_finished(request_id):
        before = clock.now
        engine.step()
        lengths = [row.num_tokens for step in engine.in_flight for row in step.rows]
        seen.append((sum(lengths), round((clock.now - before) / TICK)))
    return seen


def stage_with_a_stream(ticks: int | None, *, in_flight: bool = False) -> Stage:
    """A stage whose rate is known and where a row generates."""
    stage = make_stage(ticks, in_flight=in_flight)
    run_steps(stage, stage.engine.submit([1] * 64, SHORT))
    stage.engine.submit([2, 3], STREAM)
    for _ in range(8):
        stage.engine.step()
    return stage


@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("params", [SHORT, SCORED], ids=["plain", "scored"])
def test_a_long_prompt_beside_a_stream_takes_no_step_beyond_the_limit(params: SamplingParams, in_flight: bool) -> None:
    stage = stage_with_a_stream(LIMIT, in_flight=in_flight)
    least = STEP_TICKS + 5 + (5 if params is SCORED else 1) * LEAST_TOKENS + 4
    seen = run_steps(stage, stage.engine.submit([4, 5] * 45, params))
    assert max(ticks for _, ticks in seen) <= max(LIMIT, least)
    assert len(seen) >= 4, "the prompt is read in chunks"


def test_without_a_limit_the_same_prompt_takes_a_full_step() -> None:
    stage = stage_with_a_stream(None)
    seen = run_steps(stage, stage.engine.submit([4, 5] * 45, SHORT))
    assert max(ticks for _, ticks in seen) == STEP_TICKS + 64


def test_a_prompt_that_nobody_waits_for_takes_whole_steps() -> None:
    stage = make_stage(LIMIT)
    seen = run_steps(stage, stage.engine.submit([4, 5] * 45, SHORT))
    assert max(ticks for _, ticks in seen) == STEP_TICKS + 64
    assert stage.engine.metrics().steps_over_limit == 0, "no row generates in it"


def test_a_limit_below_one_decode_step_still_makes_progress() -> None:
    stage = stage_with_a_stream(2)
    seen = run_steps(stage, stage.engine.submit([4, 5] * 45, SHORT))
    assert len(seen) <= 90 // LEAST_TOKENS + 3
    metrics = stage.engine.metrics()
    assert metrics.steps_over_limit > 5
    assert metrics.step_seconds == pytest.approx(stage.faults.clock.now)


def test_answers_do_not_depend_on_the_limit() -> None:
    answers = []
    for ticks in (None, 2, LIMIT):
        stage = stage_with_a_stream(ticks)
        request_id = stage.engine.submit([4, 5] * 45, SCORED)
        run_steps(stage, request_id)
        output = stage.engine.pop_output(request_id)
        answers.append((output.outputs[0].token_ids, output.prompt_logprobs))
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("max_len", [2, 5, 96])
def test_measuring_chooses_from_the_time_of_one_token_and_leaves_nothing(max_len: int) -> None:
    stage = make_stage(None, max_len=max_len)
    engine, allocators = stage.engine, stage.replicas[0].allocators
    choose_limit(engine, stage.faults.clock)
    one_token = (STEP_TICKS + 1) * TICK
    assert STEPS_PER_LIMIT * one_token < LEAST_SECONDS
    assert engine.pace.max_step_ms == pytest.approx(LEAST_SECONDS * 1e3)
    assert not engine.has_work
    assert all(each.num_free == each.num_usable for each in allocators)
    [prefixes] = engine.prefixes
    assert prefixes.num_pages == 0
    metrics = engine.metrics()
    counts = (metrics.steps, metrics.plans, metrics.prompt_tokens, metrics.generation_tokens, metrics.step_seconds)
    assert counts == (0, 0, 0, 0, 0.0)
    assert (metrics.prefix_cache_queries, dict(metrics.request_success)) == (0, {})


def test_a_slow_model_is_measured_for_about_a_second_and_waits_four_of_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = make_stage(None)
    monkeypatch.setattr(stage.faults.clock, "tick", lambda count=1: _pass(stage, 3.0))
    choose_limit(stage.engine, stage.faults.clock)
    assert stage.faults.clock.now <= measuring.MOST_SECONDS + 4 * 3.0
    assert stage.engine.pace.max_step_ms == pytest.approx(STEPS_PER_LIMIT * 3.0 * 1e3)


def test_steps_in_which_kernels_are_compiled_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of one token, and a step with a prompt, take 20 s the first time."""
    stage, seen = make_stage(None), set[bool]()
    launch = stage.engine._launcher.launch

    def compiling(rows: Sequence[ScheduledRow], *others: Any) -> Any:
        kind = max(row.num_tokens for row in rows) > 1
        _pass(stage, 0.0 if kind in seen else 20.0)
        seen.add(kind)
        return launch(rows, *others)

    monkeypatch.setattr(stage.engine._launcher, "launch", compiling)
    choose_limit(stage.engine, stage.faults.clock)
    assert seen == {False, True}
    assert stage.engine.pace.max_step_ms == pytest.approx(LEAST_SECONDS * 1e3)
    assert stage.engine.pace.seconds(64.0) < 1.0


def test_steps_that_other_work_slows_down_do_not_raise_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but every third step take a second more: a typical step would allow four seconds."""
    stage, steps = make_stage(None), itertools.count()
    launch = stage.engine._launcher.launch

    def slowed(*given: Any) -> Any:
        _pass(stage, 1.0 if next(steps) % 3 else 0.0)
        return launch(*given)

    monkeypatch.setattr(measuring, "MOST_SECONDS", 60.0)
    monkeypatch.setattr(stage.engine._launcher, "launch", slowed)
    choose_limit(stage.engine, stage.faults.clock)
    assert stage.engine.pace.max_step_ms == pytest.approx(LEAST_SECONDS * 1e3)


def _pass(stage: Stage, seconds: float) -> None:
    stage.faults.clock.now += seconds
