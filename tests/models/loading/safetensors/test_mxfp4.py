"""MXFP4 experts decode to exactly what transformers makes of them, and run as the model that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sightline.core.config import EngineConfig
from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.kernels.packed_weights import WeightForm
from sightline.models.loading.checkpoint import Checkpoint, TensorInfo
from sightline.models.loading.opening import open_checkpoint
from sightline.models.loading.safetensors.mxfp4 import decode
from support.tiny_models import (
    load_runtime,
    make_model,
    random_prompts,
    reference_logits,
    relative_error,
    stepped_logits,
)

PROJECTIONS = ("gate_up_proj", "down_proj")
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
QUANTIZATION: dict[str, object] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def random_bytes(*shape: int, low: int = 0, high: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_is_that_of_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    blocks, scales = random_bytes(3, 8, 40, 16), random_bytes(3, 8, 40, high=253)
    decoded = decode(blocks, scales)
    assert decoded.dtype == torch.bfloat16
    assert decoded.shape == (3, 8, 40 * 32)
    assert decoded.isfinite().all()
    assert torch.equal(decoded.transpose(1, 2).to(dtype), convert_moe_packed_tensors(blocks, scales, dtype=dtype))


def test_every_byte_under_the_scale_of_one() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    decoded = decode(blocks, torch.full((1, 1, 16), 127, dtype=torch.uint8)).view(256, 2)
    assert decoded[0x00].tolist() == [0.0, 0.0]
    assert decoded[0x71].tolist() == [0.5, 6.0], "the lower four bits are the first element"
    assert decoded[0x9E].tolist() == [-4.0, -0.5]


def test_the_scale_that_stands_for_no_number_is_no_number() -> None:
    blocks = torch.ones(1, 1, 1, 16, dtype=torch.uint8)
    assert decode(blocks, torch.full((1, 1, 1), 255, dtype=torch.uint8)).isnan().all()


def packed_folder(folder: Path) -> PreTrainedModel:
    """Saves a tiny gpt-oss with packed experts; returns it with the experts that they stand for."""
    model = make_model("gpt_oss")
    model.save_pretrained(folder)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in [name for name in tensors if name.endswith(PROJECTIONS)]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = random_bytes(experts, outputs, inputs // 32, 16, seed=len(tensors))
        scales = random_bytes(experts, outputs, inputs // 32, low=122, high=125, seed=len(tensors))
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        decoded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        with torch.no_grad():
            model.get_parameter(name).copy_(decoded)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    set_quantization(folder, QUANTIZATION)
    return model


def set_quantization(folder: Path, section: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(folder, Ledger(strict=True))


def test_a_packed_checkpoint_looks_like_the_unquantised_one(tmp_path: Path) -> None:
    model = packed_folder(tmp_path)
    checkpoint = opened(tmp_path)
    assert set(checkpoint.tensors) == set(model.state_dict())
    assert checkpoint.tensors[GATE_UP] == TensorInfo((6, 64, 64), torch.bfloat16, "MXFP4", packed=WeightForm.MXFP4)
    assert torch.equal(checkpoint.load(GATE_UP).float(), model.state_dict()[GATE_UP])
    assert "quantization_config" not in checkpoint.config


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_packed_experts_run_as_the_model_that_they_stand_for(tmp_path: Path, backend: str) -> None:
    model = packed_folder(tmp_path)
    [sequence] = random_prompts([60])
    runtime = load_runtime(tmp_path, EngineConfig(cache_tokens=256, page_size=8, attention_backend=backend))
    [got] = stepped_logits(runtime, [sequence], [30], chunk=16)
    assert relative_error(got, reference_logits(model, sequence)[29:]) <= 1e-4


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
        ({f"{GATE_UP}_scales": None}, "got one of the two of"),
        ({f"{GATE_UP}_blocks": None}, "got one of the two of"),
        ({f"{GATE_UP}_scales": random_bytes(6, 64, 3)}, r"expected .*gate_up_proj_blocks of shape"),
        ({f"{GATE_UP}_blocks": random_bytes(6, 64, 2, 8)}, r"expected .*gate_up_proj_blocks of shape"),
        ({f"{GATE_UP}_scales": torch.ones(6, 64, 2)}, "expected .*gate_up_proj_scales' in U8, got F32"),
        ({GATE_UP: torch.ones(6, 64, 64)}, "as MXFP4 or unquantised, got both"),
    ],
)
def test_a_broken_pair_is_refused(tmp_path: Path, changes: dict[str, Tensor | None], message: str) -> None:
    packed_folder(tmp_path)
    resave(tmp_path, changes)
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path)


def test_bytes_that_are_no_pair_are_refused(tmp_path: Path) -> None:
    packed_folder(tmp_path)
    resave(tmp_path, {"model.norm.weight": random_bytes(64)})
    with pytest.raises(UnsupportedModelError, match=r"'model\.norm\.weight'.*got U8"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "gptq"}, "got the method 'gptq'"),
        ({"bits": 4}, "got the method None"),
        ("mxfp4", "got the method 'mxfp4'"),
        ({**QUANTIZATION, "group_size": 64}, "got group_size"),
    ],
)
def test_other_quantisations_are_refused(tmp_path: Path, section: object, message: str) -> None:
    packed_folder(tmp_path)
    set_quantization(tmp_path, section)
    with pytest.raises(UnsupportedModelError, match=f"quantization_config.*{message}"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "listed", [["model.layers.*.mlp.experts"], ["gate_up_proj"], ["lm_head", "model.layers.0"], [GATE_UP]]
)
def test_a_packed_tensor_of_a_module_that_is_listed_as_not_packed_is_refused(tmp_path: Path, listed: list[str]) -> None:
    packed_folder(tmp_path)
    set_quantization(tmp_path, QUANTIZATION | {"modules_to_not_convert": listed})
    with pytest.raises(CheckpointError, match="_proj' unpacked, because 'modules_to_not_convert' lists"):
        opened(tmp_path)


def test_listed_modules_that_are_not_packed_are_accepted(tmp_path: Path) -> None:
    packed_folder(tmp_path)
    listed = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    set_quantization(tmp_path, QUANTIZATION | {"modules_to_not_convert": listed, "dequantize": True})
    assert GATE_UP in opened(tmp_path).tensors


@pytest.mark.parametrize("changes", [{"modules_to_not_convert": "lm_head"}, {"dequantize": "yes"}])
def test_settings_of_the_wrong_type_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    packed_folder(tmp_path)
    set_quantization(tmp_path, QUANTIZATION | changes)
    with pytest.raises(UnsupportedModelError, match=f"expected '{next(iter(changes))}'"):
        opened(tmp_path)
