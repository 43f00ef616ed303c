"""GGUF models seen as Hugging Face checkpoints, against transformers' loader and against the model that was written."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from transformers import AutoConfig

from sightline.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.loading.default_model import default_model_path
from sightline.models.loading.opening import open_checkpoint
from support.gguf_checks import assert_same_weights, loaded_by_transformers, opened
from support.gguf_files import (
    add_metadata,
    close,
    tiny_gemma3,
    tiny_llama,
    write_gemma3,
    write_llama,
)

SHARED_KEYS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "attention_bias",
)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """The state dict without a tied output projection."""
    tied = model.config.tie_word_embeddings
    return {name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}


@pytest.mark.prove
def test_default_model_equals_the_transformers_loader_bit_for_bit(tmp_path: Path) -> None:
    path = default_model_path()
    checkpoint = opened(path)
    # transformers takes half a minute over the vocabulary, which is tested elsewhere.
    rewrite(path, tmp_path / "weights.gguf", {}, leave_out=("tokens", "token_type", "merges"))
    config, weights = loaded_by_transformers(tmp_path / "weights.gguf")
    assert_same_weights(checkpoint, weights)
    for key in (*SHARED_KEYS, "hidden_act", "mlp_bias", "bos_token_id", "eos_token_id"):
        assert checkpoint.config[key] == getattr(config, key), key
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.config["rope_theta"] == config.rope_parameters["rope_theta"]
    assert checkpoint.config["rope_scaling"] is None
    assert checkpoint.tensors["model.embed_tokens.weight"].stored_as == "Q8_0"
    assert checkpoint.generation.eos_token_ids == {2}
    assert checkpoint.load_tokenizer().vocab_size == checkpoint.config["vocab_size"]


@pytest.mark.parametrize("tied", [True, False])
def test_llama_comes_back_as_it_was_written(tmp_path: Path, tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    write_llama(tmp_path / "tiny.gguf", model)
    checkpoint = opened(tmp_path / "tiny.gguf")
    assert_same_weights(checkpoint, weights_of(model))
    assert checkpoint.config["tie_word_embeddings"] is tied
    assert checkpoint.config["head_dim"] == 16


def test_llama_biases_are_mapped_and_reordered(tmp_path: Path) -> None:
    model = tiny_llama(attention_bias=True, mlp_bias=True)
    write_llama(tmp_path / "tiny.gguf", model)
    checkpoint = opened(tmp_path / "tiny.gguf")
    assert_same_weights(checkpoint, weights_of(model))
    assert checkpoint.config["attention_bias"] is True
    assert checkpoint.config["mlp_bias"] is True


@pytest.mark.parametrize("quantised", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_quantised_llama_equals_the_transformers_loader(tmp_path: Path, quantised: str) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny_llama(), quantised=quantised)
    _, weights = loaded_by_transformers(tmp_path / "tiny.gguf")
    checkpoint = opened(tmp_path / "tiny.gguf")
    assert_same_weights(checkpoint, weights)
    assert checkpoint.tensors["lm_head.weight"].stored_as == quantised


@pytest.mark.parametrize("tied", [True, False])
def test_gemma3_comes_back_as_it_was_written(tmp_path: Path, tied: bool) -> None:
    model = tiny_gemma3(tie_word_embeddings=tied)
    write_gemma3(tmp_path / "tiny.gguf", model)
    checkpoint = opened(tmp_path / "tiny.gguf")
    expected = model.state_dict()
    assert set(checkpoint.tensors) == set(expected) - ({"lm_head.weight"} if tied else set())
    for name in checkpoint.tensors:
        # Adding one and taking it away again rounds, so norms come back to within an fp32 step of one.
        torch.testing.assert_close(checkpoint.load(name), expected[name], atol=2e-7, rtol=0)


def test_gemma3_equals_the_transformers_loader(tmp_path: Path) -> None:
    write_gemma3(tmp_path / "tiny.gguf", tiny_gemma3())
    config, weights = loaded_by_transformers(tmp_path / "tiny.gguf")
    checkpoint = opened(tmp_path / "tiny.gguf")
    assert_same_weights(checkpoint, weights)
    for key in (
        *SHARED_KEYS,
        "sliding_window",
        "layer_types",
        "hidden_activation",
        "final_logit_softcapping",
        "attn_logit_softcapping",
    ):
        assert checkpoint.config[key] == getattr(config, key), key
    assert checkpoint.config["rope_theta"] == config.rope_parameters["full_attention"]["rope_theta"]
    local = config.rope_parameters["sliding_attention"]["rope_theta"]
    assert checkpoint.config["rope_local_base_freq"] == local
    assert checkpoint.config["query_pre_attn_scalar"] == 32


def test_gemma3_layers_follow_the_pattern_that_the_file_states(tmp_path: Path) -> None:
    key = "gemma3.attention.sliding_window_pattern"
    write_gemma3(tmp_path / "period.gguf", tiny_gemma3(), extra={key: 3})
    kinds = opened(tmp_path / "period.gguf").config["layer_types"]
    assert [kind == "full_attention" for kind in list_of(kinds)] == [False, False, True, False, False, True, False]
    write_gemma3(tmp_path / "flags.gguf", tiny_gemma3(), extra={key: [False, *[True] * 6]})
    kinds = opened(tmp_path / "flags.gguf").config["layer_types"]
    assert list_of(kinds) == ["full_attention", *["sliding_attention"] * 6]


def list_of(value: object) -> list[object]:
    assert isinstance(value, list)
    return value


def test_gemma3_of_62_layers_scales_queries_by_width_per_head(tmp_path: Path) -> None:
    write_gemma3(tmp_path / "tiny.gguf", tiny_gemma3(num_hidden_layers=62))
    assert opened(tmp_path / "tiny.gguf").config["query_pre_attn_scalar"] == 64 // 4


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 4.0}, 4.0),
        ({"llama.rope.scale_linear": 2.0}, 2.0),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, None),
    ],
)
def test_linear_rope_scaling_is_passed_on(tmp_path: Path, extra: dict[str, object], expected: float | None) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny_llama(), extra=extra)
    scaling = opened(tmp_path / "tiny.gguf").config["rope_scaling"]
    assert scaling == (None if expected is None else {"rope_type": "linear", "factor": expected})


def test_a_scaling_factor_that_is_switched_off_is_noted(tmp_path: Path) -> None:
    extra: dict[str, object] = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    write_llama(tmp_path / "tiny.gguf", tiny_llama(), extra=extra)
    ledger = Ledger(strict=True)
    assert open_checkpoint(tmp_path / "tiny.gguf", ledger).config["rope_scaling"] is None
    assert [note.subject for note in ledger.notes] == ["GGUF metadata 'llama.rope.scaling.factor'"]


def test_rope_factors_are_in_the_config_and_not_among_the_weights(tmp_path: Path) -> None:
    factors = numpy.array([1.0, 1.0, 2.5, 8.0, 8.0, 8.0, 8.0, 8.0], dtype=numpy.float32)
    write_llama(tmp_path / "tiny.gguf", tiny_llama(), extra={"rope_freqs.weight": factors})
    checkpoint = opened(tmp_path / "tiny.gguf")
    assert checkpoint.config["rope_frequency_factors"] == factors.tolist()
    assert not any("rope" in name for name in checkpoint.tensors)


def test_rope_factors_of_the_wrong_length_are_refused(tmp_path: Path) -> None:
    factors = numpy.ones(3, dtype=numpy.float32)
    write_llama(tmp_path / "tiny.gguf", tiny_llama(), extra={"rope_freqs.weight": factors})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        opened(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "'longrope'"),
        ({"llama.rope.scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor"),
        ({"llama.attention.scale": 0.5}, r"attention\.scale"),
        ({"llama.attention.causal": False}, "causal"),
        ({"llama.logit_scale": 0.5}, "logit_scale"),
        ({"llama.attention.key_length": 32, "llama.attention.value_length": 16}, "value_length"),
        ({"llama.attention.key_length": 32}, "dimension_count"),
        ({"split.count": 2}, "2 parts"),
        ({"blk.0.attn_sinks.weight": numpy.ones(4, dtype=numpy.float32)}, r"blk\.0\.attn_sinks\.weight"),
        ({"blk.00.attn_norm.weight": numpy.ones(4, dtype=numpy.float32)}, r"blk\.00\."),
        ({"rope_factors_long.weight": numpy.ones(8, dtype=numpy.float32)}, "rope_factors_long"),
        ({"blk.0.ids": numpy.ones(4, dtype=numpy.int32)}, r"blk\.0\.ids"),
    ],
)
def test_what_changes_the_result_and_is_not_supported_is_refused_by_name(
    tmp_path: Path, extra: dict[str, object], message: str
) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny_llama(), extra=extra)
    with pytest.raises(UnsupportedModelError, match=message):
        opened(tmp_path / "tiny.gguf")


def test_neutral_values_of_unsupported_fields_are_accepted(tmp_path: Path) -> None:
    extra: dict[str, object] = {"llama.expert_count": 0, "llama.logit_scale": 1.0, "llama.attention.causal": True}
    write_llama(tmp_path / "tiny.gguf", tiny_llama(), extra=extra)
    assert opened(tmp_path / "tiny.gguf").config["model_type"] == "llama"


def test_metadata_of_unknown_meaning_is_recorded_and_refused_under_strict(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny_llama(), extra={"llama.attention.novelty": 3})
    ledger = Ledger()
    open_checkpoint(tmp_path / "tiny.gguf", ledger)
    assert ["llama.attention.novelty" in str(entry) for entry in ledger] == [True]
    with pytest.raises(ConfigError, match="novelty"):
        open_checkpoint(tmp_path / "tiny.gguf", Ledger(strict=True))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.rope.scaling.type": "linear"}, "factor"),
        ({"llama.vocab_size": 63}, "vocab_size"),
        ({"llama.embedding_length": 63}, "token_embd"),
        ({"llama.block_count": "two"}, "block_count"),
        ({"llama.block_count": 0}, "block_count"),
        ({"llama.block_count": 3}, "block_count"),
        ({"llama.block_count": 1}, "block_count"),
        ({"llama.block_count": 2_000_000_000}, "block_count"),
        ({"llama.attention.head_count": 6}, "multiple"),
        ({"llama.attention.head_count": 3}, "divisor"),
        ({"llama.attention.head_count": 0}, "head_count"),
        ({"llama.attention.head_count_kv": 0}, "head_count_kv"),
        ({"llama.attention.head_count_kv": 3}, "divisor"),
        ({"llama.attention.key_length": 0}, "key_length"),
        ({"llama.attention.value_length": 0}, "value_length"),
        ({"llama.embedding_length": 0}, "embedding_length"),
        ({"llama.feed_forward_length": 0}, "feed_forward_length"),
        ({"llama.vocab_size": 0}, "vocab_size"),
        ({"llama.context_length": 0}, "context_length"),
        ({"llama.context_length": 2**32 - 1}, "context_length"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "epsilon"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon"),
        ({"llama.rope.freq_base": 0.0}, "freq_base"),
        ({"llama.rope.freq_base": -1.0}, "freq_base"),
        ({"llama.rope.freq_base": float("inf")}, "freq_base"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "factor"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": float("nan")}, "factor"),
        ({"llama.rope.scale_linear": -2.0}, "factor"),
        ({"llama.rope.scale_linear": 2.0, "llama.rope.scaling.factor": 4.0}, "scale_linear"),
        ({"tokenizer.ggml.eos_token_id": 64}, "eos_token_id"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(tmp_path: Path, extra: dict[str, object], message: str) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny_llama())
    path = tmp_path / "changed.gguf"
    rewrite(tmp_path / "tiny.gguf", path, extra)
    with pytest.raises(CheckpointError, match=message):
        opened(path)


@pytest.mark.parametrize(
    ("leave_out", "message"),
    [(("pre",), r"tokenizer\.ggml\.pre"), (("eos_token_id",), r"eos_token_id.*stop string")],
)
def test_what_the_tokenizer_lacks_is_recorded_by_name(tmp_path: Path, leave_out: tuple[str, ...], message: str) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny_llama())
    rewrite(tmp_path / "tiny.gguf", tmp_path / "changed.gguf", {}, leave_out=leave_out)
    ledger = Ledger()
    open_checkpoint(tmp_path / "changed.gguf", ledger)
    (entry,) = ledger.degradations
    assert re.search(message, str(entry))


def test_a_file_without_vocabulary_says_so(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny_llama())
    rewrite(tmp_path / "tiny.gguf", tmp_path / "changed.gguf", {}, leave_out=("tokens",))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens"):
        opened(tmp_path / "changed.gguf")


def test_more_tokens_than_the_embedding_has_rows_are_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny_llama())
    more: dict[str, object] = {
        "tokenizer.ggml.tokens": [*(f"<{i}>" for i in range(62)), "a", "b", "ab"],
        "tokenizer.ggml.token_type": [*[3] * 62, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
    }
    rewrite(tmp_path / "tiny.gguf", tmp_path / "changed.gguf", more)
    with pytest.raises(CheckpointError, match=r"at most 64 tokens.*got 65"):
        opened(tmp_path / "changed.gguf").load_tokenizer()


@pytest.mark.parametrize("layers", [2_000_000_000, 8, 6])
def test_a_layer_count_is_checked_before_anything_is_sized_by_it(tmp_path: Path, layers: int) -> None:
    write_gemma3(tmp_path / "tiny.gguf", tiny_gemma3())
    rewrite(tmp_path / "tiny.gguf", tmp_path / "changed.gguf", {"gemma3.block_count": layers}, architecture="gemma3")
    start = time.process_time()
    with pytest.raises(CheckpointError, match=f"block_count.*got {layers} for the tensors of 7 layers"):
        opened(tmp_path / "changed.gguf")
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gemma3.attention.sliding_window": 0}, "sliding_window"),
        ({"gemma3.attention.sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"gemma3.rope.freq_base_swa": 0.0}, "freq_base_swa"),
        ({"gemma3.final_logit_softcapping": -1.0}, "softcapping"),
    ],
)
def test_gemma3_numbers_out_of_range_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    write_gemma3(tmp_path / "tiny.gguf", tiny_gemma3())
    rewrite(tmp_path / "tiny.gguf", tmp_path / "changed.gguf", changes, architecture="gemma3")
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / "changed.gguf")


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_rope_factors_of_a_type_without_decoder_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    factors = numpy.ones(8).astype(kind)
    write_llama(tmp_path / "tiny.gguf", tiny_llama(), extra={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight.*I(32|64)"):
        opened(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("factors", [[[1.0] * 4] * 2, [1.0] * 7 + [0.0], [float("nan")] * 8])
def test_rope_factors_of_another_shape_or_range_are_refused(tmp_path: Path, factors: Any) -> None:
    extra: dict[str, object] = {"rope_freqs.weight": numpy.array(factors, dtype=numpy.float32)}
    write_llama(tmp_path / "tiny.gguf", tiny_llama(), extra=extra)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        opened(tmp_path / "tiny.gguf")


def rewrite(
    source: Path,
    target: Path,
    changes: Mapping[str, object],
    *,
    leave_out: tuple[str, ...] = (),
    architecture: str = "llama",
) -> None:
    """Copies a file with other metadata, through the reader and writer of the gguf package."""
    reader = GGUFReader(source)
    replaced = {*changes, *(f"tokenizer.ggml.{name}" for name in leave_out)}
    writer = GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.")) and key not in replaced:
            value_type = field.types[0]
            sub_type = field.types[1] if len(field.types) > 1 else None
            if field.contents() != []:
                writer.add_key_value(key, field.contents(), value_type, sub_type)
    add_metadata(writer, changes)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    close(writer)


def test_unknown_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    close(GGUFWriter(tmp_path / "tiny.gguf", "mamba"))
    with pytest.raises(
        UnsupportedModelError, match=r"gemma2, gemma3, gpt-oss, llama, qwen2, qwen3, qwen3moe, got 'mamba'"
    ):
        opened(tmp_path / "tiny.gguf")


def test_loading_an_unknown_tensor_says_so(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny_llama())
    with pytest.raises(CheckpointError, match=r"'model\.nothing'"):
        opened(tmp_path / "tiny.gguf").load("model.nothing")


def test_transformers_config_class_accepts_the_translated_config(tmp_path: Path) -> None:
    write_gemma3(tmp_path / "tiny.gguf", tiny_gemma3())
    config = dict(opened(tmp_path / "tiny.gguf").config)
    rebuilt = AutoConfig.for_model(**config)
    assert rebuilt.num_hidden_layers == 7
    assert rebuilt.layer_types == config["layer_types"]
