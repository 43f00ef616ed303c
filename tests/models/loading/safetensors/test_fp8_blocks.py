"""fp8 matrices in blocks decode to codes times factors, and run as the model that they stand for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from sightline.core.config import EngineConfig
from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.kernels.block_product import CpuFeatures
from sightline.models.kept_weights import KeptBlocks
from sightline.models.loading.checkpoint import Checkpoint, TensorInfo
from sightline.models.loading.opening import open_checkpoint
from sightline.models.loading.safetensors.fp8_blocks import decode
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from support.attention_cases import CPU
from support.tiny_models import (
    load_runtime,
    make_model,
    random_prompts,
    reference_logits,
    relative_error,
    stepped_logits,
)
from support.tiny_sparse import clear_prompts, make_sparse

LARGEST = 448.0
"""Of float8_e4m3fn."""
BLOCK = (16, 32)
QUERIES = "model.layers.1.self_attn.q_b_proj.weight"
QUANTIZATION: dict[str, object] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
}


def quantise(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, factors, and the matrix that they stand for: block by block, in plain words."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    factors = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    exact = torch.empty(rows, columns)
    for i, row in enumerate(range(0, rows, block[0])):
        for j, column in enumerate(range(0, columns, block[1])):
            part = (slice(row, row + block[0]), slice(column, column + block[1]))
            factors[i, j] = weight[part].abs().max() / LARGEST
            codes[part] = (weight[part] / factors[i, j]).to(torch.float8_e4m3fn)
            exact[part] = codes[part].float() * factors[i, j]
    return codes, factors, exact


@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (128, 130), (7, 5), (129, 1)])
def test_decoding_is_codes_times_the_factor_of_their_block(shape: tuple[int, int]) -> None:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.01, 50.0, shape[1])
    codes, factors, exact = quantise(weight, (128, 128))
    decoded = decode(codes, factors, (128, 128))
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, exact)
    torch.testing.assert_close(decoded, weight, rtol=0.07, atol=float(factors.max()) * 2**-6)


def is_packed(name: str) -> bool:
    """As in the published checkpoints: every projection of a layer; no norm, no router, nothing of the vocabulary, and
    of an indexer not the weights of its heads."""
    return re.search(r"(_proj(_with_mqa)?|indexer\.w(k|q_b))(?<!weights_proj)\.weight$", name) is not None


def packed_folder(folder: Path, given: PreTrainedModel | None = None) -> PreTrainedModel:
    """Saves a model, or a tiny DeepSeek V3, with packed projections; returns the model that they stand for."""
    plain = folder / "plain"
    made = given or make_model("deepseek_v3")
    made.save_pretrained(plain)
    stored = load_file(plain / "model.safetensors")
    exact, packed = dict(stored), dict(stored)
    for name in filter(is_packed, stored):
        packed[name], packed[f"{name}_scale_inv"], exact[name] = quantise(stored[name], BLOCK)
    save_file(exact, plain / "model.safetensors", {"format": "pt"})
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((plain / "config.json").read_text())
    set_quantization(folder, QUANTIZATION)
    model = type(made).from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    assert isinstance(model, PreTrainedModel)
    return model


def set_quantization(folder: Path, section: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(folder, Ledger(strict=True))


def test_a_packed_checkpoint_looks_like_the_unquantised_one(tmp_path: Path) -> None:
    packed_folder(tmp_path)
    checkpoint, plain = opened(tmp_path), load_file(tmp_path / "plain" / "model.safetensors")
    assert set(checkpoint.tensors) == set(plain)
    assert checkpoint.tensors[QUERIES] == TensorInfo((108, 22), torch.float32, "F8_E4M3")
    assert checkpoint.tensors[QUERIES].is_quantised
    assert torch.equal(checkpoint.load(QUERIES), plain[QUERIES])
    assert "quantization_config" not in checkpoint.config


def test_packed_projections_run_as_the_model_that_they_stand_for(tmp_path: Path) -> None:
    model = packed_folder(tmp_path)
    [sequence] = random_prompts([60])
    runtime = load_runtime(tmp_path, EngineConfig(cache_tokens=256, page_size=8))
    [got] = stepped_logits(runtime, [sequence], [30], chunk=16)
    expected = reference_logits(model, sequence)[29:]
    assert relative_error(got, expected) <= 1e-4
    unquantised = reference_logits(make_model("deepseek_v3"), sequence)[29:]
    assert relative_error(unquantised, expected) > 1e-2, "rounding to fp8 is seen"


def test_packed_projections_of_an_indexer_run_as_the_model_that_they_stand_for(tmp_path: Path) -> None:
    model = packed_folder(tmp_path, make_sparse("deepseek_v32"))
    stored = load_file(tmp_path / "model.safetensors")
    of_indexer = [name for name in stored if "layers.1.self_attn.indexer." in name and name.endswith("_scale_inv")]
    assert len(of_indexer) == 2
    [sequence] = clear_prompts(model, [40])
    runtime = load_runtime(tmp_path, EngineConfig(cache_tokens=256, page_size=8), strict=False)
    [got] = stepped_logits(runtime, [sequence], [30], chunk=16)
    assert relative_error(got, reference_logits(model, sequence)[29:]) <= 1e-4


def test_weights_that_were_to_stay_quantised_are_all_named(tmp_path: Path) -> None:
    packed_folder(tmp_path)
    ledger, checkpoint = Ledger(), opened(tmp_path)
    progress = []
    reader = WeightReader(
        checkpoint,
        torch.float32,
        CPU,
        ledger,
        lambda *counts: progress.append(counts),
        kept=KeptBlocks(CpuFeatures.detect()),
    )
    define_model(checkpoint.config, ledger).load(reader)
    counts = [int(entry.outcome.split()[0]) for entry in ledger.degradations]
    assert sum(counts) == len([name for name in checkpoint.tensors if is_packed(name)])
    assert progress[-1] == (len(checkpoint.tensors), len(checkpoint.tensors))


def resave(folder: Path, changes: dict[str, Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({QUERIES: None}, r"expected .*q_b_proj\.weight' beside its _scale_inv, got the factors alone"),
        ({QUERIES: torch.ones(108, 22)}, r"expected .*q_b_proj\.weight' in F8_E4M3, got F32"),
        (
            {f"{QUERIES}_scale_inv": torch.ones(7, 2)},
            r"a factor for each block of 16 x 32, got \(108, 22\) and \(7, 2\)",
        ),
        ({f"{QUERIES}_scale_inv": torch.ones(6, 1)}, r"got \(108, 22\) and \(6, 1\)"),
        ({f"{QUERIES}_scale_inv": torch.ones(7)}, r"got \(108, 22\) and \(7,\)"),
        ({f"{QUERIES}_scale_inv": torch.ones(7, 1).bfloat16()}, "in F32 or F8_E8M0, got BF16"),
    ],
)
def test_a_broken_pair_is_refused(tmp_path: Path, changes: dict[str, Tensor | None], message: str) -> None:
    packed_folder(tmp_path)
    resave(tmp_path, changes)
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path)


def test_codes_without_factors_are_refused(tmp_path: Path) -> None:
    packed_folder(tmp_path)
    resave(tmp_path, {f"{QUERIES}_scale_inv": None})
    with pytest.raises(UnsupportedModelError, match=r"q_b_proj\.weight'.*got F8_E4M3"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fmt": "e5m2"}, "fmt 'e4m3', got 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme 'dynamic', got 'static'"),
        ({"scale_fmt": "e8m7"}, "scale_fmt 'ue8m0', got 'e8m7'"),
        ({"weight_block_size": None}, "weight_block_size of two numbers above 0, got None"),
        ({"weight_block_size": [128]}, r"got \[128\]"),
        ({"weight_block_size": [0, 128]}, r"got \[0, 128\]"),
        ({"group_size": 64}, "got group_size"),
    ],
)
def test_other_kinds_of_fp8_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    packed_folder(tmp_path)
    set_quantization(tmp_path, QUANTIZATION | changes)
    with pytest.raises(UnsupportedModelError, match=f"quantization_config.*{message}"):
        opened(tmp_path)


def test_what_says_nothing_about_the_weights_is_accepted(tmp_path: Path) -> None:
    packed_folder(tmp_path)
    set_quantization(tmp_path, QUANTIZATION | {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]})
    assert QUERIES in opened(tmp_path).tensors
