"""A rope section means what transformers takes it to mean."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sightline.layers.rotary import inverse_frequencies
from sightline.models.rope_config import rotary_spec

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
