"""Weights that stay quantised give the dequantised answer but for rounding, and what cannot stay is in the ledger."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.attention.groups import group_layers
from sightline.core.config import EngineConfig, Quantization
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.kernels.block_product import CpuFeatures
from sightline.kernels.cpu.program import inline_launcher
from sightline.layers.cpu_embedding import CodedEmbedding
from sightline.layers.cpu_linear import CodedLinear
from sightline.layers.embedding import BlockEmbedding, DenseEmbedding
from sightline.layers.linear import BlockLinear, Linear
from sightline.layers.moe import ExpertMlp
from sightline.models.decoder import Decoder
from sightline.models.kept_weights import KeptBlocks, KeptWeights
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from sightline.runner.build import assemble_runtime, make_store
from sightline.runner.quantised import model_facts
from sightline.runner.runtime import Runtime
from support.definitions import softmax_layer
from support.gguf_families import tiny, write_family
from support.gguf_files import VOCABULARY, tiny_llama, write_llama
from support.kept_weights import BLOCKS, CODES, KEPT
from support.layers import experts_of
from support.tiny_models import load_runtime, random_prompts, stepped_logits

WIDTHS = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
SIZES: dict[str, dict[str, int]] = {
    "qwen2": {},
    "qwen3moe": {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64},
}
all_types = pytest.mark.parametrize("quantised", ["Q8_0", "Q4_0", "Q4_1"])
all_kept = pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT.keys())


def load_kept(path: Path, kept: KeptWeights, ledger: Ledger) -> Decoder:
    checkpoint = open_checkpoint(path, ledger)
    reader = WeightReader(checkpoint, torch.float32, torch.device("cpu"), ledger, lambda done, total: None, kept=kept)
    decoder = define_model(checkpoint.config, ledger).load(reader)
    assert isinstance(decoder, Decoder)
    return decoder


def exact_runtime(path: Path) -> Runtime:
    return load_runtime(path, EngineConfig(cache_tokens=256, page_size=8, layer_kernels="torch"))


def kept_runtime(path: Path, kept: KeptWeights, ledger: Ledger) -> Runtime:
    exact, decoder = exact_runtime(path), load_kept(path, kept, ledger)
    groups = group_layers(decoder.definition.attention_specs())
    return assemble_runtime(
        exact.config,
        decoder.definition,
        decoder,
        groups,
        exact.selections,
        make_store(exact.config, groups),
        inline_launcher(),
    )


def logits_of(runtime: Runtime) -> Tensor:
    """Of rows in chunks and decoding, alone and beside others."""
    sequences = random_prompts([40, 25, 33], vocab=VOCABULARY)
    return torch.cat(stepped_logits(runtime, sequences, [30, 9, 20], chunk=16))


def write_quantised_llama(path: Path, quantised: str, **changes: Any) -> None:
    write_llama(path, tiny_llama(**WIDTHS, **changes), quantised=quantised)


def distance(got: Tensor, expected: Tensor) -> float:
    """Of the whole, as a share of its length."""
    return float((got - expected).norm() / expected.norm())


@all_types
@all_kept
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def test_every_matrix_stays_quantised_and_gives_nearly_the_exact_logits(
    quantised: str, kept: KeptWeights, tied: bool, tmp_path: Path
) -> None:
    path, ledger = tmp_path / "tiny.gguf", Ledger()
    write_quantised_llama(path, quantised, tie_word_embeddings=tied)
    decoder = load_kept(path, kept, ledger)
    assert list(ledger) == []
    assert isinstance(decoder.states.embedding, (BlockEmbedding, CodedEmbedding))
    for layer in decoder.states.layers:
        projections = [layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down]  # type: ignore[union-attr]
        assert all(isinstance(each, (BlockLinear, CodedLinear)) for each in [*projections, decoder.head])
    error = distance(logits_of(kept_runtime(path, kept, ledger)), logits_of(exact_runtime(path)))
    assert 0.0 < error < 0.08


@all_kept
def test_another_file_is_much_further_away(kept: KeptWeights, tmp_path: Path) -> None:
    """What the tolerance above can tell apart: the same model with one projection's rows in another order."""
    write_quantised_llama(tmp_path / "tiny.gguf", "Q4_0")
    expected = logits_of(exact_runtime(tmp_path / "tiny.gguf"))
    model = tiny_llama(**WIDTHS)
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = weight.data.roll(1, dims=0)
    write_llama(tmp_path / "other.gguf", model, quantised="Q4_0")
    assert distance(logits_of(kept_runtime(tmp_path / "other.gguf", kept, Ledger())), expected) > 0.3


@pytest.mark.parametrize("family", ["qwen2", "qwen3moe"])
def test_biases_and_experts_stay_beside_quantised_weights(family: str, tmp_path: Path) -> None:
    path, ledger = tmp_path / "tiny.gguf", Ledger()
    write_family(path, family, tiny(family, **SIZES[family]), quantised="Q8_0")
    decoder = load_kept(path, BLOCKS, ledger)
    qkv = softmax_layer(decoder.states.layers[0]).qkv
    assert isinstance(qkv, BlockLinear)
    mlp = decoder.states.layers[0].mlp
    if isinstance(mlp, ExpertMlp):
        [router] = ledger.degradations
        assert "mlp.gate.weight among them" in router.outcome
        assert "expected a multiple of 16 outputs" in router.outcome
        assert isinstance(experts_of(mlp)[0].gate_up, BlockLinear)
    else:
        assert list(ledger) == []
        assert qkv.bias is not None
    assert 0.0 < distance(logits_of(kept_runtime(path, BLOCKS, ledger)), logits_of(exact_runtime(path))) < 0.08


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_embedding_that_cannot_stay_is_named(tied: bool, tmp_path: Path) -> None:
    path, ledger = tmp_path / "tiny.gguf", Ledger()
    write_quantised_llama(path, "Q5_0", tie_word_embeddings=tied)
    load_kept(path, BLOCKS, ledger)
    assert sum("model.embed_tokens.weight among them" in entry.outcome for entry in ledger.degradations) == 1


