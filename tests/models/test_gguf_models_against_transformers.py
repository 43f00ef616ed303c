"""A GGUF file runs as the model that it was converted from."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from transformers import PreTrainedModel

from sightline.core.config import EngineConfig
from sightline.layers.rotary import RotarySpec, inverse_frequencies
from support.gguf_files import VOCABULARY, tiny_gemma3, tiny_llama, write_gemma3, write_llama
from support.tiny_models import load_runtime, random_prompts, reference_logits, stepped_logits

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def assert_runs_alike(path: Path, model: PreTrainedModel) -> None:
    [sequence] = random_prompts([60], vocab=VOCABULARY)
    runtime = load_runtime(path, EngineConfig(cache_tokens=256, page_size=8))
    [got] = stepped_logits(runtime, [sequence], [30], chunk=16)
    expected = reference_logits(model, sequence)[29:]
    assert float((got - expected).abs().max() / expected.abs().max()) <= 1e-4


def test_llama(tmp_path: Path) -> None:
    model = tiny_llama()
    write_llama(tmp_path / "tiny.gguf", model)
    assert_runs_alike(tmp_path / "tiny.gguf", model)


def test_llama3_rope_factors(tmp_path: Path) -> None:
    model = tiny_llama(rope_parameters=LLAMA3_ROPE)
    scaled: torch.Tensor = model.model.rotary_emb.inv_freq
    factors = inverse_frequencies(RotarySpec(head_dim=16, theta=10000.0)) / scaled
    assert factors.max() > 7.9, "the scaling stretches the longest wavelengths by its factor"
    extra = {"rope_freqs.weight": factors.numpy().astype(numpy.float32)}
    write_llama(tmp_path / "tiny.gguf", model, extra=extra)
    assert_runs_alike(tmp_path / "tiny.gguf", model)


def test_gemma3(tmp_path: Path) -> None:
    model = tiny_gemma3()
    write_gemma3(tmp_path / "tiny.gguf", model)
    assert_runs_alike(tmp_path / "tiny.gguf", model)
