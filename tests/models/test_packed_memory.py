"""The memory of packed experts is counted as what a GPU really holds, not as what they decode to."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sightline.attention.groups import group_layers
from sightline.core.config import EngineConfig, LayerKernels, Quantization
from sightline.core.device import Device, DeviceKind, DeviceMemory
from sightline.core.ledger import Ledger
from sightline.core.resolution import ModelFacts, resolve
from sightline.kernels.packed_weights import FP8_BLOCK, WeightForm, packed_bytes
from sightline.kernels.triton.experts import StackedWeights
from sightline.layers.moe import ExpertCompute, ExpertMlp
from sightline.layers.stacked_experts import StackedExperts
from sightline.models.decoder import Decoder
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from sightline.runner.quantised import model_facts
from support.packed_experts import PACKED, pack_experts
from support.tiny_models import make_model

FAMILIES = pytest.mark.parametrize("family", PACKED)
BF16 = torch.bfloat16
TORCH, TRITON = LayerKernels.TORCH, LayerKernels.TRITON


def facts_of(folder: Path) -> ModelFacts:
    checkpoint = open_checkpoint(folder, Ledger())
    definition = define_model(checkpoint.config, Ledger())
    return model_facts(Quantization.DEQUANTISE, checkpoint, definition, group_layers(definition.attention_specs()))


def stacks_of(folder: Path) -> list[StackedWeights]:
    """The experts as an engine with Triton's kernels loads them."""
    checkpoint = open_checkpoint(folder, Ledger())
    compute = ExpertCompute.AT_ONCE
    reader = WeightReader(checkpoint, BF16, torch.device("cpu"), Ledger(), lambda *_: None, expert_compute=compute)
    decoder = define_model(checkpoint.config, Ledger()).load(reader)
    assert isinstance(decoder, Decoder)
    banks = [layer.mlp.bank for layer in decoder.states.layers if isinstance(layer.mlp, ExpertMlp)]
    stacked = [bank for bank in banks if isinstance(bank, StackedExperts)]
    assert len(stacked) == len(banks) > 0
    return [stack for bank in stacked for stack in (bank.gate_up, bank.down)]


def matrix_bytes(stacks: list[StackedWeights]) -> int:
    return sum(stack.weight.nbytes + (0 if stack.scales is None else stack.scales.nbytes) for stack in stacks)


def num_elements(folder: Path) -> int:
    return sum(math.prod(info.shape) for info in open_checkpoint(folder, Ledger()).tensors.values())


@FAMILIES
def test_packed_experts_are_counted_as_the_bytes_that_they_take(family: str, tmp_path: Path) -> None:
    pack_experts(family, tmp_path)
    facts, stacks = facts_of(tmp_path), stacks_of(tmp_path)
    assert {stack.form for stack in stacks} == {PACKED[family]}
    assert facts.packed_bytes == matrix_bytes(stacks)
    assert facts.weight_elements == num_elements(tmp_path)
    others = (facts.weight_elements - facts.packed_elements) * 2
    assert facts.weight_bytes(BF16, TRITON) == others + matrix_bytes(stacks)
    assert facts.weight_bytes(BF16, TORCH) == 2 * facts.weight_elements


@FAMILIES
def test_experts_that_are_not_packed_are_counted_in_the_compute_dtype(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    facts = facts_of(tmp_path)
    assert (facts.packed_elements, facts.packed_bytes) == (0, 0)
    assert matrix_bytes(stacks_of(tmp_path)) < facts.weight_bytes(BF16, TRITON) == 2 * num_elements(tmp_path)


def unpack(folder: Path, name: str) -> None:
    """Stores one fp8 matrix as numbers."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].to(BF16)
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_layer_with_one_matrix_that_is_not_packed_is_counted_as_it_is_loaded(tmp_path: Path) -> None:
    pack_experts("deepseek_v3", tmp_path)
    whole = facts_of(tmp_path)
    names = [name for name in load_file(tmp_path / "model.safetensors") if ".experts.0.gate_proj.weight" in name]
    unpack(tmp_path, min(name for name in names if not name.endswith("_scale_inv")))
    facts, stacks = facts_of(tmp_path), stacks_of(tmp_path)
    assert 0 <= facts.packed_bytes < whole.packed_bytes
    assert {stack.form for stack in stacks} >= {WeightForm.PLAIN}
    assert facts.packed_bytes == matrix_bytes([stack for stack in stacks if stack.form is not WeightForm.PLAIN])


def test_packed_matrices_that_are_no_experts_are_counted_dequantised(tmp_path: Path) -> None:
    pack_experts("deepseek_v3", tmp_path)
    before, tensors = facts_of(tmp_path), load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[f"{name}_scale_inv"] = torch.ones([-(-size // FP8_BLOCK) for size in tensors[name].shape])
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert open_checkpoint(tmp_path, Ledger()).tensors[name].packed is WeightForm.FP8_BLOCKS
    assert facts_of(tmp_path) == before


@pytest.mark.parametrize(
    ("form", "shape", "expected"),
    [
        (WeightForm.MXFP4, (4, 64, 96), 4 * 64 * 96 // 2 + 4 * 64 * 96 // 32),
        (WeightForm.FP8_BLOCKS, (128, 256), 128 * 256 + 4 * 2),
        (WeightForm.FP8_BLOCKS, (129, 100), 129 * 100 + 4 * 2),
    ],
)
def test_bytes_of_codes_and_scales(form: WeightForm, shape: tuple[int, ...], expected: int) -> None:
    assert packed_bytes(form, shape) == expected


@pytest.mark.parametrize("kernels", [TORCH, LayerKernels.TRITON])
def test_the_budget_of_a_card_has_the_packed_bytes(kernels: LayerKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Device(DeviceKind.CUDA, torch.device("cuda"), "a card", (9, 0))
    monkeypatch.setattr("sightline.core.resolution.device_memory", lambda _: DeviceMemory(1 << 36, 1 << 36, 0))
    facts = ModelFacts(1000, 1 << 30, 0, 10, packed_elements=1 << 29, packed_bytes=(1 << 28) + 5, vocab_size=10)
    config = EngineConfig(layer_kernels=kernels.value, max_model_len=100, max_num_seqs=4, enforce_eager=True)
    expected = (1 << 31) if kernels is TORCH else (1 << 30) + (1 << 28) + 5
    assert resolve(config, facts, card, Ledger()).memory.weight_bytes == expected