def test_memory_that_weights_take_is_counted_as_it_is(tmp_path: Path) -> None:
    write_quantised_llama(tmp_path / "tiny.gguf", "Q4_0", tie_word_embeddings=True)
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf", Ledger())
    definition = define_model(checkpoint.config, Ledger())
    groups = group_layers(definition.attention_specs())
    exact, kept = (model_facts(kind, checkpoint, definition, groups) for kind in Quantization)
    matrices = sum(math.prod(info.shape) for info in checkpoint.tensors.values() if len(info.shape) == 2)
    assert exact.quantised_bytes == 0
    assert exact.weight_elements - kept.weight_elements == matrices
    assert kept.quantised_bytes == matrices * 5 // 8
    head = load_kept(tmp_path / "tiny.gguf", CODES, Ledger()).head
    assert isinstance(head, CodedLinear)
    assert 0.7 * kept.quantised_bytes < matrices / (head.out_features * head.in_features) * head.num_bytes
    assert matrices / (head.out_features * head.in_features) * head.num_bytes <= kept.quantised_bytes


def test_a_tensor_that_is_a_copy_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_quantised_llama(tmp_path / "tiny.gguf", "Q4_0", tie_word_embeddings=False)
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf", Ledger())
    definition = define_model(checkpoint.config, Ledger())
    groups, name = group_layers(definition.attention_specs()), "lm_head.weight"
    whole = [model_facts(kind, checkpoint, definition, groups) for kind in Quantization]
    monkeypatch.setattr(type(definition), "copies", frozenset({name}))
    shared = [model_facts(kind, checkpoint, definition, groups) for kind in Quantization]
    for all_of_it, without in zip(whole, shared, strict=True):
        saved = all_of_it.weight_elements - without.weight_elements
        saved_bytes = all_of_it.quantised_bytes - without.quantised_bytes
        assert saved + saved_bytes * 8 // 5 == math.prod(checkpoint.tensors[name].shape)


@pytest.mark.parametrize("quantised", ["Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False], ids=["tied", "untied"])
def test_our_kernels_keep_types_that_torch_has_no_op_for(quantised: str, tied: bool, tmp_path: Path) -> None:
    path, ledger = tmp_path / "tiny.gguf", Ledger()
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    write_llama(path, tiny_llama(**sizes, head_dim=64, tie_word_embeddings=tied), quantised=quantised)
    decoder = load_kept(path, CODES, ledger)
    assert list(ledger) == []
    assert isinstance(decoder.states.embedding, CodedEmbedding)
    assert isinstance(decoder.head, CodedLinear)
    error = distance(logits_of(kept_runtime(path, CODES, ledger)), logits_of(exact_runtime(path)))
    assert 0.0 < error < 0.06


def test_a_file_that_quantises_nothing_says_so(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny_llama())
    ledger = Ledger()
    decoder = load_kept(tmp_path / "tiny.gguf", BLOCKS, ledger)
    assert isinstance(decoder.head, Linear)
    assert isinstance(decoder.states.embedding, DenseEmbedding)
    [entry] = ledger.degradations
    assert entry.subject == "--quantization keep"
    assert entry.outcome == "changes nothing: no weight of the file is quantised"


def test_types_that_no_op_multiplies_are_dequantised_exactly_and_named(tmp_path: Path) -> None:
    path, ledger = tmp_path / "tiny.gguf", Ledger()
    write_quantised_llama(path, "Q5_0")
    runtime = kept_runtime(path, BLOCKS, ledger)
    assert torch.equal(logits_of(runtime), logits_of(exact_runtime(path)))
    assert "got Q5_0" in ledger.degradations[0].outcome


def test_experts_in_one_tensor_are_dequantised_and_named(tmp_path: Path) -> None:
    write_family(tmp_path / "tiny.gguf", "gpt-oss", tiny("gpt-oss"), quantised="Q8_0")
    ledger = Ledger()
    load_kept(tmp_path / "tiny.gguf", BLOCKS, ledger)
    assert any("got experts stored as one tensor" in entry.outcome for entry in ledger.degradations)


def test_a_cpu_without_an_op_runs_dequantised_and_says_why(tmp_path: Path) -> None:
    path, ledger = tmp_path / "tiny.gguf", Ledger()
    write_quantised_llama(path, "Q4_0")
    runtime = kept_runtime(path, KeptBlocks(CpuFeatures("VSX", kleidiai=False)), ledger)
    assert torch.equal(logits_of(runtime), logits_of(exact_runtime(path)))
    assert "expected a CPU with AVX2 or AVX512, got VSX" in ledger.degradations[0].outcome


def test_strict_refuses_what_cannot_stay_quantised(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny_llama())
    with pytest.raises(ConfigError, match="refused under --strict: --quantization keep"):
        load_kept(tmp_path / "tiny.gguf", BLOCKS, Ledger(strict=True))
