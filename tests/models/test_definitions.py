"""A config means what it says, or it is refused: nothing that changes the result is ignored unseen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sightline.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.layers.rotary import LinearScaling, Llama3Scaling, RotarySpec
from sightline.models.decoder import Decoder, DecoderDefinition
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from support.attention_cases import CPU
from support.definitions import rotary_of, softmax_of
from support.tiny_models import make_model

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
GEMMA3: dict[str, object] = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "head_dim": 16}


def define(config: dict[str, object], ledger: Ledger | None = None) -> DecoderDefinition:
    definition = define_model(config, Ledger(strict=True) if ledger is None else ledger)
    assert isinstance(definition, DecoderDefinition)
    return definition


def rotary_from(**rope: object) -> RotarySpec:
    return rotary_of(define({**LLAMA, **rope}).layers[0])


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Gemma3ForCausalLM, .*LlamaForCausalLM, .*got MambaForCausalLM"):
        define({**LLAMA, "architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    with pytest.raises(UnsupportedModelError, match=r"got none \(model_type 'llama'\)"):
        define({"model_type": "llama"})


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (LLAMA, "hidden_act", "relu"),
        (LLAMA, "rope_interleaved", True),
        (LLAMA, "quantization_config", {"quant_method": "gptq"}),
        (GEMMA3, "hidden_activation", "gelu"),
        (GEMMA3, "attn_logit_softcapping", 50.0),
        (GEMMA3, "use_bidirectional_attention", True),
    ],
)
def test_a_field_that_changes_the_result_and_is_not_supported_is_refused(
    config: dict[str, object], field: str, value: object
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{field} = .* changes the result and is not supported"):
        define({**config, field: value})


def test_a_field_that_nobody_knows_is_in_the_ledger_and_an_error_under_strict() -> None:
    ledger = Ledger()
    define({**LLAMA, "attention_temperature": 2.0}, ledger)
    assert [entry.subject for entry in ledger] == ["config field attention_temperature"]
    with pytest.raises(ConfigError, match="attention_temperature"):
        define({**LLAMA, "attention_temperature": 2.0})


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("hidden_size", "64", "an integer from 1 to 1099511627776"),
        ("hidden_size", True, "an integer from 1 to 1099511627776"),
        ("hidden_size", None, "an integer from 1 to 1099511627776"),
        ("num_hidden_layers", 10**9, "an integer from 1 to 4096"),
        ("num_attention_heads", 0, "an integer from 1 to [0-9]+"),
        ("num_key_value_heads", 3, "a divisor of 4 attention heads"),
        ("num_key_value_heads", 0, "an integer from 1 to [0-9]+"),
        ("head_dim", 0, "an integer from 1 to [0-9]+"),
        ("max_position_embeddings", -5, "an integer from 1 to [0-9]+"),
        ("rope_theta", 0, "a finite number above 0"),
        ("rms_norm_eps", float("nan"), "a finite number above 0"),
        ("rms_norm_eps", "small", "a finite number above 0"),
        ("tie_word_embeddings", 1, "true or false"),
        ("rope_scaling", [1], "an object"),
    ],
)
def test_a_field_of_the_wrong_type_says_what_was_expected(field: str, value: object, expected: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"expected config field {field} to be {expected}, got"):
        define({**LLAMA, field: value})


def test_rope_in_the_older_and_the_newer_form() -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = RotarySpec(16, 5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert rotary_from() == RotarySpec(16, 10000.0)
    assert rotary_from(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3}) == expected
    assert rotary_from(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3}) == expected
    assert rotary_from(rope_scaling={"type": "linear", "factor": 2.0}).scaling == LinearScaling(2.0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "proportional", "factor": 2.0},
        {"rope_type": "yarn"},
        {"rope_type": "yarn", "factor": 2.0, "truncate": 1},
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0},
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": -1.0},
        {"rope_type": "yarn", "factor": 2.0, "mscale": "1", "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 2.0, "short_factor": [1.0]},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": float("inf")},
        {"rope_type": "default", "mscale": 2.0},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_rope_that_is_not_supported_is_refused(scaling: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModelError, match="rope: expected"):
        rotary_from(rope_scaling=scaling)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_would_depend_on_the_other_rows_is_refused_with_that_reason(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"got '{kind}': .* would depend on the rows beside it"):
        rotary_from(rope_scaling={"rope_type": kind, "factor": 2.0, "short_factor": [1.0] * 8})


def test_rope_factors_must_fit_the_head() -> None:
    with pytest.raises(UnsupportedModelError, match="expected 8 positive frequency factors, got 3"):
        rotary_from(rope_frequency_factors=[1.0, 2.0, 3.0])
    with pytest.raises(UnsupportedModelError, match="got both"):
        rotary_from(rope_frequency_factors=[1.0] * 8, rope_scaling={"rope_type": "linear", "factor": 2.0})


@pytest.mark.parametrize(
    ("field", "value"), [("sliding_window", 0), ("sliding_window_pattern", 0), ("query_pre_attn_scalar", 0)]
)
def test_gemma3_fields_that_make_no_sense_are_refused(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"expected config field {field}"):
        define({**GEMMA3, field: value})


def test_gemma3_rope_that_is_not_given_by_kind_of_layer_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="expected rope_parameters for full_attention and sliding"):
        define({**GEMMA3, "rope_parameters": {"rope_type": "linear", "factor": 8.0}})


def test_gemma3_layers_from_the_list_or_from_the_period() -> None:
    windows = [softmax_of(layer).spec.window for layer in define({**GEMMA3, "sliding_window": 32}).layers]
    assert windows == [32, 32, 32, 32, 32, None, 32]
    third = define({**GEMMA3, "sliding_window": 32, "sliding_window_pattern": 3})
    assert [softmax_of(layer).spec.window is None for layer in third.layers] == [
        False,
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    with pytest.raises(UnsupportedModelError, match="expected layer_types of 7 entries"):
        define({**GEMMA3, "layer_types": ["full_attention"] * 6})
    with pytest.raises(UnsupportedModelError, match="expected layer_types of 7 entries"):
        define({**GEMMA3, "layer_types": ["chunked_attention"] * 7})


def test_gemma3_rotary_embeddings_in_the_older_form() -> None:
    config = {**GEMMA3, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"type": "linear", "factor": 8}}
    layers = define(config).layers
    assert layers[0].rotary == RotarySpec(16, 1e4)
    assert layers[5].rotary == RotarySpec(16, 1e6, LinearScaling(8.0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path) -> Decoder:
    ledger = Ledger()
    checkpoint = open_checkpoint(folder, ledger)
    return define(dict(checkpoint.config), ledger).load(
        WeightReader(checkpoint, torch.float32, CPU, Ledger(), lambda done, total: None)
    )


def rewrite(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, {"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"expected tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_tensor_of_another_shape_is_refused(folder: Path) -> None:
    rewrite(folder, {"model.norm.weight": torch.ones(47)})
    with pytest.raises(CheckpointError, match=r"expected model\.norm\.weight of shape \(48,\).*got \(47,\)"):
        load(folder)


def test_a_tensor_that_the_model_would_ignore_is_refused(folder: Path) -> None:
    rewrite(folder, {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    with pytest.raises(CheckpointError, match=r"got 1 that it would ignore: model\.layers\.0\.self_attn\.q_norm"):
        load(folder)


def test_stored_rotary_frequencies_follow_from_the_config_and_may_be_there(folder: Path) -> None:
    rewrite(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert len(load(folder).states.layers) == 3
