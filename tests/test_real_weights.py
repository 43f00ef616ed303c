"""The default model's greedy answers are those of transformers on the same file, token for token."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from sightline import LLM, SamplingParams
from sightline.engine.sampled import Sampled, SampledTokens
from sightline.models.loading.default_model import default_model_path
from support.greedy import greedy_tokens

NEW_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Photosynthesis is the process by which",
    "1, 1, 2, 3, 5, 8,",
    "Der schnelle braune Fuchs",
    "Q: What is the boiling point of water?\nA:",
    "The three primary colours are red, yellow and",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_batched_tokens=48)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[int, ...]]:
    return [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(llm: LLM, alone: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """What transformers generates, from the ids that Sightline's tokenizer gives."""
    path = default_model_path()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    eos = llm.engine.generation.eos_token_ids
    return [
        greedy_tokens(model, llm.get_tokenizer().encode_prompt(prompt), draft, NEW_TOKENS, eos)
        for prompt, draft in zip(PROMPTS, alone, strict=True)
    ]


@pytest.mark.prove
def test_each_prompt_alone(alone: list[tuple[int, ...]], expected: list[tuple[int, ...]]) -> None:
    assert alone == expected


@pytest.mark.prove
def test_all_prompts_in_one_batch(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.prompt for output in outputs] == PROMPTS


def test_streamed_text_is_the_whole_text(llm: LLM) -> None:
    prompt = "Écrivez un poème 🌊 en français:"
    [whole] = llm.generate(prompt, GREEDY, use_tqdm=False)
    pieces = list(llm.stream(prompt, GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.outputs[0].text
    assert tuple(token for piece in pieces for token in piece.token_ids) == whole.outputs[0].token_ids
    assert pieces[-1].finish_reason == whole.outputs[0].finish_reason
    assert len(pieces) > 10


def test_chat_answers_through_the_models_own_template(llm: LLM) -> None:
    [output] = llm.chat([{"role": "user", "content": "What is 2 + 2?"}], GREEDY, use_tqdm=False)
    assert output.prompt is not None
    assert output.prompt.endswith("<|im_start|>assistant\n")
    assert "4" in output.outputs[0].text
    assert output.outputs[0].finish_reason in ("stop", "length")


def test_an_incomplete_character_at_the_end_is_shown_as_such(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wave = llm.get_tokenizer().encode_prompt("🌊")
    assert len(wave) > 2
    tokens = iter(wave)
    monkeypatch.setattr(Sampled, "read", lambda step: SampledTokens([next(tokens)], [True]))
    pieces = [piece.text for piece in llm.stream("x", SamplingParams(max_tokens=2))]
    assert pieces == ["", "\N{REPLACEMENT CHARACTER}"]
