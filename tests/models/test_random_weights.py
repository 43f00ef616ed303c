"""Random weights have the tensors of a real checkpoint, keep activations finite, and spread tokens over experts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.bench.engine.work import CONFIGS
from sightline.core.config import EngineConfig
from sightline.core.errors import CheckpointError
from sightline.core.ledger import Ledger
from sightline.layers.routing import Routing
from sightline.models.loading.opening import open_checkpoint
from sightline.models.random_weights import RandomCheckpoint
from sightline.runner.build import build_runtime
from sightline.runner.runtime import Runtime
from support.tiny_models import FAMILIES, Models, random_prompts, stepped_logits

CPU = torch.device("cpu")
NUM_TOKENS = 512
QUICK = ("llama", "gemma3", "gpt_oss", "deepseek_v3")
_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
_NARROW = {"hidden_size": 128, "intermediate_size": 32, "vocab_size": 4096, "num_attention_heads": 4}
EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": _NARROW | _LATENT | {"moe_intermediate_size": 32, "num_key_value_heads": 4},
    "gpt-oss-20b": _NARROW | {"num_key_value_heads": 2, "head_dim": 16},
}
"""Public shapes made narrow: as many experts, as many of them per token."""


def open_random(config: Path, seed: int = 0) -> RandomCheckpoint:
    return RandomCheckpoint(config, CPU, Ledger(strict=True), seed)


def build(config: Path, **settings: Any) -> Runtime:
    engine_config = EngineConfig(cache_tokens=2 * NUM_TOKENS, max_num_batched_tokens=NUM_TOKENS, **settings)
    return build_runtime(engine_config, open_random(config), Ledger())


def written(folder: Path, name: str, changed: dict[str, Any]) -> Path:
    """One of Sightline's own configs with some fields changed."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads((CONFIGS / f"{name}.json").read_text()) | changed))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_are_those_of_a_saved_model(models: Models, family: str) -> None:
    folder = models[family][1]
    stored = {name: info.shape for name, info in open_checkpoint(folder, Ledger()).tensors.items()}
    made = {name: info.shape for name, info in open_random(folder / "config.json").tensors.items()}
    assert made == stored


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.prove) for name in FAMILIES]
)
def test_every_family_runs_with_finite_logits(models: Models, family: str) -> None:
    runtime = build(models[family][1] / "config.json")
    for logits in stepped_logits(runtime, random_prompts([9, 40]), prompt_lens=[8, 30], chunk=16):
        assert logits.isfinite().all()
        assert logits.std() > 0.05


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-8b", 8.030), ("qwen3-0.6b", 0.596), ("gpt-oss-20b", 20.915), ("deepseek-v32-4-layers", 37.015)],
)
def test_own_configs_have_the_public_number_of_weights(name: str, billions: float) -> None:
    tensors = open_random(CONFIGS / f"{name}.json").tensors
    assert sum(math.prod(info.shape) for info in tensors.values()) / 1e9 == pytest.approx(billions, abs=5e-4)


def test_a_deep_model_stays_far_below_the_largest_number_of_a_narrow_dtype(models: Models, tmp_path: Path) -> None:
    config = json.loads((models["llama"][1] / "config.json").read_text()) | {"num_hidden_layers": 96}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    [logits] = stepped_logits(build(path, dtype="float16"), random_prompts([20]), prompt_lens=[20], chunk=20)
    assert logits.isfinite().all()
    assert logits.abs().max() < 100


@pytest.mark.parametrize("depth", [2, pytest.param(24, marks=pytest.mark.prove)])
@pytest.mark.parametrize("name", EXPERTS)
def test_tokens_are_spread_over_the_experts_of_every_layer(
    name: str, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = build(written(tmp_path, name, EXPERTS[name] | {"num_hidden_layers": depth}), device="cpu")
    chosen: list[Tensor] = []
    choose = Routing.choose

    def recording(self: Routing, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        experts, weights = choose(self, logits, correction)
        chosen.append(experts)
        return experts, weights

    monkeypatch.setattr(Routing, "choose", recording)
    prompts = random_prompts([NUM_TOKENS], vocab=4096)
    stepped_logits(runtime, prompts, prompt_lens=[NUM_TOKENS], chunk=NUM_TOKENS)
    num_experts = 64 if "deepseek" in name else 32
    assert len(chosen) >= depth - 1, "one layer may be dense"
    for experts in chosen:
        assert len(experts) == NUM_TOKENS
        assert_spread(experts.flatten().bincount(minlength=num_experts).tolist())


def assert_spread(counts: Sequence[int]) -> None:
    """No expert has more than 4 times its share, and the entropy is near its maximum."""
    shares = [count / sum(counts) for count in counts]
    entropy = -sum(share * math.log(share) for share in shares if share)
    assert max(shares) <= 4 / len(shares)
    assert entropy >= 0.95 * math.log(len(shares))


def test_a_spread_that_favours_an_expert_is_seen() -> None:
    assert_spread([8] * 64)
    with pytest.raises(AssertionError):
        assert_spread([8] * 63 + [40])
    with pytest.raises(AssertionError):
        assert_spread([16] * 32 + [0] * 32)


def test_a_tensor_depends_on_its_name_and_the_seed_alone(models: Models) -> None:
    config = models["llama"][1] / "config.json"
    one, again, other = open_random(config), open_random(config), open_random(config, seed=1)
    names = [name for name in one.tensors if name.endswith("_proj.weight")]
    in_reverse = {name: again.load(name) for name in reversed(names)}
    assert all(torch.equal(one.load(name), in_reverse[name]) for name in names)
    assert not any(torch.equal(one.load(name), other.load(name)) for name in names)
    assert len({float(one.load(name).sum()) for name in names}) == len(names)


def test_a_quantised_config_is_told_to_be_unquantised_here(models: Models, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = json.loads((models["gpt_oss"][1] / "config.json").read_text())
    path.write_text(json.dumps(fields | {"quantization_config": {"quant_method": "mxfp4"}}))
    ledger = Ledger()
    RandomCheckpoint(path, CPU, ledger)
    assert [entry.subject for entry in ledger.degradations] == ["quantization_config"]


def test_there_is_no_tokenizer(models: Models) -> None:
    with pytest.raises(CheckpointError, match="expected a tokenizer, got a config alone"):
        open_random(models["llama"][1] / "config.json").load_tokenizer()
