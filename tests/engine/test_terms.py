"""Callers, priorities, deadlines and a queue that has an end."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from sightline import LLM, RequestOutput, SamplingParams
from sightline.core.errors import ConfigError, QueueFullError, RequestError
from sightline.core.request import Terms
from sightline.engine.engine import Engine
from sightline.llm import EngineSettings, TokensPrompt
from support.engines import is_at_rest
from support.tiny_models import make_model, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(path)
    return path


def tiny(folder: Path, **changes: object) -> LLM:
    settings = {"skip_tokenizer_init": True, "cache_tokens": 1024, "page_size": 4, **changes}
    return LLM(str(folder), **cast("EngineSettings", settings))


def prompts_of(count: int) -> list[TokensPrompt]:
    return [TokensPrompt(prompt_token_ids=prompt) for prompt in random_prompts([5] * count)]


def order_of_ends(engine: Engine, requests: list[str]) -> list[int]:
    """Indices of requests as they end."""
    ended: list[int] = []
    while engine.has_work:
        engine.step()
        ended += [index for index, request in enumerate(requests) if index not in ended and engine.is_finished(request)]
    return ended


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"caller": "x" * 257}, "expected a caller of at most 256 characters, got 257"),
        ({"caller": None}, "expected caller to be a string, got None"),
        ({"priority": None}, "expected priority to be a whole number, got None"),
        ({"priority": 1.5}, "expected priority to be a whole number, got 1.5"),
        ({"priority": 2**31}, "expected priority between"),
        ({"timeout": 0}, r"expected timeout in \(0, 1e\+09\], got 0"),
        ({"timeout": -1.0}, r"expected timeout in \(0, 1e\+09\], got -1.0"),
        ({"timeout": float("nan")}, "expected timeout to be a finite number, got nan"),
        ({"timeout": "5"}, "expected timeout to be a finite number, got '5'"),
    ],
)
def test_terms_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Terms(**changes)  # type: ignore[arg-type]


def test_a_full_queue_refuses_at_once_and_says_why(folder: Path) -> None:
    engine = tiny(folder, max_num_seqs=1, max_queued_requests=3).engine
    prompt = random_prompts([5])[0]
    for _ in range(3):
        engine.submit(prompt, GREEDY)
    with pytest.raises(QueueFullError, match="expected at most 3 sequences to wait, got 1 more to the 3 that do; try"):
        engine.submit(prompt, GREEDY)
    engine.step()
    engine.submit(prompt, GREEDY)
    with pytest.raises(QueueFullError, match="got 2 more to the 3"):
        engine.submit(prompt, SamplingParams(n=2))
    while engine.has_work:
        engine.step()
    metrics = engine.metrics()
    assert (metrics.requests_refused, metrics.request_success) == (2, {"length": 4})
    assert metrics.num_requests_waiting == metrics.num_requests_running == 0


def test_offline_generation_waits_for_the_queue_and_loses_nothing(folder: Path) -> None:
    small = tiny(folder, max_num_seqs=2, max_queued_requests=3)
    outputs = small.generate(prompts_of(20), GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [
        output.outputs[0].token_ids for output in tiny(folder).generate(prompts_of(20), GREEDY, use_tqdm=False)
    ]
    assert small.engine.metrics().requests_refused == 0
    [one, many] = small.generate(prompts_of(2), [GREEDY, SamplingParams(n=4)], use_tqdm=False)
    assert one.error is None
    assert "expected at most 3 sequences to wait, got 4 more to the 0 that do" in str(many.error)
    assert is_at_rest(small)


def test_the_most_urgent_end_first(folder: Path) -> None:
    engine = tiny(folder, max_num_seqs=1).engine
    prompts = random_prompts([5] * 4)
    requests = [
        engine.submit(prompt, GREEDY, None, Terms(priority=priority))
        for prompt, priority in zip(prompts, (2, 1, 0, 1), strict=True)
    ]
    assert order_of_ends(engine, requests) == [2, 1, 3, 0]


def test_generate_takes_a_priority_for_all_or_one_for_each(folder: Path) -> None:
    llm = tiny(folder, max_num_seqs=1)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts_of(3), GREEDY, use_tqdm=False)]
    for priority in (5, [3, 1, 2]):
        outputs = llm.generate(prompts_of(3), GREEDY, priority=priority, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    with pytest.raises(RequestError, match="expected one priority or 3, one for each prompt, got 2"):
        llm.generate(prompts_of(3), GREEDY, priority=[1, 2])
    with pytest.raises(RequestError, match="expected one SamplingParams or 3, one for each prompt, got 0"):
        llm.generate(prompts_of(3), [])
    assert llm.generate([], []) == []


def test_an_urgent_request_pushes_back_what_runs_and_that_goes_on_later(folder: Path) -> None:
    llm = tiny(folder, max_num_seqs=1)
    engine = llm.engine
    first, second = random_prompts([5, 6])
    patient = engine.submit(first, GREEDY, None, Terms(priority=1))
    engine.step()
    engine.step()
    urgent = engine.submit(second, GREEDY)
    assert order_of_ends(engine, [patient, urgent]) == [1, 0]
    output = engine.pop_output(patient)
    assert (output.num_retractions, engine.pop_output(urgent).num_retractions) == (1, 0)
    [alone] = tiny(folder).generate(TokensPrompt(prompt_token_ids=first), GREEDY)
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def deadline_engine(folder: Path, times: list[float], **changes: object) -> Engine:
    llm = tiny(folder, **changes)
    return Engine(llm.engine.runtime, None, llm.engine.generation, llm.engine.ledger, lambda: times[0])


def test_a_deadline_ends_what_runs_and_what_waits_with_what_it_has(folder: Path) -> None:
    now = [100.0]
    engine = deadline_engine(folder, now, max_num_seqs=1)
    prompts = random_prompts([5, 5, 5])
    running, waiting, patient = (
        engine.submit(prompt, GREEDY, None, Terms(timeout=timeout))
        for prompt, timeout in zip(prompts, (2.0, 2.5, None), strict=True)
    )
    engine.step()
    engine.step()
    now[0] = 103.0
    engine.step()
    outputs = [engine.pop_output(request) for request in (running, waiting)]
    assert [(output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) for output in outputs] == [
        ("abort", 2),
        ("abort", 0),
    ]
    assert [output.error for output in outputs] == [
        f"expected an end within {seconds} s, got none; allow more time" for seconds in (2, 2.5)
    ]
    while engine.has_work:
        engine.step()
    assert engine.pop_output(patient).outputs[0].finish_reason == "length"
    assert engine.metrics().request_success == {"abort": 2, "length": 1}


def test_a_deadline_that_passes_while_a_step_runs_ends_the_request_when_it_is_committed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    engine = deadline_engine(folder, now)
    request = engine.submit(random_prompts([5])[0], GREEDY, None, Terms(timeout=1.0))
    forward = engine.runtime.runner.forward

    def slow(planned: object) -> object:
        now[0] = 2.0
        return forward(planned)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runtime.runner, "forward", slow)
    engine.step()
    output = engine.pop_output(request)
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("abort", 1)


def test_one_that_ends_in_time_is_not_ended_again(folder: Path) -> None:
    now = [0.0]
    engine = deadline_engine(folder, now)
    request = engine.submit(random_prompts([5])[0], GREEDY, None, Terms(timeout=1.0))
    while engine.has_work:
        engine.step()
    now[0] = 5.0
    engine.step()
    output = engine.pop_output(request)
    assert (output.outputs[0].finish_reason, output.error) == ("length", None)


def test_generate_ends_what_takes_too_long(folder: Path) -> None:
    outputs: list[RequestOutput] = tiny(folder).generate(
        prompts_of(2), SamplingParams(max_tokens=200, ignore_eos=True), timeout=1e-3, use_tqdm=False
    )
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 2


def test_a_stream_ends_when_its_time_is_over_and_says_why(folder: Path) -> None:
    llm = tiny(folder)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    *_, last = llm.stream(prompts_of(1)[0], params, timeout=1e-3)
    assert (last.finish_reason, last.error) == ("abort", "expected an end within 0.001 s, got none; allow more time")
    assert is_at_rest(llm)


def test_callers_take_turns(folder: Path) -> None:
    engine = tiny(folder, max_num_seqs=1).engine
    prompts = random_prompts([5] * 5)
    callers = ["many", "many", "many", "few", "few"]
    requests = [
        engine.submit(prompt, GREEDY, None, Terms(caller)) for prompt, caller in zip(prompts, callers, strict=True)
    ]
    assert order_of_ends(engine, requests) == [0, 3, 1, 4, 2]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_caller_with_every_row_lends_one_and_its_answers_are_the_same(folder: Path, async_scheduling: bool) -> None:
    many = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    first, second = random_prompts([6, 5])
    answers = []
    for comes in (False, True):
        engine = tiny(folder, max_num_seqs=4, async_scheduling=async_scheduling).engine
        flood = engine.submit(first, many, None, Terms("flood"))
        for _ in range(8):
            engine.step()
        assert engine.metrics().num_requests_running == 4
        if comes:
            request = engine.submit(second, SamplingParams(max_tokens=1), None, Terms("other"))
            for _ in range(3):
                engine.step()
            assert engine.is_finished(request)
            assert not engine.is_finished(flood)
            assert len(engine.pop_output(request).outputs[0].token_ids) == 1
        while engine.has_work:
            engine.step()
        output = engine.pop_output(flood)
        assert output.num_retractions == comes
        answers.append([answer.token_ids for answer in output.outputs])
    assert len(set(answers[0])) == 4
    assert answers[0] == answers[1]


def test_what_was_found_in_the_cache_is_counted(folder: Path) -> None:
    llm = tiny(folder)
    [prompt] = random_prompts([21])
    for _ in range(2):
        llm.generate(TokensPrompt(prompt_token_ids=prompt), GREEDY, use_tqdm=False)
    metrics = llm.engine.metrics()
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (42, 20)
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (42, 12)
    assert metrics.kv_cache_usage_perc == 0.0
    assert metrics.steps == 12
    assert metrics.num_preemptions == metrics.steps_cut == metrics.plans_rebuilt == 0


def test_tokens_and_ends_are_counted_as_they_come_whoever_reads_them(folder: Path) -> None:
    engine = tiny(folder).engine
    kept, dropped = (engine.submit(prompt, GREEDY) for prompt in random_prompts([5, 5]))
    for _ in range(3):
        engine.step()
    assert engine.metrics().generation_tokens == 6
    engine.forget(dropped)
    while engine.has_work:
        engine.step()
    assert engine.metrics().request_success == {"abort": 1, "length": 1}
    engine.pop_output(kept)
    assert engine.metrics().request_success == {"abort": 1, "length": 1}
    assert engine.metrics().generation_tokens == 9


def test_deadlines_of_requests_that_have_ended_are_forgotten(folder: Path) -> None:
    engine = tiny(folder).engine
    for prompt in random_prompts([3] * 300):
        request = engine.submit(prompt, SamplingParams(max_tokens=1), None, Terms(timeout=3600.0))
        engine.step()
        engine.pop_output(request)
    assert len(engine._deadlines) < 100


def test_more_continuations_than_may_wait_are_told_so(folder: Path) -> None:
    engine = tiny(folder, max_queued_requests=3).engine
    with pytest.raises(QueueFullError, match="got 4 more to the 0 that do; lower n, or raise max_queued_requests"):
        engine.submit([1, 2], SamplingParams(n=4))


def test_a_queue_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected max_queued_requests to be a whole number of at least 1, got 0"):
        LLM(max_queued_requests=0)
