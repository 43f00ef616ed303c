"""What fails, fails alone: a row, a request, a step that raises; and a device that dies answers everybody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
import torch

from sightline import LLM, SamplingParams
from sightline.attention.planner import PlannedBatch
from sightline.cache.table import PageTable
from sightline.core.errors import DeviceFaultError, EngineClosedError
from sightline.core.request import FinishReason
from sightline.engine.engine import Engine
from sightline.engine.live import LiveSequence
from sightline.engine.sampled import Sampled
from sightline.llm import EngineSettings
from support.engines import is_at_rest
from support.tiny_models import make_model, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
LENGTHS = [9, 14, 3, 11, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3")
    make_model("gemma3").save_pretrained(path)
    return path


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def llm(folder: Path, request: pytest.FixtureRequest) -> LLM:
    return tiny(folder, async_scheduling=request.param)


def tiny(folder: Path, **changes: object) -> LLM:
    settings = {"skip_tokenizer_init": True, "cache_tokens": 1024, "page_size": 4, "paranoid": True, **changes}
    return LLM(str(folder), **cast("EngineSettings", settings))


def run(engine: Engine, prompts: list[list[int]]) -> tuple[list[tuple[int, ...]], list[str | None]]:
    """The tokens and the errors of requests that run together."""
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
    while engine.has_work:
        engine.step()
    outputs = [engine.pop_output(request) for request in requests]
    return [output.outputs[0].token_ids for output in outputs], [output.error for output in outputs]


@cache
def _healthy(folder: Path) -> tuple[tuple[int, ...], ...]:
    tokens, _ = run(tiny(folder).engine, random_prompts(LENGTHS))
    return tuple(tokens)


def healthy(folder: Path) -> list[tuple[int, ...]]:
    """The tokens of requests of these lengths where nothing is wrong."""
    return list(_healthy(folder))


def disturb(
    llm: LLM, patch: pytest.MonkeyPatch, before: Callable[[PlannedBatch], None], *, after: bool = False
) -> list[int]:
    """Calls `before` at every forward; returns how many rows each forward had, as they come."""
    forward = llm.engine.runtime.runner.forward
    seen: list[int] = []

    def disturbed(planned: PlannedBatch) -> torch.Tensor:
        seen.append(planned.batch.num_rows)
        if after:
            logits = forward(planned)
            before(planned)
            return logits
        before(planned)
        return forward(planned)

    patch.setattr(llm.engine.runtime.runner, "forward", disturbed)
    return seen


def poisoned(prompt: list[int]) -> Callable[[PlannedBatch], None]:
    """Raises wherever the first token of a prompt is computed beside the second."""
    first, second = prompt[:2]

    def check(planned: PlannedBatch) -> None:
        tokens = planned.batch.tokens.tolist()
        if any(pair == (first, second) for pair in pairwise(tokens)):
            raise MemoryError("no memory for this one")

    return check


# Every row before and after, and in both ways of scheduling: every two of them together.
@pytest.mark.parametrize(
    ("llm", "bad", "after"),
    [(bad % 2 != after, bad, bool(after)) for bad in range(len(LENGTHS)) for after in (0, 1)],
    indirect=["llm"],
)
def test_a_row_that_makes_its_step_raise_fails_alone(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch, bad: int, after: bool
) -> None:
    prompts = random_prompts(LENGTHS)
    expected = healthy(folder)
    disturb(llm, monkeypatch, poisoned(prompts[bad]), after=after)
    tokens, errors = run(llm.engine, prompts)
    assert [index for index, error in enumerate(errors) if error is not None] == [bad]
    assert errors[bad] == "MemoryError: no memory for this one"
    assert tokens[bad] == ()
    del tokens[bad], expected[bad]
    assert tokens == expected
    assert is_at_rest(llm)
    assert llm.engine.metrics().request_success == {"length": 4, "error": 1}


def test_a_row_is_found_by_halves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, prompts = tiny(folder, max_num_seqs=16, enforce_eager=True), random_prompts([4] * 16)
    seen = disturb(llm, monkeypatch, poisoned(prompts[5]))
    for prompt in prompts:
        llm.engine.submit(prompt, GREEDY)
    llm.engine.step()
    assert seen == [16, 8, 4, 4, 2, 1, 1, 2, 8], "each half that raises is halved, the others run once"
    assert llm.engine.metrics().steps_cut == 1


@pytest.mark.parametrize("rows", [1, 5])
def test_what_raises_once_harms_nobody(llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    prompts = random_prompts(LENGTHS[:rows])
    expected = healthy(folder)[:rows]
    calls = iter(range(1000))

    def now_and_then(planned: PlannedBatch) -> None:
        if next(calls) % 7 == 3:
            raise RuntimeError("a bad moment")

    disturb(llm, monkeypatch, now_and_then)
    assert run(llm.engine, prompts) == (expected, [None] * rows)
    assert llm.engine.metrics().steps_cut >= 1
    assert is_at_rest(llm)


def test_a_row_of_no_numbers_fails_alone_and_the_step_is_not_run_again(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts(LENGTHS)
    expected = healthy(folder)
    forward = llm.engine.runtime.runner.forward
    num_forwards = 0

    def nan_in_the_second(planned: PlannedBatch) -> torch.Tensor:
        nonlocal num_forwards
        num_forwards += 1
        logits = forward(planned).clone()
        if num_forwards == 3:
            logits[1, 7] = torch.nan
        return logits

    monkeypatch.setattr(llm.engine.runtime.runner, "forward", nan_in_the_second)
    tokens, errors = run(llm.engine, prompts)
    assert [error is not None for error in errors] == [False, True, False, False, False]
    assert "NaN" in str(errors[1])
    assert tokens[1] == expected[1][:2]
    assert tokens[2:] == expected[2:]
    assert num_forwards == 10, "one a token"
    assert llm.engine.metrics().steps_cut == 0
    assert is_at_rest(llm)


def test_a_token_that_cannot_be_taken_in_fails_its_request_alone(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts(LENGTHS)
    expected = healthy(folder)
    take_in = LiveSequence.take_in

    def broken(live: LiveSequence) -> object:
        if live.sequence.request.prompt_token_ids == tuple(prompts[2]) and live.sequence.num_generated == 4:
            raise UnicodeError("no text for this token")
        return take_in(live)

    monkeypatch.setattr(LiveSequence, "take_in", broken)
    tokens, errors = run(llm.engine, prompts)
    assert errors == [None, None, "UnicodeError: no text for this token", None, None]
    assert [tokens[index] for index in (0, 1, 3, 4)] == [expected[index] for index in (0, 1, 3, 4)]
    assert is_at_rest(llm)


@pytest.mark.parametrize("when", ["launch", "commit"])
def test_a_device_that_dies_answers_everybody_and_takes_no_more(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    engine = llm.engine
    requests = [engine.submit(prompt, GREEDY) for prompt in random_prompts(LENGTHS)]
    stream = llm.stream({"prompt_token_ids": random_prompts([5])[0]}, GREEDY)
    for _ in range(3):
        engine.step()
    before = {request: len(engine._live[request].sequences[0].generated()) for request in requests}
    fault = torch.AcceleratorError("an illegal memory access was encountered")

    def dies(*_: object) -> None:
        raise fault

    if when == "launch":
        monkeypatch.setattr(engine.runtime.runner, "forward", dies)
    else:
        monkeypatch.setattr(Sampled, "read", dies)
    engine.step()
    assert not engine.has_work
    assert [delta.error for delta in stream][-1] == (
        "the device failed, and what was on it is lost: an illegal memory access was encountered"
    )
    for request in requests:
        output = engine.pop_output(request)
        assert output.outputs[0].finish_reason == "error"
        assert "the device failed" in str(output.error)
        assert len(output.outputs[0].token_ids) == before[request], "what it had is there"
    with pytest.raises(EngineClosedError, match="got one that ended: the device failed"):
        engine.submit([1, 2], GREEDY)
    engine.step()
    llm.close()


def test_a_device_fault_is_one_error_of_ours() -> None:
    assert issubclass(DeviceFaultError, Exception)
    assert not issubclass(torch.OutOfMemoryError, torch.AcceleratorError), "want of memory is survived"


def test_a_step_whose_results_cannot_be_read_fails_its_rows_and_no_later_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm.engine
    requests = [engine.submit(prompt, GREEDY) for prompt in random_prompts(LENGTHS)]

    def unreadable(_: Sampled) -> None:
        raise MemoryError("no room for the tokens")

    with monkeypatch.context() as patch:
        patch.setattr(Sampled, "read", unreadable)
        for _ in range(20):
            engine.step()
    for request in requests:
        output = engine.pop_output(request)
        assert (output.error, output.outputs[0].finish_reason) == ("MemoryError: no room for the tokens", "error")
    assert not engine.has_work
    [output] = llm.generate({"prompt_token_ids": random_prompts([5])[0]}, GREEDY)
    assert output.error is None


@pytest.mark.parametrize("where", ["append", "clear"])
def test_a_device_that_dies_while_pages_move_answers_everybody_too(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    engine = llm.engine
    requests = [engine.submit(prompt, GREEDY) for prompt in random_prompts([9, 14, 3])]
    engine.step()
    calls = iter(range(100))

    def dies(*_: object) -> None:
        next(calls)
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(PageTable, where, dies)
    engine.cancel(requests[0])
    engine.submit(random_prompts([20])[0], replace(GREEDY, max_tokens=200))
    for _ in range(40):
        engine.step()
    assert next(calls) > 0, "it died"
    assert not engine.has_work
    ends = [engine.pop_output(request).outputs[0].finish_reason for request in requests]
    assert set(ends) <= {"error", "abort"}
    assert "error" in ends
    with pytest.raises(EngineClosedError):
        engine.submit([1, 2], GREEDY)
    llm.close()


def test_log_probabilities_that_cannot_be_told_fail_their_request_alone(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts(LENGTHS)
    expected = healthy(folder)

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory for log probabilities")

    monkeypatch.setattr("sightline.engine.sampled.score_tokens", no_memory)
    engine = llm.engine
    requests = [
        engine.submit(prompt, replace(GREEDY, logprobs=1 if index == 1 else None))
        for index, prompt in enumerate(prompts)
    ]
    while engine.has_work:
        engine.step()
    outputs = [engine.pop_output(request) for request in requests]
    assert [output.error for output in outputs] == [
        None,
        "OutOfMemoryError: no memory for log probabilities",
        None,
        None,
        None,
    ]
    assert [outputs[index].outputs[0].token_ids for index in (0, 2, 3, 4)] == [expected[i] for i in (0, 2, 3, 4)]
    assert is_at_rest(llm)


@pytest.mark.parametrize("how", ["length", "cancel"])
def test_a_request_that_cannot_tell_its_last_text_ends_all_the_same(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    prompts = random_prompts(LENGTHS)
    expected = healthy(folder)
    finish = LiveSequence.finish

    def broken(live: LiveSequence, reason: FinishReason) -> None:
        if live.sequence.request.prompt_token_ids == tuple(prompts[2]):
            raise UnicodeError("no text at the end")
        finish(live, reason)

    monkeypatch.setattr(LiveSequence, "finish", broken)
    engine = llm.engine
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
    engine.step()
    if how == "cancel":
        engine.cancel(requests[2])
    while engine.has_work:
        engine.step()
    outputs = [engine.pop_output(request) for request in requests]
    assert outputs[2].outputs[0].finish_reason == "error"
    assert outputs[2].error == "UnicodeError: no text at the end"
    assert [outputs[index].outputs[0].token_ids for index in (0, 1, 3, 4)] == [expected[i] for i in (0, 1, 3, 4)]
    assert is_at_rest(llm)
