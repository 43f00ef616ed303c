"""What was computed once is not computed again, and no answer changes for it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from sightline import LLM, RequestOutput, SamplingParams
from sightline.attention.planner import PlannedBatch
from sightline.core.request import Terms
from sightline.llm import EngineSettings, TokensPrompt
from sightline.scheduler.sequence import SequenceState
from support.case_marks import proofs
from support.engines import is_at_rest
from support.tiny_models import make_model, prompts_alike, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PAGE = 4


# The hybrids have all that the plain model has, and windows and sinks: the plain one is a proof.
@pytest.fixture(scope="module", params=[*proofs("llama"), "gemma3", "gemma4", *proofs("gpt_oss")])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(str(request.param))
    make_model(str(request.param)).save_pretrained(path)
    return path


def tiny(folder: Path, **changes: object) -> LLM:
    settings = {"skip_tokenizer_init": True, "cache_tokens": 1024, "page_size": PAGE, "paranoid": True, **changes}
    return LLM(str(folder), **cast("EngineSettings", settings))


def ask(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[continuation.token_ids for continuation in output.outputs] for output in outputs]


def test_a_prompt_that_was_answered_is_found_but_for_its_last_token(folder: Path) -> None:
    llm = tiny(folder)
    prompts = random_prompts([17, 16, 3])
    first, second = ask(llm, prompts), ask(llm, prompts)
    assert [output.num_cached_tokens for output in first] == [0, 0, 0]
    # Whole pages, and never the token whose logits are wanted.
    assert [output.num_cached_tokens for output in second] == [16, 12, 0]
    assert tokens(first) == tokens(second)
    assert is_at_rest(llm)


@pytest.fixture(scope="module")
def rounds(folder: Path) -> list[tuple[list[list[int]], list[list[tuple[int, ...]]]]]:
    """Prompts, and their answers without a cache, which no chunk changes."""
    plain = tiny(folder, prefix_caching=False, max_num_seqs=4)
    asked = [prompts_alike(22, 4, 5), prompts_alike(22, 4, 5), prompts_alike(9, 3, 14), random_prompts([30, 2, 8])]
    return [(prompts, tokens(ask(plain, prompts))) for prompts in asked]


@pytest.mark.parametrize("chunk", [5, *proofs(16, 512)])
def test_answers_are_those_without_a_cache(
    folder: Path, rounds: list[tuple[list[list[int]], list[list[tuple[int, ...]]]]], chunk: int
) -> None:
    cached = tiny(folder, max_num_batched_tokens=chunk, max_num_seqs=4)
    for prompts, answers in rounds:
        assert tokens(ask(cached, prompts)) == answers
    [prefixes] = cached.engine.prefixes
    assert prefixes.num_pages > 0
    assert is_at_rest(cached)


def test_a_conversation_reuses_its_answers_too(folder: Path) -> None:
    llm, plain = tiny(folder), tiny(folder, prefix_caching=False)
    [history] = random_prompts([10])
    for turn in range(4):
        [output] = ask(llm, [history])
        assert tokens([output]) == tokens(ask(plain, [history]))
        if turn:
            # All of the earlier turns but the last token that came, which was never computed, in whole pages.
            assert output.num_cached_tokens == (len(history) - 3 - 1) // PAGE * PAGE
        history = [*history, *output.outputs[0].token_ids, *random_prompts([3], seed=turn)[0]]


def test_a_cache_that_is_too_small_evicts_and_answers_all_the_same(folder: Path) -> None:
    prompts = prompts_alike(12, 6, 9) + random_prompts([25, 31, 7], seed=9)
    small = tiny(folder, cache_tokens=64, max_num_seqs=3, max_model_len=64)
    expected = tokens(ask(tiny(folder, prefix_caching=False), prompts))
    for _ in range(2):
        assert tokens(ask(small, prompts)) == expected
    assert is_at_rest(small)


def test_continuations_of_one_request_share_its_prompt(folder: Path) -> None:
    params = SamplingParams(temperature=0.9, seed=4, n=3, max_tokens=10, ignore_eos=True)
    [prompt] = random_prompts([21])
    llm = tiny(folder)
    [output] = ask(llm, [prompt], params)
    assert tokens([output]) == tokens(ask(tiny(folder, prefix_caching=False), [prompt], params))
    live = [sequence.num_cached for sequence in _sequences(llm, prompt, params)]
    assert live == [20, 20, 20]
    fresh = [sequence.num_cached for sequence in _sequences(tiny(folder), prompt, params)]
    assert fresh == [0, 20, 20]


def _sequences(llm: LLM, prompt: list[int], params: SamplingParams) -> list[SequenceState]:
    request = llm.engine.submit(prompt, params)
    sequences = [live.sequence for live in llm.engine._live[request].sequences]
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.forget(request)
    return sequences


def test_callers_see_nothing_of_each_other(folder: Path) -> None:
    llm = tiny(folder)
    [prompt] = random_prompts([20])

    def run(caller: str) -> int:
        request = llm.engine.submit(prompt, GREEDY, terms=Terms(caller))
        while llm.engine.has_work:
            llm.engine.step()
        return llm.engine.pop_output(request).num_cached_tokens

    assert [run("mine"), run("yours"), run("mine"), run("")] == [0, 0, 16, 0]


def test_a_request_whose_logits_are_no_numbers_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny(folder)
    [prompt] = random_prompts([20])
    runner = llm.engine.runtime.runner
    forward = runner.forward

    def broken(planned: PlannedBatch) -> Tensor:
        return torch.full_like(forward(planned), torch.nan)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", broken)
        [failed] = ask(llm, [prompt])
    assert failed.outputs[0].finish_reason == "error"
    [again] = ask(llm, [prompt])
    assert again.num_cached_tokens == 0
    assert is_at_rest(llm)


def test_prompts_whose_logprobs_are_wanted_are_computed_in_full(folder: Path) -> None:
    llm = tiny(folder)
    [prompt] = random_prompts([20])
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    first, second = ask(llm, [prompt], params), ask(llm, [prompt], params)
    assert second[0].num_cached_tokens == 0
    assert second[0].prompt_logprobs is not None
    assert len(second[0].prompt_logprobs) == 20
    assert tokens(first) == tokens(second)


def test_cancelling_in_any_phase_leaves_every_page_with_its_owner(folder: Path) -> None:
    llm = tiny(folder, max_num_batched_tokens=8, max_num_seqs=4)
    prompts = prompts_alike(16, 3, 9)
    for steps in range(8):
        requests = [llm.engine.submit(prompt, GREEDY) for prompt in prompts]
        for _ in range(steps):
            llm.engine.step()
        llm.engine.cancel(requests[steps % 3])
        while llm.engine.has_work:
            llm.engine.step()
        for request in requests:
            llm.engine.forget(request)
        assert is_at_rest(llm)


def test_closing_the_engine_gives_every_page_back(folder: Path) -> None:
    llm = tiny(folder)
    ask(llm, random_prompts([20, 30]))
    llm.engine.close()
    store = llm.engine.runtime.store
    assert store.num_free_pages == store.num_usable_pages
