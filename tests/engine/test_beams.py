"""Beam search finds what transformers finds, and what a plain search over transformers' logits finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from sightline import LLM, BeamSearchParams, BeamSearchSequence
from sightline.core.errors import RequestError
from sightline.llm import EngineSettings, TokensPrompt
from support.engines import is_at_rest
from support.tiny_models import make_model, random_prompts

END = 2
PROMPTS = random_prompts([5, 17, 9])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return tiny(folder)


def tiny(folder: Path, **changes: object) -> LLM:
    settings = {"skip_tokenizer_init": True, "cache_tokens": 2048, "page_size": 4, **changes}
    return LLM(str(folder), **cast("EngineSettings", settings))


def prompts_of(prompts: list[list[int]]) -> list[TokensPrompt]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def plain_search(
    model: PreTrainedModel, prompt: list[int], params: BeamSearchParams, end: int = END
) -> list[tuple[tuple[int, ...], float, bool]]:
    """Tokens, log probability and whether it ended; every beam is computed from its first token, in one loop."""
    running, ended = [(tuple(prompt), 0.0)], []

    def score(found: tuple[Any, ...]) -> float:
        return float(found[1] / len(found[0]) ** params.length_penalty)

    for _ in range(params.max_tokens):
        grown = []
        for tokens, total in running:
            with torch.no_grad():
                logprobs = model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1)
            for token in logprobs.topk(2 * params.beam_width).indices.tolist():
                found = total + float(logprobs[token])
                if token == end and not params.ignore_eos:
                    ended.append((tokens, found, True))
                else:
                    grown.append(((*tokens, token), found))
        running = sorted(grown, key=score, reverse=True)[: params.beam_width]
    left = [(tokens, total, False) for tokens, total in running]
    return sorted([*ended, *left], key=score, reverse=True)[: params.beam_width]


def check(found: tuple[BeamSearchSequence, ...], expected: list[tuple[tuple[int, ...], float, bool]]) -> None:
    assert [each.tokens for each in found] == [tokens for tokens, _, _ in expected]
    assert [each.cum_logprob for each in found] == pytest.approx([total for _, total, _ in expected], abs=1e-3)
    assert [each.finish_reason for each in found] == ["stop" if ends else "length" for _, _, ends in expected]


@pytest.mark.parametrize("width", [1, 3, 10])
def test_beams_are_those_of_transformers(llm: LLM, model: PreTrainedModel, width: int) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=7, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.beam_search(prompts_of(PROMPTS), params), strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=7,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert [list(each.tokens) for each in output.sequences] == expected.tolist()
    assert is_at_rest(llm)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
def test_beams_that_end_are_ranked_with_those_that_go_on(
    llm: LLM, model: PreTrainedModel, length_penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end token is one that the model likes, so that beams end early, late and not at all."""
    greedy = BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True)
    likely = llm.beam_search(prompts_of(PROMPTS[:1]), greedy)[0].sequences[0].tokens[-1]
    monkeypatch.setattr(llm.engine, "generation", replace(llm.engine.generation, eos_token_ids=frozenset({likely})))
    params = BeamSearchParams(beam_width=4, max_tokens=6, length_penalty=length_penalty)
    outputs = llm.beam_search(prompts_of(PROMPTS), params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        check(output.sequences, plain_search(model, prompt, params, likely))
    reasons = {each.finish_reason for output in outputs for each in output.sequences}
    assert ("stop" in reasons) == (length_penalty < 2), "a high penalty prefers what is long"
    assert {each.stop_reason for output in outputs for each in output.sequences} <= {likely, None}


def test_beams_share_the_pages_of_their_beginning(folder: Path) -> None:
    llm = tiny(folder)
    llm.beam_search(prompts_of([PROMPTS[1]]), BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True))
    metrics = llm.engine.metrics()
    assert metrics.prefix_cache_hits > metrics.prefix_cache_queries / 2


def test_a_search_without_prefix_caching_finds_the_same(folder: Path, llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    alone, shared = (
        [each.tokens for output in one.beam_search(prompts_of(PROMPTS), params) for each in output.sequences]
        for one in (tiny(folder, prefix_caching=False), llm)
    )
    assert alone == shared


def test_a_search_ends_at_the_end_of_the_context(folder: Path) -> None:
    llm = tiny(folder, max_model_len=20)
    [output] = llm.beam_search(prompts_of([PROMPTS[1]]), BeamSearchParams(beam_width=2, max_tokens=99, ignore_eos=True))
    assert [len(each.tokens) for each in output.sequences] == [20, 20]


def test_a_prompt_that_cannot_run_fails_alone(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    good, bad = llm.beam_search(prompts_of([PROMPTS[0], [10**6]]), params)
    assert good == llm.beam_search(prompts_of(PROMPTS[:1]), params)[0]
    assert bad.sequences == ()
    assert bad.error is not None
    assert "expected token ids from 0 to" in bad.error


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beam_width": 0}, "expected beam_width between 1 and 10, got 0"),
        ({"beam_width": 11}, "expected beam_width between 1 and 10, got 11"),
        ({"max_tokens": 0}, "expected max_tokens between 1 and"),
        ({"temperature": 0.5}, "expected temperature 0 or 1 in a beam search, got 0.5"),
        ({"length_penalty": float("nan")}, "expected length_penalty to be a finite number"),
    ],
)
def test_parameters_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**given)


def test_the_default_model_tells_the_text() -> None:
    llm = LLM(cache_tokens=1024, max_model_len=128)
    [output] = llm.beam_search("The capital of France is", BeamSearchParams(beam_width=2, max_tokens=2))
    assert output.sequences[0].text == "The capital of France is Paris."
    assert output.sequences[0].cum_logprob > output.sequences[1].cum_logprob
