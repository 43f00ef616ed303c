"""Weights that stay quantised: the blocks of a file stand for the numbers that `load` decodes them to."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from gguf import GGMLQuantizationType

from sightline.core.errors import CheckpointError
from sightline.core.ledger import Ledger
from sightline.kernels.block_product import DynamicInt4Product, Int4PackProduct
from sightline.kernels.block_weights import CodeBits
from sightline.models.loading.default_model import default_model_path
from sightline.models.loading.gguf.codes import as_blocks, block_bits, code_form, read_codes
from sightline.models.loading.gguf.quantization import dequantise
from sightline.models.loading.gguf.types import STORAGE_BY_CODE
from sightline.models.loading.opening import open_checkpoint
from support.coded_weights import FORMS
from support.gguf_checks import opened
from support.gguf_families import tiny, write_family
from support.gguf_files import tiny_llama, write_llama

BITS = {"Q8_0": CodeBits.EIGHT, "Q4_0": CodeBits.FOUR, "Q4_1": CodeBits.FOUR}
HEAD = "model.embed_tokens.weight"


@pytest.mark.parametrize("kind", BITS)
def test_random_blocks_stand_for_what_they_decode_to(kind: str) -> None:
    storage = STORAGE_BY_CODE[GGMLQuantizationType[kind]]
    blocks, shape = 24, (6, 24 * 32)
    raw = numpy.random.default_rng(7).integers(0, 256, (6 * blocks, storage.block_bytes), dtype=numpy.uint8)
    raw[:, [1, 3]] &= 0xBB  # takes a bit from the exponents of the halves, whose infinities and NaNs have them all
    data = memoryview(bytearray(raw.tobytes()))
    read = as_blocks(read_codes(data, storage, shape))
    assert read.bits == BITS[kind]
    assert int(read.codes.max()) == (1 << BITS[kind]) - 1
    assert torch.equal(read.dequantised(), dequantise(data, storage, shape))


@pytest.mark.parametrize("kind", FORMS)
def test_random_codes_stand_for_what_they_decode_to(kind: str) -> None:
    storage = STORAGE_BY_CODE[GGMLQuantizationType[kind]]
    blocks, shape = 6, (4, 6 * storage.block_elements)
    raw = numpy.random.default_rng(7).integers(0, 256, (4 * blocks, storage.block_bytes), dtype=numpy.uint8)
    halves = slice(208, 210) if kind == "Q6_K" else slice(0, 4)
    raw[:, halves][:, 1::2] &= 0xBB
    data = memoryview(bytearray(raw.tobytes()))
    read = read_codes(data, storage, shape)
    assert read.form == FORMS[kind]
    assert int(read.codes.max()) == (1 << read.form.bits) - 1
    expected = dequantise(data, storage, shape)
    assert torch.allclose(read.dequantised(), expected, rtol=1e-6, atol=float(expected.abs().max()) * 1e-7)


def test_only_listed_types_have_codes() -> None:
    for storage in STORAGE_BY_CODE.values():
        assert code_form(storage) == FORMS.get(storage.name), storage.name


def test_only_types_of_small_integers_with_a_scale_have_blocks() -> None:
    for storage in STORAGE_BY_CODE.values():
        assert block_bits(storage) == BITS.get(storage.name), storage.name


@pytest.mark.parametrize("kind", BITS)
def test_every_matrix_of_a_quantised_llama_has_blocks(tmp_path: Path, kind: str) -> None:
    """Rows of queries and keys are stored in another order."""
    write_llama(tmp_path / "tiny.gguf", tiny_llama(attention_bias=True), quantised=kind)
    checkpoint = opened(tmp_path / "tiny.gguf")
    matrices = {name for name, info in checkpoint.tensors.items() if len(info.shape) == 2}
    assert {"model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight", HEAD} <= matrices
    assert {name for name, info in checkpoint.tensors.items() if info.blocks is not None} == matrices
    for name in matrices:
        blocks = checkpoint.load_blocks(name)
        assert blocks.codes.is_contiguous()
        assert blocks.bits == checkpoint.tensors[name].blocks == BITS[kind]
        assert torch.equal(blocks.dequantised(), checkpoint.load(name)), name


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q5_0"])
def test_other_types_have_no_blocks(tmp_path: Path, kind: str) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny_llama(), quantised=kind)
    checkpoint = opened(tmp_path / "tiny.gguf")
    assert all(info.blocks is None for info in checkpoint.tensors.values())


def test_each_expert_has_its_own_blocks(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    write_family(tmp_path / "tiny.gguf", "qwen3moe", tiny("qwen3moe", **sizes), quantised="Q4_1")
    checkpoint = opened(tmp_path / "tiny.gguf")
    experts = [name for name in checkpoint.tensors if ".experts." in name]
    assert len({tuple(checkpoint.load(name).flatten().tolist()) for name in experts}) == len(experts) > 0
    for name in experts:
        assert torch.equal(checkpoint.load_blocks(name).dequantised(), checkpoint.load(name)), name


def test_layouts_that_break_rows_leave_no_blocks(tmp_path: Path) -> None:
    write_family(tmp_path / "tiny.gguf", "gpt-oss", tiny("gpt-oss"), quantised="Q8_0")
    checkpoint = opened(tmp_path / "tiny.gguf")
    for part in ("experts.gate_up_proj", "experts.down_proj"):
        name = f"model.layers.0.mlp.{part}"
        assert "Q8_0" in checkpoint.tensors[name].stored_as
        assert checkpoint.tensors[name].blocks is None
        with pytest.raises(CheckpointError, match="in blocks along its rows, got"):
            checkpoint.load_blocks(name)


def test_folders_have_no_blocks(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path, Ledger())
    assert all(info.blocks is None for info in checkpoint.tensors.values())


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny_llama())
    with pytest.raises(CheckpointError, match=r"expected a tensor 'model.nothing', got 21 tensors without it"):
        opened(tmp_path / "tiny.gguf").load_blocks("model.nothing")


def test_the_default_models_weights_are_multiplied_as_they_are_stored() -> None:
    checkpoint = opened(default_model_path())
    for name, kind in ((HEAD, "Q8_0"), ("model.layers.7.self_attn.q_proj.weight", "Q4_1")):
        assert checkpoint.tensors[name].stored_as == kind
        blocks = checkpoint.load_blocks(name)
        weights = checkpoint.load(name)
        assert torch.equal(blocks.dequantised(), weights)
        some = blocks.take_rows(torch.arange(320))
        x = torch.randn(5, some.in_features, generator=torch.Generator().manual_seed(0))
        expected = x @ weights[:320].t()
        for product, tolerance in ((Int4PackProduct, 0.005), (DynamicInt4Product, 0.012)):
            assert (product(some)(x) - expected).norm() < tolerance * expected.norm()
