"""The default model's greedy answers are the same however the requests are scheduled.

The answers of each prompt alone, in one chunk and without the prefix cache, are the ones that every other way must
give: other chunks, other batches, a warm cache, pools so small that every request is retracted. They are compared up
to the first position at which the two best tokens are as good as tied: from there on rounding may decide.
Of each kind one combination is part of `make prove`, all others run with `pytest -m slow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

import pytest

from sightline import LLM, SamplingParams
from sightline.core.request import RequestOutput, Terms
from sightline.llm import EngineSettings, TokensPrompt
from support.engines import is_at_rest

pytestmark = pytest.mark.prove
NEW_TOKENS = 32
CLEAR = 1e-3
"""Two best tokens whose logits differ by more are no tie."""
SHARED = (
    "You are a patient teacher. Keep every answer short, use plain words, and give one example from daily life.\n"
    "Question: "
)
PROMPTS = [
    "The capital of France is",
    f"{SHARED}Why is the sky blue in the day and red in the evening?\nAnswer:",
    "Once upon a time, in a village by the sea, there lived a fisherman who",
    f"{SHARED}Why does ice swim on water?\nAnswer:",
    f"{SHARED}Why does ice swim on water, and why does a stone sink to the ground at once?\nAnswer:",
    "def fibonacci(n):\n",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
SMALL_POOL = 160
"""Tokens of the cache: fewer than half of the requests fit at their ends."""
URGENT = Terms(priority=-1)
GAINED_BEFORE_URGENT = 9
"""Tokens that a request has generated when an urgent one takes every page."""
CHUNKS = [7, 64, 512]
"""Tokens of a step."""
ROWS = [6, 3, 1]
"""Sequences at once."""


@dataclass(frozen=True)
class Reference:
    """A prompt and its answer alone."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_clear: int
    """Positions before the first tie."""


def grid(*values: Sequence[object], routine: tuple[object, ...]) -> list[object]:
    """Every combination; all but one are slow."""
    return [pytest.param(*each, marks=() if each == routine else pytest.mark.slow) for each in product(*values)]


def load(**changes: object) -> LLM:
    settings = {"skip_tokenizer_init": True, "cache_tokens": 2048, "max_model_len": 1024, **changes}
    return LLM(**cast("EngineSettings", settings))


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    llm = load(prefix_caching=False, max_num_batched_tokens=512, skip_tokenizer_init=False)
    alone = [llm.generate(prompt, SCORED, use_tqdm=False)[0] for prompt in PROMPTS]
    return [Reference(each.prompt_token_ids, each.outputs[0].token_ids, count_clear(each)) for each in alone]


