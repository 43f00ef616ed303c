"""A rope section means what transformers takes it to mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from sightline.layers.rotary import inverse_frequencies
from sightline.models.rope_config import rotary_spec, yarn_score_scale

YARN: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 5e4,
    "factor": 40.0,
    "original_max_position_embeddings": 512,
}
LLAMA3: dict[str, object] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "parameters",
    [
        YARN,
        YARN | {"truncate": False},
        YARN | {"attention_factor": 0.7},
        YARN | {"attention_factor": None, "beta_fast": None, "beta_slow": None},
        YARN | {"mscale": 0.707, "mscale_all_dim": 1.2},
        YARN | {"mscale": 0.707},
        YARN | {"mscale": 0, "mscale_all_dim": 1.0},
        YARN | {"factor": 0.5},
        YARN | {"beta_fast": 8, "beta_slow": 4},
        YARN | {"original_max_position_embeddings": 8},
        {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"},
        LLAMA3,
        LLAMA3 | {"original_max_position_embeddings": 128},
        {"rope_type": "linear", "factor": 3.0},
    ],
)
def test_frequencies_and_amplitude_are_those_of_transformers(parameters: dict[str, object]) -> None:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 1e4, **parameters},
    )
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    spec = rotary_spec(parameters, head_dim=64, theta=1e4, max_positions=2048)
    assert torch.equal(inverse_frequencies(spec), frequencies), "positions multiply the smallest difference"
    assert spec.amplitude == pytest.approx(amplitude, rel=1e-12)


DEEPSEEK: dict[str, object] = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
V2 = (DeepseekV2Config, DeepseekV2Attention, DeepseekV2RotaryEmbedding)
V3 = (DeepseekV3Config, DeepseekV3Attention, DeepseekV3RotaryEmbedding)


@pytest.mark.parametrize("oracle", [V2, V3], ids=["v2", "v3"])
@pytest.mark.parametrize(
    "section",
    [
        DEEPSEEK | {"mscale": 0.707, "mscale_all_dim": 0.707},
        DEEPSEEK | {"mscale": 1.0, "mscale_all_dim": 1.0},
        DEEPSEEK | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0, "factor": 32.0},
        DEEPSEEK | {"mscale": 1.3, "mscale_all_dim": 0.6},
        DEEPSEEK | {"mscale_all_dim": 0.6},
        DEEPSEEK,
        {"type": "default"},
    ],
)
def test_deepseeks_rotations_and_scores_are_scaled_as_by_transformers(
    oracle: tuple[Any, Any, Any], section: dict[str, object]
) -> None:
    make_config, make_attention, make_rotary = oracle
    config = make_config(rope_scaling=dict(section), rope_theta=10000, max_position_embeddings=163840)
    with torch.device("meta"):
        attention = make_attention(config, 0)
    rotary = make_rotary(config)
    spec = rotary_spec(section, head_dim=64, theta=10000.0, max_positions=163840)
    assert torch.equal(inverse_frequencies(spec), rotary.inv_freq)
    assert spec.amplitude == pytest.approx(rotary.attention_scaling, rel=1e-12)
    assert 192**-0.5 * yarn_score_scale(section) == pytest.approx(attention.scaling, rel=1e-12)
