"""Allowed tokens, bad words, prompts that are cut or only scored, and the face's temperature, through the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from sightline import LLM, SamplingParams
from sightline.core.errors import RequestError
from sightline.core.request import EffectiveParams, Terms
from sightline.engine.intake import Intake
from sightline.models.loading.generation import GenerationDefaults
from sightline.text.tokenizers.tokenizer import Tokenizer
from support.engines import is_at_rest
from support.fake_engine import VOCAB_SIZE, tokenizer_data
from support.tiny_models import make_model, random_prompts, reference_logits

PROMPT = random_prompts([40])[0]


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
    return LLM(str(folder), skip_tokenizer_init=True, cache_tokens=2048, max_num_batched_tokens=16, paranoid=True)


def log_probabilities(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return reference_logits(model, tokens).log_softmax(-1)


def test_an_answer_is_the_likeliest_of_the_allowed_tokens(model: PreTrainedModel, llm: LLM) -> None:
    allowed = [3, 17, 30, 41]
    params = SamplingParams(max_tokens=8, allowed_token_ids=allowed, ignore_eos=True, logprobs=0)
    [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    got, tokens = output.outputs[0], list(PROMPT)
    for token, scores in zip(got.token_ids, got.logprobs or (), strict=True):
        expected = log_probabilities(model, tokens)[-1]
        assert token == max(allowed, key=lambda each: float(expected[each]))
        assert scores[token].logprob == pytest.approx(float(expected[token]), abs=1e-4), "of the raw logits"
        tokens.append(token)
    assert is_at_rest(llm)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_a_prompt_is_scored_without_generating(model: PreTrainedModel, llm: LLM, length: int, n: int) -> None:
    prompt = PROMPT[:length]
    params = SamplingParams(max_tokens=0, prompt_logprobs=2, n=n, temperature=1.0, logprobs=1)
    [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    assert output.error is None
    assert [(each.token_ids, each.text, each.finish_reason) for each in output.outputs] == [((), "", "length")] * n
    scores, expected = output.prompt_logprobs or (), log_probabilities(model, prompt)
    assert len(scores) == length
    for place, entry in enumerate(scores[1:], 1):
        assert entry is not None
        assert entry[prompt[place]].logprob == pytest.approx(float(expected[place - 1, prompt[place]]), abs=1e-4)
    assert is_at_rest(llm)


def test_a_cut_prompt_is_answered_as_its_last_tokens_are(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=6, ignore_eos=True)
    cutting = SamplingParams(max_tokens=6, ignore_eos=True, truncate_prompt_tokens=9)
    [whole] = llm.generate({"prompt_token_ids": PROMPT[-9:]}, plain, use_tqdm=False)
    [cut] = llm.generate({"prompt_token_ids": PROMPT}, cutting, use_tqdm=False)
    assert cut.prompt_token_ids == tuple(PROMPT[-9:])
    assert cut.outputs == whole.outputs


def test_a_prompt_that_is_too_long_is_cut_to_what_leaves_room(folder: Path) -> None:
    short = LLM(str(folder), skip_tokenizer_init=True, cache_tokens=512, max_model_len=32)
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=10, ignore_eos=True)
    [output] = short.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    assert (len(output.prompt_token_ids), len(output.outputs[0].token_ids)) == (22, 10)


def effective(generation: GenerationDefaults | None = None, **given: Any) -> EffectiveParams:
    intake = Intake(
        vocab_size=VOCAB_SIZE,
        max_model_len=64,
        generation=generation or GenerationDefaults(frozenset({256})),
        tokenizer=Tokenizer.from_data(tokenizer_data()),
        seed=0,
    )
    return intake.request([1], SamplingParams(**given), None, Terms(), 0.0)[1]


def test_a_bad_word_is_read_at_the_beginning_and_after_a_space() -> None:
    assert effective(bad_words=["ab", " c"]).bad_words == ((32, 97, 98), (32, 99), (97, 98), (99,))


@pytest.mark.parametrize(
    "given",
    [
        {"allowed_token_ids": [256], "min_tokens": 1},
        {"allowed_token_ids": [97], "bad_words": ["a"]},
        {"allowed_token_ids": [97, 98], "bad_words": ["xa", "b"]},
        {"allowed_token_ids": [97, 98], "bad_words": ["a"], "stop_token_ids": [98], "min_tokens": 2},
    ],
    ids=str,
)
def test_parameters_that_may_leave_no_token_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="expected allowed_token_ids that leave a token"):
        effective(**given)


def test_allowed_tokens_are_of_the_vocabulary() -> None:
    assert effective(allowed_token_ids=[VOCAB_SIZE - 1], ignore_eos=True).allowed_token_ids == (VOCAB_SIZE - 1,)
    with pytest.raises(RequestError, match=f"expected allowed_token_ids below {VOCAB_SIZE}"):
        effective(allowed_token_ids=[VOCAB_SIZE])


def test_bad_words_need_a_tokenizer(llm: LLM) -> None:
    [output] = llm.generate({"prompt_token_ids": [1]}, SamplingParams(bad_words=["a"]), use_tqdm=False)
    assert "expected no bad_words, got some: the tokenizer was not loaded" in (output.error or "")


@pytest.mark.parametrize(
    ("told", "asked", "expected"),
    [
        ({}, None, 1.0),
        ({}, 0.3, 0.3),
        ({"temperature": 0.6}, None, 0.6),
        ({"do_sample": False}, None, 0.0),
        ({"do_sample": True}, None, 1.0),
        ({"top_p": 0.9}, None, 1.0),
    ],
)
def test_a_faces_temperature_is_for_models_that_say_nothing_of_sampling(
    told: dict[str, Any], asked: float | None, expected: float
) -> None:
    generation = GenerationDefaults(frozenset(), **told)
    assert effective(generation.with_temperature(1.0), temperature=asked).temperature == expected
    if not told and asked is None:
        assert effective(generation.with_temperature(0.0)).temperature == 0.0
