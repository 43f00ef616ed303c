"""Configs that were once taken for others, each with what it must give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sightline.attention.groups import group_layers
from sightline.core.config import EngineConfig, Quantization
from sightline.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.layers.rotary import LinearScaling, RotarySpec, YarnScaling
from sightline.models.decoder import DecoderDefinition
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_embedder, define_model
from sightline.runner.quantised import model_facts
from support.definitions import rotary_of
from support.tiny_bert import open_tiny, save_embedder, vectors
from support.tiny_models import load_runtime, make_model

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
BY_KIND: dict[str, dict[str, object]] = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "rope_parameters": BY_KIND,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
YARN: dict[str, object] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def define(config: dict[str, object]) -> DecoderDefinition:
    definition = define_model(config, Ledger(strict=True))
    assert isinstance(definition, DecoderDefinition)
    return definition


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("nonsense", "expected config field rope_scaling to be an object"),
        ({"rope_type": "linear", "factor": 8.0}, r"got rope_scaling.factor = 8.0 and factor = 4.0 in its section"),
        ({"rope_type": "yarn", "factor": 4.0}, r"got rope_scaling.rope_type = 'yarn' and rope_type = 'linear'"),
        ({"rope_type": "linear", "novelty": 1}, "got novelty"),
    ],
)
def test_gemma3_does_not_drop_rope_scaling_beside_rope_parameters(scaling: object, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        define(GEMMA3 | {"rope_scaling": scaling})


def test_gemma3_takes_rope_scaling_that_agrees_and_both_places_of_a_base() -> None:
    same = GEMMA3 | {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 300.0}
    assert define(same).layers[1].rotary == RotarySpec(16, 300.0, LinearScaling(4.0))
    for outside in ("rope_theta", "rope_local_base_freq"):
        with pytest.raises(UnsupportedModelError, match=f"got {outside} = 77.0 and rope_theta"):
            define(GEMMA3 | {outside: 77.0})


def test_an_empty_rope_section_of_gpt_oss_is_no_scaling_and_a_missing_one_is_yarn() -> None:
    assert define(GPT_OSS | {"rope_parameters": {}}).layers[0].rotary == RotarySpec(16, 150_000.0)
    for config in (GPT_OSS, GPT_OSS | {"rope_parameters": None}, GPT_OSS | {"rope_scaling": {}}):
        assert isinstance(rotary_of(define(config).layers[0]).scaling, YarnScaling)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "expected rope_scaling or rope_parameters, or both alike",
        ),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, "got rope_theta = 500000.0 and rope_theta"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "got 'yarn' and 'linear'"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 64}, "got original_max_position_embeddings = 64"),
        ({"rope_scaling": YARN | {"rope_theta": None}}, "expected a number for rope_theta, got null"),
        ({"rope_theta": None}, "rope_theta to be a finite number above 0, got None"),
        ({"model_type": "mistral"}, "got LlamaForCausalLM and 'mistral'"),
        ({"hidden_size": 64.0}, "hidden_size to be an integer"),
        ({"rms_norm_eps": "null"}, "rms_norm_eps to be a finite number"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings to be true or false, got None"),
        ({"is_causal": None}, "is_causal to be true or false, got None"),
        ({"per_layer_config": {"0": {"hidden_act": "relu"}}}, "per_layer_config = .* changes the result"),
        ({"text_config": {"hidden_size": 8}}, "text_config = .* changes the result"),
        ({"n_layer": 3}, "n_layer = 3 changes the result"),
        ({"sliding_window": 5}, "sliding_window = 5 changes the result"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types = .* changes the result"),
    ],
)
def test_a_config_that_contradicts_itself_or_means_another_network_is_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        define(LLAMA | fields)


def test_the_same_said_twice_is_accepted_under_strict() -> None:
    both = {"rope_scaling": YARN, "rope_parameters": YARN | {"type": "yarn"}}
    assert define(LLAMA | both) == define(LLAMA | {"rope_scaling": YARN})
    outside = {"rope_scaling": YARN, "original_max_position_embeddings": 128}
    assert define(LLAMA | outside) == define(LLAMA | {"rope_scaling": YARN})


def test_what_tools_leave_in_a_config_is_noted_and_strict_accepts_it() -> None:
    ledger = Ledger(strict=True)
    left = {"_model_name_or_path": "somebody/model", "unk_token_id": 3, "attn_implementation": "eager"}
    assert define_model(LLAMA | left, ledger) == define(LLAMA)
    assert {note.subject for note in ledger.notes} == {f"config field {name}" for name in left}
    with pytest.raises(ConfigError, match="refused under --strict: config field unk_token_idd: is not known"):
        define_model(LLAMA | {"unk_token_idd": 3}, ledger)


def test_what_has_no_effect_is_noted_with_the_reason_and_strict_accepts_it() -> None:
    ledger = Ledger(strict=True)
    define_model(QWEN2 | {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1}, ledger)
    assert {note.subject for note in ledger.notes} == {"config field sliding_window", "config field max_window_layers"}
    assert all("has no effect: no layer has a window" in note.fact for note in ledger.notes)
    used = Ledger(strict=True)
    define_model(QWEN2 | {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, used)
    assert list(used) == []


def test_an_unknown_model_type_is_a_degradation() -> None:
    ledger = Ledger()
    define_model(LLAMA | {"model_type": "novelty"}, ledger)
    assert ["model_type = 'novelty'" in entry.subject for entry in ledger.degradations] == [True]
    with pytest.raises(ConfigError, match="novelty"):
        define(LLAMA | {"model_type": "novelty"})


def with_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def mean_states(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        states = model.model(torch.tensor([tokens])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(0), dim=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v2"])
def test_an_embedder_that_is_not_causal_sees_the_whole_text_as_in_transformers(tmp_path: Path, family: str) -> None:
    model, tokens = make_model(family), [5, 17, 40, 8, 77, 23, 9]
    save_embedder(model, tmp_path)
    causal = mean_states(model, tokens)
    with_config(tmp_path, is_causal=False)
    model.config.is_causal = False
    expected = mean_states(model, tokens)
    [found] = vectors(open_tiny(tmp_path), [tokens])
    assert float((found - expected).abs().max()) < 1e-5
    assert float(expected @ causal) < 0.99, "the mask matters"


def test_a_model_that_is_not_causal_does_not_generate_and_has_no_windows() -> None:
    with pytest.raises(UnsupportedModelError, match=r"is_causal = False: .* use task embed"):
        define(LLAMA | {"is_causal": False})
    with pytest.raises(UnsupportedModelError, match=r"is_causal = false\) is not supported yet"):
        define_embedder(GEMMA3 | {"is_causal": False}, Ledger())


def tied(*, gemma: bool) -> PreTrainedModel:
    sizes = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(1)
    if gemma:
        return Gemma2ForCausalLM(Gemma2Config(**sizes))
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))


def start(folder: Path) -> None:
    load_runtime(folder, EngineConfig(cache_tokens=64, max_num_seqs=1, max_model_len=32))


def store_head(folder: Path, head: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    if head is not None:
        tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("stated", [True, False], ids=["stated", "by default"])
def test_a_stored_head_beside_a_tied_embedding_must_be_the_embedding(tmp_path: Path, stated: bool) -> None:
    tied(gemma=True).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("tie_word_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(config | ({"tie_word_embeddings": True} if stated else {})))
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    for same in (embedding, embedding.double()):
        store_head(tmp_path, same.clone())
        start(tmp_path)
    other = embedding.clone()
    other[-1, -1] += 1e-6
    for head in (other, torch.zeros(40, 16)):
        store_head(tmp_path, head)
        with pytest.raises(
            CheckpointError, match=r"expected lm_head\.weight in .* to be model\.embed_tokens\.weight again"
        ):
            start(tmp_path)


def test_a_head_that_is_not_tied_must_be_stored(tmp_path: Path) -> None:
    tied(gemma=False).save_pretrained(tmp_path)
    start(tmp_path)
    with_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"expected tensor lm_head\.weight"):
        start(tmp_path)


def num_elements(folder: Path) -> int:
    checkpoint = open_checkpoint(folder, Ledger())
    definition = define_model(checkpoint.config, Ledger())
    groups = group_layers(definition.attention_specs())
    return model_facts(Quantization.DEQUANTISE, checkpoint, definition, groups).weight_elements


def test_a_copy_of_the_embedding_takes_no_memory(tmp_path: Path) -> None:
    model = tied(gemma=False)
    model.save_pretrained(tmp_path)
    before = num_elements(tmp_path)
    store_head(tmp_path, model.state_dict()["model.embed_tokens.weight"].clone())
    assert num_elements(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": 64, "hidden_size": 128}', "the key 'hidden_size' with two values, 64 and 128"),
        ('{"rope_scaling": {"factor": 2, "factor": 4}}', "the key 'factor' with two values"),
        ('{"rms_norm_eps": NaN}', "NaN, which JSON does not have"),
        ('{"rope_theta": -Infinity}', "-Infinity, which JSON does not have"),
    ],
)
def test_json_that_parsers_read_differently_is_refused(tmp_path: Path, text: str, message: str) -> None:
    make_model("llama").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path, Ledger())


def test_a_key_twice_with_one_value_is_accepted(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("{", '{"vocab_size": 101,', 1))
    assert open_checkpoint(tmp_path, Ledger()).config["vocab_size"] == 101