def count_clear(output: RequestOutput) -> int:
    """Differences of log probabilities are those of logits."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    for position, choices in enumerate(logprobs):
        best, second = sorted((choice.logprob for choice in choices.values()), reverse=True)[:2]
        if best - second <= CLEAR:
            return position
    return len(logprobs)


def ask(llm: LLM, references: Sequence[Reference], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    prompts = [TokensPrompt(prompt_token_ids=each.prompt) for each in references]
    return llm.generate(prompts, params, use_tqdm=False)


def ask_with_urgent_requests(llm: LLM, references: Sequence[Reference]) -> list[RequestOutput]:
    """All at once, and whenever one has come far enough for the first time, an urgent request for the whole pool."""
    engine = llm.engine
    requests = [engine.submit(each.prompt, GREEDY) for each in references]
    gained = dict.fromkeys(requests, 0)
    untouched, urgent = set(requests), []
    while engine.has_work:
        engine.step()
        for request in requests:
            delta = engine.take_delta(request)
            gained[request] += 0 if delta is None else len(delta.token_ids)
        if any(gained[request] >= GAINED_BEFORE_URGENT for request in untouched):
            urgent.append(engine.submit([5] * (SMALL_POOL - 1), SamplingParams(max_tokens=1), None, URGENT))
            # Whoever has a token either runs, and has to give way, or was retracted before.
            untouched -= {request for request in untouched if gained[request] > 0}
    assert [engine.pop_output(request).error for request in urgent] == [None] * len(urgent)
    return [engine.pop_output(request) for request in requests]


def assert_same_answers(outputs: Sequence[RequestOutput], references: Sequence[Reference]) -> None:
    for output, reference in zip(outputs, references, strict=True):
        assert output.error is None
        assert output.prompt_token_ids == reference.prompt
        [answer] = output.outputs
        assert len(answer.token_ids) == NEW_TOKENS
        assert answer.token_ids[: reference.num_clear] == reference.token_ids[: reference.num_clear]


def assert_same_after_retraction(llm: LLM, references: Sequence[Reference]) -> None:
    outputs = ask_with_urgent_requests(llm, references)
    assert all(output.num_retractions >= 1 for output in outputs)
    assert sum(output.num_retractions for output in outputs) <= llm.engine.num_retractions
    assert_same_answers(outputs, references)
    assert is_at_rest(llm)


def small(**changes: object) -> LLM:
    return load(cache_tokens=SMALL_POOL, max_model_len=SMALL_POOL, max_num_seqs=6, **changes)


def test_nearly_every_position_is_compared(references: list[Reference]) -> None:
    assert sum(each.num_clear for each in references) >= 0.95 * len(PROMPTS) * NEW_TOKENS
    lengths = [len(each.prompt) for each in references]
    assert len(set(lengths)) == len(lengths)
    assert max(lengths) + NEW_TOKENS <= SMALL_POOL < sum(lengths) + 3 * NEW_TOKENS


@pytest.mark.parametrize(("prefix_caching", "chunk", "rows"), grid([False, True], CHUNKS, ROWS, routine=(False, 7, 6)))
def test_any_chunks_and_any_batch(references: list[Reference], prefix_caching: bool, chunk: int, rows: int) -> None:
    llm = load(prefix_caching=prefix_caching, max_num_batched_tokens=chunk, max_num_seqs=rows)
    assert_same_answers(ask(llm, references), references)
    assert llm.engine.num_retractions == 0
    assert is_at_rest(llm)


@pytest.mark.parametrize(("chunk", "rows"), grid(CHUNKS, ROWS, routine=(64, 6)))
def test_a_warm_cache(references: list[Reference], chunk: int, rows: int) -> None:
    llm = load(max_num_batched_tokens=chunk, max_num_seqs=rows, page_size=4)
    ask(llm, references, SamplingParams(temperature=0.0, max_tokens=1))
    outputs = ask(llm, references)
    # All but a prompt's last token, in whole pages.
    assert [output.num_cached_tokens for output in outputs] == [(len(each.prompt) - 1) // 4 * 4 for each in references]
    assert all(output.num_cached_tokens > 0 for output in outputs)
    assert_same_answers(outputs, references)
    assert is_at_rest(llm)


@pytest.mark.parametrize(
    ("prefix_caching", "chunk", "page_size"), grid([False, True], CHUNKS, [4, 16], routine=(False, 64, 16))
)
def test_every_request_is_retracted_and_resumed(
    references: list[Reference], prefix_caching: bool, chunk: int, page_size: int
) -> None:
    llm = small(prefix_caching=prefix_caching, max_num_batched_tokens=chunk, page_size=page_size)
    assert_same_after_retraction(llm, references)


@pytest.mark.parametrize(("prefix_caching", "chunk"), grid([False, True], CHUNKS, routine=(True, 64)))
def test_every_request_is_retracted_and_resumed_with_a_step_in_flight(
    references: list[Reference], prefix_caching: bool, chunk: int
) -> None:
    llm = small(prefix_caching=prefix_caching, max_num_batched_tokens=chunk, page_size=4, async_scheduling=True)
    assert_same_after_retraction(llm, references)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "rows"), list(product(CHUNKS, ROWS)))
def test_any_chunks_and_any_batch_with_a_step_in_flight(references: list[Reference], chunk: int, rows: int) -> None:
    llm = load(max_num_batched_tokens=chunk, max_num_seqs=rows, async_scheduling=True)
    assert_same_answers(ask(llm, references), references)
    assert is_at_rest(llm)
