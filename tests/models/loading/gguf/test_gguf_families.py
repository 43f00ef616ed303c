"""GGUF files of every family against the model that was written, transformers' loader, and a forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from transformers import AutoConfig

from sightline.core.config import EngineConfig
from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.models.loading.gguf.quantization import can_dequantise
from sightline.models.loading.gguf.types import STORAGE_BY_CODE
from support.gguf_checks import assert_same_weights, loaded_by_transformers, opened
from support.gguf_families import YARN, converted, disk_weights, tiny, write_family
from support.gguf_files import random_blocks, tiny_llama, write_llama
from support.tiny_models import load_runtime, reference_logits, stepped_logits

FAMILIES = ("qwen2", "qwen3", "qwen3moe", "gemma2", "gpt-oss")
DECODABLE = [storage.name for storage in STORAGE_BY_CODE.values() if can_dequantise(storage)]
NOT_IN_THE_FILE = {"architectures", "bos_token_id", "dtype", "eos_token_id", "rms_norm_eps"}


def written(tmp_path: Path, family: str, **changes: Any) -> tuple[Path, Any]:
    path, model = tmp_path / "tiny.gguf", tiny(family, **changes)
    write_family(path, family, model)
    return path, model


def written_mistral(tmp_path: Path) -> tuple[Path, Any]:
    model = tiny("mistral", head_dim=16)
    write_llama(tmp_path / "tiny.gguf", model, extra={"llama.attention.sliding_window": 8})
    return tmp_path / "tiny.gguf", model


@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_weights_come_back_under_the_names_that_transformers_saves(tmp_path: Path, family: str) -> None:
    path, model = written_mistral(tmp_path) if family == "mistral" else written(tmp_path, family)
    checkpoint = opened(path)
    expected = disk_weights(model)
    if family == "gemma2":
        # Adding one and taking it away again rounds, so norms come back to within an fp32 step of one.
        expected = {n: w + 1.0 - 1.0 if n.endswith("norm.weight") else w for n, w in expected.items()}
    assert_same_weights(checkpoint, expected)


@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_config_is_the_one_of_the_model_that_was_written(tmp_path: Path, family: str) -> None:
    path, model = written_mistral(tmp_path) if family == "mistral" else written(tmp_path, family)
    config = opened(path).config
    assert config["architectures"] == [type(model).__name__]
    assert config["rms_norm_eps"] == pytest.approx(model.config.rms_norm_eps)
    rebuilt, expected = AutoConfig.for_model(**config).to_dict(), model.config.to_dict()
    known_by_the_architecture = {"norm_topk_prob"} if family == "qwen3moe" else set()
    if family == "qwen2":
        assert rebuilt.pop("head_dim") == 64 // 4
    for key in rebuilt.keys() | expected.keys():
        if key not in NOT_IN_THE_FILE | known_by_the_architecture:
            assert rebuilt.get(key) == expected.get(key), key


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3moe", "gemma2"])
def test_weights_equal_the_transformers_loader(tmp_path: Path, family: str) -> None:
    path, _ = written(tmp_path, family)
    _, weights = loaded_by_transformers(path)
    checkpoint = opened(path)
    stacked = {name for name in weights if name not in checkpoint.tensors}
    assert {name.rsplit(".", 1)[1] for name in stacked} == (
        {"gate_up_proj", "down_proj"} if family == "qwen3moe" else set()
    )
    for name in weights.keys() - stacked:
        assert torch.equal(checkpoint.load(name), weights[name]), name
    for name in stacked:
        prefix, projection = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
        for expert, rows in enumerate(weights[name]):
            ours = torch.cat([checkpoint.load(f"{prefix}.{expert}.{part}.weight") for part in parts])
            assert torch.equal(ours, rows), name


@pytest.mark.parametrize("kind", DECODABLE)
def test_every_type_loads_as_a_whole_model(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    path, family = tmp_path / "tiny.gguf", "qwen3moe"
    write_family(path, family, tiny(family, num_experts=2, **sizes), quantised=kind)
    checkpoint = opened(path)
    stored = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(path).tensors}
    assert checkpoint.tensors["lm_head.weight"].stored_as == kind
    assert torch.equal(checkpoint.load("lm_head.weight"), torch.tensor(stored["output.weight"]))
    for expert in range(2):
        for ours, theirs in (
            ("gate_proj", "ffn_gate_exps"),
            ("up_proj", "ffn_up_exps"),
            ("down_proj", "ffn_down_exps"),
        ):
            loaded = checkpoint.load(f"model.layers.0.mlp.experts.{expert}.{ours}.weight")
            assert torch.equal(loaded, torch.tensor(stored[f"blk.0.{theirs}.weight"][expert]))
    for name, info in checkpoint.tensors.items():
        assert torch.isfinite(checkpoint.load(name)).all(), name
        assert checkpoint.load(name).shape == info.shape


def test_the_gguf_package_decodes_no_type_that_is_left_out() -> None:
    for kind in GGMLQuantizationType:
        if kind.name not in DECODABLE:
            with pytest.raises(NotImplementedError):
                dequantize(random_blocks((1, 256), kind), kind)


def test_gpt_oss_experts_in_mxfp4_are_interleaved_and_transposed(tmp_path: Path) -> None:
    path, model = tmp_path / "tiny.gguf", tiny("gpt-oss")
    write_family(path, "gpt-oss", model, quantised="MXFP4")
    checkpoint = opened(path)
    assert checkpoint.tensors["model.layers.1.mlp.experts.gate_up_proj"].stored_as == "MXFP4"
    rows = {}
    for name, weight in converted("gpt-oss", model):
        if name.startswith("blk.1.ffn_") and name.endswith("_exps.weight"):
            packed = gguf.quants.quantize(weight.numpy(), GGMLQuantizationType.MXFP4)
            rows[name.split(".")[2]] = torch.from_numpy(dequantize(packed, GGMLQuantizationType.MXFP4))
    joined = checkpoint.load("model.layers.1.mlp.experts.gate_up_proj")
    assert torch.equal(joined[..., ::2], rows["ffn_gate_exps"].transpose(1, 2))
    assert torch.equal(joined[..., 1::2], rows["ffn_up_exps"].transpose(1, 2))
    assert torch.equal(checkpoint.load("model.layers.1.mlp.experts.down_proj"), rows["ffn_down_exps"].transpose(1, 2))


@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_the_engine_computes_what_the_written_model_computes(tmp_path: Path, family: str) -> None:
    changes: dict[str, Any] = {"norm_topk_prob": True} if family == "qwen3moe" else {}
    path, model = written_mistral(tmp_path) if family == "mistral" else written(tmp_path, family, **changes)
    runtime = load_runtime(path, EngineConfig(max_model_len=64, page_size=4, dtype="float32"))
    tokens = [7, 3, 9, 21, 40, 5, 6, 63, 11, 2, 17, 30, 31, 8]
    (logits,) = stepped_logits(runtime, [tokens], [9], chunk=5)
    torch.testing.assert_close(logits, reference_logits(model, tokens)[8:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        ("qwen3moe", {"qwen3moe.expert_shared_count": 1}, "expert_shared_count"),
        ("qwen3", {"qwen3.attention.sliding_window": 8}, "sliding_window"),
        ("qwen2", {"rope_freqs.weight": numpy.ones(8, dtype=numpy.float32)}, "rope_freqs"),
        ("qwen2", {"blk.0.attn_output.bias": numpy.ones(64, dtype=numpy.float32)}, "attn_output"),
        ("qwen3moe", {"blk.0.ffn_gate.weight": numpy.ones((8, 64), dtype=numpy.float32)}, "ffn_gate"),
        ("gpt-oss", {"gpt-oss.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
    ],
)
def test_what_changes_the_result_and_is_not_supported_is_refused_by_name(
    tmp_path: Path, family: str, extra: dict[str, object], message: str
) -> None:
    write_family(tmp_path / "tiny.gguf", family, tiny(family), extra=extra)
    with pytest.raises(UnsupportedModelError, match=message):
        opened(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight"])
def test_a_window_beside_what_mistral_lacks_is_refused(tmp_path: Path, name: str) -> None:
    extra: dict[str, object] = {"llama.attention.sliding_window": 8, name: numpy.ones(8, dtype=numpy.float32)}
    write_llama(tmp_path / "tiny.gguf", tiny_llama(), extra=extra)
    with pytest.raises(UnsupportedModelError, match=f"Mistral.*{name}"):
        opened(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("qwen3moe", "num_experts", 3, "expected 'blk.[01].ffn_[a-z]*_exps.weight' of shape .3 experts"),
        ("qwen3moe", "num_experts", 1, "expert_count"),
        ("qwen3moe", "num_experts_per_tok", 0, "expert_used_count"),
        ("gpt-oss", "sliding_window", 0, "sliding_window"),
        ("gemma2", "sliding_window", 0, "sliding_window"),
        ("gemma2", "attn_logit_softcapping", -1.0, "attn_logit_softcapping"),
    ],
)
def test_metadata_that_contradicts_the_tensors_is_refused(
    tmp_path: Path, family: str, key: str, value: float, message: str
) -> None:
    model = tiny(family)
    weights = dict(converted(family, model))
    setattr(model.config, key, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.gguf_families.converted", lambda _family, _model: weights.items())
        write_family(tmp_path / "tiny.gguf", family, model)
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("change", ["missing", "other shape"])
def test_a_gate_without_its_fellow_is_refused(tmp_path: Path, change: str) -> None:
    model = tiny("gpt-oss")
    weights = dict(converted("gpt-oss", model))
    removed = weights.pop("blk.1.ffn_up_exps.weight")
    if change != "missing":
        weights["blk.1.ffn_up_exps.weight"] = removed[:, :32].contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.gguf_families.converted", lambda _family, _model: weights.items())
        write_family(tmp_path / "tiny.gguf", "gpt-oss", model)
    with pytest.raises(CheckpointError, match=r"'blk\.1\.ffn_gate_exps\.weight' and 'blk\.1\.ffn_up_exps\.weight'"):
        opened(tmp_path / "tiny.gguf")


def test_yarn_is_passed_on_with_what_the_file_states(tmp_path: Path) -> None:
    scaling = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 32,
        "qwen2.rope.scaling.yarn_beta_fast": 16.0,
    }
    write_family(tmp_path / "tiny.gguf", "qwen2", tiny("qwen2"), extra=scaling)
    assert opened(tmp_path / "tiny.gguf").config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 1.0,
    }
    path, _ = written(tmp_path, "gpt-oss")
    assert opened(path).config["rope_scaling"] == {key: YARN[key] for key in YARN if key != "rope_theta"}


def test_the_largest_gemma2_scales_queries_by_width_per_head(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "gemma2", num_hidden_layers=46)
    assert opened(path).config["query_pre_attn_scalar"] == 64 // 4
