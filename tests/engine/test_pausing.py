"""A request that is paused and resumed gives the answer of one that never was, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import cast

import pytest
import torch

from sightline import LLM, RequestOutput, SamplingParams
from sightline.core.errors import EngineClosedError
from sightline.core.request import Terms
from sightline.engine.engine import Engine
from sightline.llm import EngineSettings
from support.case_marks import proofs
from support.engines import is_at_rest
from support.tiny_models import make_model, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LENGTHS = [9, 14, 3, 30, 6]
VARIED = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True, n=3, logprobs=1),
    SamplingParams(temperature=0.8, seed=5, max_tokens=9, ignore_eos=True, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, prompt_logprobs=1, logprobs=1),
    SamplingParams(temperature=0.7, top_k=5, seed=1, max_tokens=11, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3")
    make_model("gemma3").save_pretrained(path)
    return path


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def llm(folder: Path, request: pytest.FixtureRequest) -> LLM:
    return tiny(folder, async_scheduling=request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def runtime(folder: Path, request: pytest.FixtureRequest) -> LLM:
    """For tests that build engines of their own and leave its pages free."""
    return tiny(folder, async_scheduling=request.param)


def tiny(folder: Path, **changes: object) -> LLM:
    settings = {"skip_tokenizer_init": True, "cache_tokens": 1024, "page_size": 4, "paranoid": True, **changes}
    return LLM(str(folder), **cast("EngineSettings", settings))


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def play(engine: Engine, disturb: Callable[[list[str]], None] = lambda requests: None) -> list[str]:
    """Runs all prompts to their ends; `disturb` is called with the requests before each step."""
    requests = [engine.submit(prompt, each) for prompt, each in zip(random_prompts(LENGTHS), VARIED, strict=True)]
    while engine.has_work:
        disturb(requests)
        engine.step()
    for request in requests:
        engine.resume(request)
    finish(engine)
    return requests


def ask(engine: Engine, disturb: Callable[[list[str]], None] = lambda requests: None) -> list[RequestOutput]:
    return [engine.pop_output(request) for request in play(engine, disturb)]


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.error is None
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in wanted.outputs]
        assert [each.finish_reason for each in output.outputs] == [each.finish_reason for each in wanted.outputs]
        assert len(output.prompt_logprobs or ()) == len(wanted.prompt_logprobs or ())
        for each, other in zip(output.outputs, wanted.outputs, strict=True):
            assert len(each.logprobs or ()) == len(other.logprobs or ())
            for entry, known in zip(each.logprobs or (), other.logprobs or (), strict=True):
                assert {token: told.logprob for token, told in entry.items()} == pytest.approx(
                    {token: told.logprob for token, told in known.items()}, abs=1e-4
                )


@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        *proofs({"prefix_caching": False}, {"max_num_batched_tokens": 7, "max_num_seqs": 3}),
        {"cache_tokens": 72, "max_model_len": 64, "max_num_seqs": 5},
    ],
    ids=["cached", "uncached", "chunked", "retracted"],
)
def test_pauses_change_no_answer(folder: Path, changes: dict[str, object], in_flight: bool) -> None:
    expected = ask(tiny(folder, **changes, async_scheduling=in_flight).engine)
    llm = tiny(folder, **changes, async_scheduling=in_flight)
    random, most_paused = Random(7), 0

    def disturb(requests: list[str]) -> None:
        nonlocal most_paused
        request = random.choice(requests)
        random.choice([llm.engine.pause, llm.engine.resume])(request)
        most_paused = max(most_paused, llm.engine.metrics().num_requests_paused)

    assert_same(ask(llm.engine, disturb), expected)
    assert most_paused > 1
    assert is_at_rest(llm)


def test_a_paused_request_is_no_work_holds_nothing_and_gains_nothing(llm: LLM) -> None:
    engine = llm.engine
    request = engine.submit(random_prompts([9])[0], GREEDY)
    for _ in range(3):
        engine.step()
    engine.pause(request)
    engine.pause(request)
    finish(engine)
    assert is_at_rest(llm)
    assert (engine.metrics().num_requests_paused, engine.metrics().num_requests_running) == (1, 0)
    assert engine.idle_seconds is None, "nothing will happen by itself"
    steps = engine.metrics().steps
    while engine.take_delta(request) is not None:
        pass
    engine.step()
    assert engine.metrics().steps == steps
    assert not engine.has_delta(request)
    assert not engine.is_finished(request)
    engine.resume(request)
    engine.resume(request)
    finish(engine)
    alone = engine.submit(random_prompts([9])[0], GREEDY)
    finish(engine)
    assert engine.pop_output(request).outputs[0].token_ids == engine.pop_output(alone).outputs[0].token_ids


def test_ids_that_are_unknown_or_over_are_no_error(llm: LLM) -> None:
    engine = llm.engine
    request = engine.submit([1, 2, 3], GREEDY)
    finish(engine)
    for each in (request, "request-unknown"):
        engine.pause(each)
        engine.resume(each)
    assert not engine.has_work
    assert len(engine.pop_output(request).outputs[0].token_ids) == 12
    assert is_at_rest(llm)


@pytest.mark.parametrize("how", ["cancel", "abandon", "forget", "deadline", "close"])
@pytest.mark.parametrize("num_steps", [0, 1, 4], ids=["waiting", "started", "running"])
@pytest.mark.parametrize("is_parked", [False, True], ids=["parking", "parked"])
def test_what_is_paused_can_end_in_any_phase(runtime: LLM, how: str, num_steps: int, is_parked: bool) -> None:
    now = 0.0
    engine = Engine(runtime.engine.runtime, None, runtime.engine.generation, runtime.engine.ledger, lambda: now)
    params = SamplingParams(temperature=0.0, max_tokens=12, n=2, ignore_eos=True)
    request = engine.submit(random_prompts([9])[0], params, None, Terms(timeout=5.0))
    for _ in range(num_steps):
        engine.step()
    engine.pause(request)
    if is_parked:
        finish(engine)
        assert engine.metrics().num_requests_paused == 2
        assert engine.idle_seconds == 5.0
    if how == "deadline":
        now = 5.0
    elif how == "close":
        engine.close()
    else:
        getattr(engine, how)(request)
    if how in ("cancel", "abandon", "deadline"):
        assert engine.has_work, "a step ends it"
    finish(engine)
    if how in ("cancel", "deadline"):
        output = engine.pop_output(request)
        assert [each.finish_reason for each in output.outputs] == ["abort", "abort"]
        assert (output.error is None) == (how == "cancel")
    else:
        with pytest.raises(EngineClosedError if how == "close" else ValueError):
            engine.is_finished(request)
    assert engine.metrics().num_requests_paused == 0
    engine.close()
    store = engine.runtime.store
    assert store.num_free_pages == store.num_usable_pages
    assert store.num_free_rows == store.limits.max_rows


def test_a_device_that_dies_answers_the_paused_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm.engine
    paused, running = engine.submit([1, 2, 3], GREEDY), engine.submit([4, 5, 6], GREEDY)
    engine.step()
    engine.pause(paused)

    def failing(_: object) -> torch.Tensor:
        raise torch.AcceleratorError("the device is gone")

    monkeypatch.setattr(engine.runtime.runner, "forward", failing)
    finish(engine)
    for request in (paused, running):
        assert engine.pop_output(request).outputs[0].finish_reason == "error"
    assert engine.fault is not None


def test_requests_that_are_paused_leave_the_queue_to_others(folder: Path) -> None:
    engine = tiny(folder, max_queued_requests=2, max_num_seqs=1).engine
    for request in [engine.submit([1, 2, 3], GREEDY) for _ in range(2)]:
        engine.pause(request)
    others = [engine.submit([4, 5, 6], GREEDY) for _ in range(2)]
    finish(engine)
    assert all(engine.is_finished(request) for request in others)


def test_interruptions_lose_no_pause(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ask(tiny(folder, async_scheduling=True).engine)
    llm = tiny(folder, async_scheduling=True)
    scheduler, calls, random, interruptions = llm.engine._scheduler, iter(range(100_000)), Random(3), 0

    def interrupting(function: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: object) -> object:
            number = next(calls)
            if number % 13 == 5:
                raise KeyboardInterrupt
            result = function(*arguments)
            if number % 13 == 10:
                raise KeyboardInterrupt
            return result

        return called

    for name in ("schedule", "launched", "commit", "landed", "remove", "pause", "resume"):
        monkeypatch.setattr(scheduler, name, interrupting(getattr(scheduler, name)))

    def stubborn(function: Callable[..., None]) -> Callable[..., None]:
        def called(*arguments: str) -> None:
            nonlocal interruptions
            for _ in range(20):
                try:
                    function(*arguments)
                    return
                except KeyboardInterrupt:
                    interruptions += 1

        return called

    for name in ("step", "pause", "resume"):
        monkeypatch.setattr(llm.engine, name, stubborn(getattr(llm.engine, name)))
    requests = play(
        llm.engine,
        lambda requests: random.choice([llm.engine.pause, llm.engine.resume])(random.choice(requests)),
    )
    monkeypatch.undo()
    assert interruptions > 10
    assert_same([llm.engine.pop_output(request) for request in requests], expected)
    assert is_at_rest(llm)
