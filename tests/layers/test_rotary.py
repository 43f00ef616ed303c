"""Rotary frequencies are those of transformers, and a rotation turns pairs and changes no length."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from sightline.layers.rotary import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    RotarySpec,
    YarnScaling,
    inverse_frequencies,
)
from support.layers import make_table, rotate

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
Case = tuple[dict[str, object], RotarySpec]
CASES: dict[str, Case] = {
    "default": ({"rope_type": "default"}, RotarySpec(64, 10000.0)),
    "large theta": ({"rope_type": "default"}, RotarySpec(128, 1e6)),
    "linear": ({"rope_type": "linear", "factor": 4.0}, RotarySpec(64, 10000.0, LinearScaling(4.0))),
    "llama3": (LLAMA3, RotarySpec(64, 10000.0, Llama3Scaling(8.0, 1.0, 4.0, 512))),
    "llama3 of a narrow band": (
        LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
        RotarySpec(128, 500000.0, Llama3Scaling(32.0, 2.0, 3.0, 512)),
    ),
    "yarn": (YARN, RotarySpec(64, 10000.0, YarnScaling(4.0, 32.0, 1.0, 1024, True, 0.1 * math.log(4.0) + 1.0))),
    "yarn without truncation": (
        YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5},
        RotarySpec(64, 150000.0, YarnScaling(4.0, 16.0, 2.0, 1024, False, 1.5)),
    ),
    "yarn whose ramp has no width": (
        YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False, "attention_factor": 1.0},
        RotarySpec(64, 10000.0, YarnScaling(4.0, 1.0, 1.0, 1024, False, 1.0)),
    ),
}
all_cases = pytest.mark.parametrize(("parameters", "spec"), CASES.values(), ids=CASES.keys())


def llama_config(parameters: dict[str, object], spec: RotarySpec) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * spec.head_dim,
        num_attention_heads=2,
        head_dim=spec.head_dim,
        max_position_embeddings=4096,
        rope_parameters=parameters | {"rope_theta": spec.theta},
    )


@all_cases
def test_frequencies_are_those_of_transformers(parameters: dict[str, object], spec: RotarySpec) -> None:
    config = llama_config(parameters, spec)
    if parameters["rope_type"] == "default":
        expected, attention_factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    assert spec.amplitude == pytest.approx(attention_factor, rel=1e-12)
    assert inverse_frequencies(spec).dtype == torch.float32
    torch.testing.assert_close(inverse_frequencies(spec), expected, rtol=1e-6, atol=0.0)


@all_cases
def test_rotated_heads_are_those_of_transformers(parameters: dict[str, object], spec: RotarySpec) -> None:
    positions = torch.tensor([0, 1, 2, 700, 4095])
    x = normal(5, 3, spec.head_dim)
    embedding = LlamaRotaryEmbedding(llama_config(parameters, spec))
    cos, sin = embedding(x, positions.unsqueeze(0))
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1).unsqueeze(0), x.transpose(0, 1).unsqueeze(0), cos, sin)
    rotated = rotate(make_table(spec, positions, torch.float32), x)
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_llama3_keeps_short_waves_stretches_long_ones_and_ramps_between() -> None:
    plain = inverse_frequencies(RotarySpec(64, 10000.0))
    ratio = plain / inverse_frequencies(CASES["llama3"][1])
    wavelengths = 2 * math.pi / plain
    assert torch.equal(ratio[wavelengths < 512 / 4], torch.ones(int((wavelengths < 512 / 4).sum())))
    torch.testing.assert_close(ratio[wavelengths > 512], torch.full((int((wavelengths > 512).sum()),), 8.0))
    between = ratio[(wavelengths > 512 / 4) & (wavelengths < 512)]
    assert len(between) >= 2
    assert ((between > 1.0) & (between < 8.0)).all()
    assert (between.diff() > 0).all()


def test_frequency_factors_divide_each_frequency() -> None:
    factors = (1.0, 2.0, 4.0, 0.5)
    plain = inverse_frequencies(RotarySpec(8, 100.0))
    scaled = inverse_frequencies(RotarySpec(8, 100.0, FrequencyFactors(factors)))
    torch.testing.assert_close(scaled, plain / torch.tensor(factors))


@all_cases
def test_a_rotation_multiplies_the_norm_of_every_pair_by_the_amplitude(
    parameters: dict[str, object], spec: RotarySpec
) -> None:
    half = spec.head_dim // 2
    x = normal(6, 3, spec.head_dim)
    table = make_table(spec, torch.tensor([0, 1, 5, 99, 1000, 4095]), torch.float32)
    rotated = rotate(table, x)
    before, after = (torch.hypot(t[..., :half], t[..., half:]) for t in (x, rotated))
    torch.testing.assert_close(after, before * spec.amplitude, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(rotated[1:], x[1:])


def test_position_zero_rotates_nothing() -> None:
    x = normal(1, 2, 64)
    assert torch.equal(rotate(make_table(RotarySpec(64, 10000.0), torch.tensor([0]), torch.float32), x), x)


def test_products_depend_only_on_the_distance_of_positions() -> None:
    spec = RotarySpec(32, 100.0)
    q, k = normal(2, 1, 32)
    products = []
    for start in (0, 3, 90):
        q_at, k_at = (make_table(spec, torch.tensor([at]), torch.float32) for at in (start + 7, start))
        products.append((rotate(q_at, q.unsqueeze(0)) * rotate(k_at, k.unsqueeze(0))).sum())
    torch.testing.assert_close(torch.stack(products), products[0].expand(3), rtol=1e-4, atol=1e-4)
    other = (rotate(make_table(spec, torch.tensor([8]), torch.float32), q.unsqueeze(0)) * k).sum()
    assert not torch.isclose(other, products[0], atol=1e-2)


def test_a_table_has_the_dtype_asked_for_and_angles_in_fp32() -> None:
    table = make_table(RotarySpec(16, 100.0), torch.tensor([3, 4001]), torch.bfloat16)
    exact = make_table(RotarySpec(16, 100.0), torch.tensor([3, 4001]), torch.float32)
    assert table.cos.dtype == table.sin.dtype == table.minus_sin.dtype == torch.bfloat16
    assert table.cos.shape == (2, 1, 16)
    assert torch.equal(table.cos, exact.cos.bfloat16())
    assert torch.equal(table.sin, exact.sin.bfloat16())
