"""On an NVIDIA GPU: models with recurrent layers compute what transformers does, and answer as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from sightline import LLM, SamplingParams
from sightline.core.config import EngineConfig
from sightline.llm import TokensPrompt
from support.hybrids import HYBRIDS, make_hybrid
from support.tiny_models import load_runtime, random_prompts, reference_logits, relative_error, stepped_logits

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DEVICE = "cuda"
TOLERANCE = 2e-4
"""Of the logits' scale."""
PROMPT_LENS = (5, 70, 1, 131, 16)
DECODE_STEPS = 16


def saved(family: str, folder: Path) -> PreTrainedModel:
    model = make_hybrid(family)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
@pytest.mark.parametrize("family", HYBRIDS)
def test_stepped_logits_equal_a_full_forward(family: str, chunk: int, tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    sequences = random_prompts([length + DECODE_STEPS for length in PROMPT_LENS])
    runtime = load_runtime(tmp_path, EngineConfig(device=DEVICE, dtype="float32", cache_tokens=2048, max_num_seqs=8))
    stepped = stepped_logits(runtime, sequences, PROMPT_LENS, chunk)
    for sequence, prompt_len, got in zip(sequences, PROMPT_LENS, stepped, strict=True):
        expected = reference_logits(model, sequence)[prompt_len - 1 :]
        assert relative_error(got.cpu(), expected) <= TOLERANCE


@pytest.mark.parametrize("family", HYBRIDS)
def test_answers_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    """The second time from the prefix cache. Decode steps are replayed from graphs."""
    saved(family, tmp_path)
    prompts: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt in random_prompts([3, 40, 1, 17])]
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    answers: list[list[tuple[int, ...]]] = []
    for device in ("cpu", DEVICE):
        llm = LLM(
            str(tmp_path), skip_tokenizer_init=True, cache_tokens=2048, device=device, dtype="float32", paranoid=True
        )
        twice = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        answers += [[each.outputs[0].token_ids for each in found] for found in twice]
    assert answers[1:] == answers[:1] * 3
