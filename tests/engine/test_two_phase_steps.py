"""A step is launched before the one before it is read, and nobody can tell from the answers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from sightline import LLM, RequestOutput, SamplingParams
from sightline.core.batch import CAUSAL
from sightline.core.errors import BatchError
from sightline.core.request import Request, RowNeeds, Terms
from sightline.engine.engine import Engine
from sightline.engine.launch import LaunchedStep, Outcome, rows_work, unread_tokens
from sightline.engine.live import LiveSequence
from sightline.llm import EngineSettings, TokensPrompt
from sightline.runner.sampling.sampler import BestTokens, Chosen, RowSampling, choose_unread
from sightline.scheduler.sequence import ScheduledRow, SequenceState
from support.case_marks import proofs
from support.engines import is_at_rest
from support.tiny_models import make_model, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LENGTHS = [9, 14, 3, 30, 6]


@pytest.fixture(scope="module", params=[*proofs("llama"), "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(str(request.param))
    make_model(str(request.param)).save_pretrained(path)
    return path


def tiny(folder: Path, **changes: object) -> LLM:
    settings = {
        "skip_tokenizer_init": True,
        "cache_tokens": 1024,
        "page_size": 4,
        "paranoid": True,
        "async_scheduling": True,
        **changes,
    }
    return LLM(str(folder), **cast("EngineSettings", settings))


def clocked(llm: LLM, clock: Callable[[], float]) -> Engine:
    """The same engine, with a clock of ours."""
    return Engine(llm.engine.runtime, None, llm.engine.generation, llm.engine.ledger, clock)


def ask(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in random_prompts(LENGTHS)]
    return llm.generate(prompts, params, use_tqdm=False)


VARIED = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True, n=3),
    SamplingParams(temperature=0.8, seed=5, max_tokens=9, ignore_eos=True, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, prompt_logprobs=1, logprobs=1),
    SamplingParams(temperature=0.7, top_k=5, seed=1, max_tokens=1, ignore_eos=True),
]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"prefix_caching": False},
        {"cache_tokens": 72, "max_model_len": 64, "max_num_seqs": 5},
    ],
    ids=["plain", "chunked", "uncached", "retracted"],
)
def test_answers_are_those_of_steps_one_after_the_other(folder: Path, changes: dict[str, object]) -> None:
    llm = tiny(folder, **changes)
    expected = ask(tiny(folder, **changes, async_scheduling=False), VARIED)
    outputs = ask(llm, VARIED)
    for output, wanted in zip(outputs, expected, strict=True):
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in wanted.outputs]
        assert [each.finish_reason for each in output.outputs] == [each.finish_reason for each in wanted.outputs]
        assert len(output.prompt_logprobs or ()) == len(wanted.prompt_logprobs or ())
        for each, other in zip(output.outputs, wanted.outputs, strict=True):
            assert [list(entry) for entry in each.logprobs or ()] == [list(entry) for entry in other.logprobs or ()]
    assert is_at_rest(llm)
    assert llm.engine.in_flight == ()


def test_the_form_of_a_gpu_gives_the_answers_of_the_cpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ask(tiny(folder, async_scheduling=False), VARIED)

    def as_on_a_gpu(logits: Tensor, rows: Sequence[RowSampling], inputs: Tensor, best: BestTokens) -> Chosen:
        return Chosen(choose_unread(logits, rows, inputs, best))

    monkeypatch.setattr("sightline.engine.sampled.choose", as_on_a_gpu)
    outputs = ask(tiny(folder), VARIED)
    assert [[each.token_ids for each in output.outputs] for output in outputs] == [
        [each.token_ids for each in output.outputs] for output in expected
    ]


def test_a_default_device_of_the_callers_changes_no_answer(folder: Path) -> None:
    expected = ask(tiny(folder), VARIED)
    llm = tiny(folder)
    with torch.device("meta"):
        outputs = ask(llm, VARIED)
    assert [[each.token_ids for each in output.outputs] for output in outputs] == [
        [each.token_ids for each in output.outputs] for output in expected
    ]


def test_an_autocast_of_the_callers_changes_no_answer(folder: Path) -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
    expected = ask(tiny(folder), asked)
    llm = tiny(folder)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = ask(llm, asked)
    assert [output.outputs[0].logprobs for output in outputs] == [output.outputs[0].logprobs for output in expected]


ADJUSTED = SamplingParams(
    temperature=0.7, seed=3, max_tokens=12, ignore_eos=True, repetition_penalty=1.5, frequency_penalty=0.8, min_tokens=3
)


@pytest.mark.parametrize(
    ("params", "num_steps"), [(ADJUSTED, 13), (replace(ADJUSTED, logit_bias={3: 5.0}, allowed_token_ids=[3, 4, 5]), 13)]
)
def test_rows_with_penalties_do_not_wait_for_a_commit(folder: Path, params: SamplingParams, num_steps: int) -> None:
    [prompt] = random_prompts([5])
    expected = tiny(folder, async_scheduling=False).generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    engine = tiny(folder).engine
    request = engine.submit(prompt, params)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert engine.pop_output(request).outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert steps == num_steps


def test_the_next_step_is_launched_before_the_last_is_committed(folder: Path) -> None:
    engine = tiny(folder).engine
    request = engine.submit(random_prompts([5])[0], GREEDY)
    engine.step()
    assert len(engine.in_flight) == 1
    assert engine.take_delta(request) is None
    engine.step()
    [step] = engine.in_flight
    assert [(row.context_len, row.num_tokens) for row in step.rows] == [(5, 1)]
    delta = engine.take_delta(request)
    assert delta is not None
    assert len(delta.token_ids) == 1


def test_a_stop_token_ends_its_request_and_what_was_launched_behind_it_is_dropped(folder: Path) -> None:
    free = [output.outputs[0].token_ids for output in ask(tiny(folder), GREEDY)]
    stop = free[1][4]
    llm = tiny(folder)
    params = [GREEDY] * len(LENGTHS)
    params[1] = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    outputs = ask(llm, params)
    assert outputs[1].outputs[0].token_ids == free[1][: free[1].index(stop) + 1]
    assert outputs[1].outputs[0].finish_reason == "stop"
    assert [output.outputs[0].token_ids for output in outputs[2:]] == free[2:]
    assert is_at_rest(llm)


@pytest.mark.parametrize("how", ["cancel", "abandon", "forget", "deadline"])
def test_what_ends_between_launch_and_commit_keeps_its_pages_until_the_commit(folder: Path, how: str) -> None:
    llm = tiny(folder, prefix_caching=False)
    now = 0.0
    engine = clocked(llm, lambda: now)
    store = engine.runtime.store
    bystander = engine.submit(random_prompts([9])[0], GREEDY)
    request = engine.submit(random_prompts([9, 14])[1], GREEDY, None, Terms(timeout=5.0))
    for _ in range(3):
        engine.step()
    [step] = engine.in_flight
    [row] = [row for row in step.rows if row.sequence.request.request_id == request]
    owned = [pool.table.owned(row.table_row) for pool in store.pools]
    if how == "deadline":
        now = 6.0
    else:
        getattr(engine, how)(request)
    if how == "forget":
        assert [pool.table.owned(row.table_row) for pool in store.pools] == owned
    engine.step()
    assert row.sequence.table_row is None, "its last step is over"
    if how in ("cancel", "deadline"):
        output = engine.pop_output(request)
        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids == ask(tiny(folder), GREEDY)[1].outputs[0].token_ids[:2]
        expected = {"cancel": None, "deadline": "expected an end within 5 s, got none; allow more time"}
        assert output.error == expected[how]
    while engine.has_work:
        engine.step()
    [alone] = tiny(folder).generate([TokensPrompt(prompt_token_ids=random_prompts([9])[0])], GREEDY)
    assert engine.pop_output(bystander).outputs[0].token_ids == alone.outputs[0].token_ids
    assert store.num_free_pages == store.num_usable_pages


def test_an_interruption_anywhere_in_a_step_loses_and_repeats_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, n=2, logprobs=1, ignore_eos=True)
    expected = ask(tiny(folder, async_scheduling=False), params)
    llm = tiny(folder)
    scheduler, calls = llm.engine._scheduler, iter(range(100_000))

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

    for name in ("schedule", "launched", "commit", "landed", "remove"):
        monkeypatch.setattr(scheduler, name, interrupting(getattr(scheduler, name)))
    step, interruptions = llm.engine.step, 0

    def stubborn() -> None:
        nonlocal interruptions
        try:
            step()
        except KeyboardInterrupt:
            interruptions += 1

    monkeypatch.setattr(llm.engine, "step", stubborn)
    prompts = random_prompts(LENGTHS)
    requests = [llm.engine.submit(prompt, params) for prompt in prompts]
    while llm.engine.has_work:
        llm.engine.step()
    monkeypatch.undo()
    outputs = [llm.engine.pop_output(request) for request in requests]
    assert interruptions > 10
    assert [[each.token_ids for each in output.outputs] for output in outputs] == [
        [each.token_ids for each in output.outputs] for output in expected
    ]
    assert is_at_rest(llm)


# One that comes while a weak reference dies is lost to Python itself.
@pytest.mark.prove
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
def test_real_interrupts_at_any_moment_leak_and_lose_nothing(folder: Path, in_flight: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, n=2, ignore_eos=True)
    changes = {"cache_tokens": 96, "max_model_len": 80, "max_num_seqs": 5, "async_scheduling": in_flight}
    expected = ask(tiny(folder, **changes), params)
    llm = tiny(folder, **changes)
    requests = [llm.engine.submit(prompt, params) for prompt in random_prompts(LENGTHS)]
    interruptions, random = 0, Random(3)
    previous = signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while llm.engine.has_work:
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 2e-2))
                llm.engine.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interruptions += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        signal.signal(signal.SIGINT, ctrl_c)
    assert interruptions > 5
    outputs = [llm.engine.pop_output(request) for request in requests]
    assert [[each.token_ids for each in output.outputs] for output in outputs] == [
        [each.token_ids for each in output.outputs] for output in expected
    ]
    assert is_at_rest(llm)


def in_flight(places: dict[SequenceState, int], tokens: list[int]) -> LaunchedStep[LiveSequence]:
    """A step in flight that chooses these tokens."""
    outcome = SimpleNamespace(places=places, next_tokens=torch.tensor(tokens))
    return LaunchedStep((), (), cast("Outcome", outcome), 0.0)


def test_a_row_continues_the_token_that_the_last_step_in_flight_chooses() -> None:
    first, second, third = (SequenceState(Request(name, None, (1, 2), RowNeeds(9))) for name in ("a", "b", "c"))
    one = in_flight({first: 0, second: 1}, [70, 71])
    assert unread_tokens([]) == ({}, None)
    places, tokens = unread_tokens([one])
    assert tokens is not None
    assert {each: int(tokens[place]) for each, place in places.items()} == {first: 70, second: 71}
    places, tokens = unread_tokens([one, in_flight({third: 0, first: 1}, [80, 81])])
    assert tokens is not None
    assert {each: int(tokens[place]) for each, place in places.items()} == {first: 81, second: 71, third: 80}


def test_a_row_whose_token_nobody_chooses_is_refused() -> None:
    sequence = SequenceState(Request("a", None, (1, 2), RowNeeds(9)))
    sequence.table_row = 3
    row = ScheduledRow(sequence, 3, 2, 1, completes=True, scores_prompt=False)
    work = rows_work([row], CAUSAL, {sequence: 5})
    assert (work.tokens, work.unread, work.query_lens) == ([[]], [5], (1,))
    with pytest.raises(BatchError, match="expected tokens to be 1 from 2 on that are known or being chosen, got 0"):
        rows_work([row], CAUSAL, {})
    with pytest.raises(BatchError, match="expected tokens to be 2 from 2 on"):
        rows_work([replace(row, num_tokens=2)], CAUSAL, {sequence: 5})
