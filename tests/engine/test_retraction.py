"""Pages run out: somebody waits, computes again what it had, and answers as if nothing had happened."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import cast

import pytest

from sightline import LLM, SamplingParams
from sightline.llm import EngineSettings, TokensPrompt
from support.engines import is_at_rest
from support.tiny_models import make_model, random_prompts

LENGTHS = [9, 14, 3, 11, 6]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, seed=3, max_tokens=40, ignore_eos=True, repetition_penalty=1.2)


# The hybrid has all that the plain model has, and windows: the plain one is a proof.
@pytest.fixture(scope="module", params=[pytest.param("llama", marks=pytest.mark.prove), "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(str(request.param))
    make_model(str(request.param)).save_pretrained(path)
    return path


def tiny(folder: Path, **changes: object) -> LLM:
    settings = {"skip_tokenizer_init": True, "cache_tokens": 1024, "page_size": 4, "paranoid": True, **changes}
    return LLM(str(folder), **cast("EngineSettings", settings))


def ask(llm: LLM, lengths: list[int], params: SamplingParams) -> list[list[tuple[int, ...]]]:
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in random_prompts(lengths)]
    return [
        [continuation.token_ids for continuation in output.outputs]
        for output in llm.generate(prompts, params, use_tqdm=False)
    ]


@cache
def expected_answers(folder: Path, params: SamplingParams) -> list[list[tuple[int, ...]]]:
    return ask(tiny(folder), LENGTHS, params)


@pytest.mark.parametrize(
    ("params", "chunk", "prefix_caching"),
    # Every two of them together.
    [(GREEDY, 7, True), (GREEDY, 512, False), (SAMPLED, 7, False), (SAMPLED, 512, True)],
    ids=["greedy-7-cached", "greedy-512-plain", "sampled-7-plain", "sampled-512-cached"],
)
def test_answers_are_those_of_a_pool_that_is_large_enough(
    folder: Path, params: SamplingParams, chunk: int, prefix_caching: bool
) -> None:
    small = tiny(
        folder,
        cache_tokens=72,
        max_model_len=64,
        max_num_seqs=5,
        max_num_batched_tokens=chunk,
        prefix_caching=prefix_caching,
    )
    assert ask(small, LENGTHS, params) == expected_answers(folder, params)
    assert small.engine.num_retractions >= 4
    assert is_at_rest(small)


def test_continuations_of_one_request_are_retracted_one_by_one(folder: Path) -> None:
    params = SamplingParams(temperature=0.9, seed=8, n=4, max_tokens=40, ignore_eos=True)
    small = tiny(folder, cache_tokens=72, max_model_len=64, max_num_seqs=4)
    assert ask(small, [10], params) == ask(tiny(folder), [10], params)
    assert small.engine.num_retractions > 0


def test_log_probabilities_survive_a_retraction(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in random_prompts([9, 14, 11])]
    small = tiny(folder, cache_tokens=72, max_model_len=64, max_num_seqs=3)
    outputs = small.generate(prompts, params, use_tqdm=False)
    assert small.engine.num_retractions > 0
    for output, expected in zip(outputs, tiny(folder).generate(prompts, params, use_tqdm=False), strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.outputs[0].logprobs is not None
        assert len(output.outputs[0].logprobs) == 40
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


@pytest.mark.prove
def test_cancelling_while_others_are_retracted_leaves_every_page_with_its_owner(folder: Path) -> None:
    small = tiny(folder, cache_tokens=72, max_model_len=64, max_num_seqs=4)
    for steps in range(2, 60, 9):
        requests = [small.engine.submit(prompt, GREEDY) for prompt in random_prompts([9, 14, 3, 11])]
        for _ in range(steps):
            small.engine.step()
        for request in requests[::2]:
            small.engine.cancel(request)
        while small.engine.has_work:
            small.engine.step()
        for request in requests:
            small.engine.forget(request)
        assert is_at_rest(small)
    assert small.engine.num_retractions > 0
