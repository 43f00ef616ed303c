"""What the tests of every family with recurrent layers share: sizes, tolerances, and comparisons with transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from sightline import LLM, SamplingParams
from sightline.core.config import EngineConfig
from sightline.runner.runtime import Runtime
from support.case_marks import proofs
from support.hybrids import make_hybrid
from support.tiny_models import (
    Models,
    load_runtime,
    random_prompts,
    reference_logits,
    relative_error,
    stepped_logits,
)

TOLERANCE = 2e-4
"""Of the logits' scale."""
VISIBLE = 100 * TOLERANCE
DECODE_STEPS = 64
PROMPT_LENS = (5, 70, 1, 131, 16)
ONE_SHOT = 1 << 20
"""More tokens than any prompt has."""
every_chunk = pytest.mark.parametrize("chunk", [7, *proofs(ONE_SHOT)])
"""Prompts in many steps that end anywhere, in pages of one token, and whole prompts, in pages of many."""


def save_hybrids(factory: pytest.TempPathFactory, families: Iterable[str]) -> Models:
    """Each family's model and the folder that it is saved in."""
    made = {}
    for family in families:
        folder = factory.mktemp(family)
        model = make_hybrid(family)
        model.save_pretrained(folder)
        made[family] = (model, folder)
    return made


def config(page_size: int = 16) -> EngineConfig:
    return EngineConfig(page_size=page_size, dtype="float32", cache_tokens=2048, max_num_seqs=8)


def assert_equal_to_transformers(
    model: PreTrainedModel,
    runtime: Runtime,
    prompt_lens: tuple[int, ...],
    chunk: int,
    num_steps: int,
    vocab: int = 101,
) -> None:
    sequences = random_prompts([length + num_steps for length in prompt_lens], vocab=vocab)
    stepped = stepped_logits(runtime, sequences, prompt_lens, chunk)
    for sequence, prompt_len, got in zip(sequences, prompt_lens, stepped, strict=True):
        expected = reference_logits(model, sequence)[prompt_len - 1 :]
        assert got.shape == (num_steps + 1, expected.shape[1])
        assert relative_error(got, expected) <= TOLERANCE


def assert_steps_equal_a_full_forward(model: PreTrainedModel, folder: Path, chunk: int) -> None:
    runtime = load_runtime(folder, config(page_size=1 if chunk == 7 else 16))
    assert_equal_to_transformers(model, runtime, PROMPT_LENS, chunk, DECODE_STEPS)
    assert runtime.planner.num_rebuilt == 0
    assert runtime.store.num_free_pages == runtime.store.num_usable_pages


def assert_greedy_answers(model: PreTrainedModel, folder: Path) -> None:
    """Several prompts at once, and one of them again and longer, which finds the first in the prefix cache."""
    llm = LLM(str(folder), skip_tokenizer_init=True, dtype="float32", cache_tokens=1024, page_size=4, max_num_seqs=4)
    prompts = random_prompts([9, 33, 1, 20])
    cached = 0
    for asked in (prompts, prompts[1:2], [[*prompts[1], 7, 8, 9]]):
        cached += _assert_greedy(llm, model, asked)
    assert cached >= 32


def _assert_greedy(llm: LLM, model: PreTrainedModel, prompts: Sequence[list[int]]) -> int:
    """Returns how many tokens were found in the cache."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(answer.outputs[0].token_ids)
        logits = reference_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        best = logits.max(dim=-1).values
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert len(tokens) == 24
        assert bool((best - chosen <= TOLERANCE * logits.abs().max()).all())
    return sum(answer.num_cached_tokens or 0 for answer in answers)
