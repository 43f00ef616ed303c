"""On an NVIDIA GPU: models with sparse attention compute what transformers does, and answer as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from sightline import LLM
from sightline.core.config import EngineConfig
from support.speculating import SCORED, ask, assert_same_answers
from support.tiny_models import load_runtime, random_prompts, reference_logits, relative_error, stepped_logits
from support.tiny_sparse import SPARSE, TOP_K, clear_prompts, make_sparse

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DEVICE = "cuda"
TOLERANCE = 2e-4
"""Of the logits' scale."""
PROMPT_LENS = (5, 40, 1, 70)
DECODE_STEPS = 8
WAYS: dict[str, dict[str, object]] = {
    "resident": {},
    "eager": {"enforce_eager": True},
    "hot": {"enable_hisparse": True, "hisparse_config": {"device_buffer_size": TOP_K}},
    "few tokens a step": {"max_num_batched_tokens": 7},
    "guesses": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
}


def saved(family: str, folder: Path) -> PreTrainedModel:
    model = make_sparse(family)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("chunk", [7, 1 << 20])
@pytest.mark.parametrize("family", SPARSE)
def test_stepped_logits_equal_a_full_forward(family: str, chunk: int, tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    sequences = clear_prompts(model, [length + DECODE_STEPS for length in PROMPT_LENS])
    config = EngineConfig(device=DEVICE, dtype="float32", cache_tokens=2048, max_num_seqs=8)
    stepped = stepped_logits(load_runtime(tmp_path, config), sequences, PROMPT_LENS, chunk)
    for sequence, prompt_len, got in zip(sequences, PROMPT_LENS, stepped, strict=True):
        expected = reference_logits(model, sequence)[prompt_len - 1 :]
        assert relative_error(got.cpu(), expected) <= TOLERANCE


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_the_cpu(way: str, tmp_path: Path) -> None:
    """The second time from the prefix cache. Decode steps are replayed from graphs, except if eager."""
    saved("deepseek_v32", tmp_path)
    prompts = [*random_prompts([3, 40, 1, 17]), [7, 8, 9] * 8]

    def engine(device: str, **changes: object) -> LLM:
        settings = {"cache_tokens": 2048, "device": device, "dtype": "float32", "paranoid": True, "page_size": 16}
        return LLM(str(tmp_path), skip_tokenizer_init=True, **settings, **changes)  # type: ignore[arg-type]

    expected = ask(engine("cpu"), SCORED, prompts)
    llm = engine(DEVICE, **WAYS[way])
    for _ in range(2):
        assert_same_answers(ask(llm, SCORED, prompts), expected)
