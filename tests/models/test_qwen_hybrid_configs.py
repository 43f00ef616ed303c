"""Configs of Qwen3-Next and Qwen3.5 as they are published, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sightline.attention.spec import RecurrentSpec, SoftmaxSpec
from sightline.core.errors import UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import DenseFeedForward, ExpertFeedForward
from sightline.models.loading.opening import open_description
from sightline.models.loading.text_section import with_text_on_top
from sightline.models.registry import define_model
from support.definitions import rotary_of

LINEAR, FULL = "linear_attention", "full_attention"
HEADS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
}
COMMON = {
    **HEADS,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "full_attention_interval": 4,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "use_cache": True,
}
EXPERTS = {
    "moe_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}
NEXT: dict[str, Any] = {
    **COMMON,
    **EXPERTS,
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "intermediate_size": 5120,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
TEXT: dict[str, Any] = {
    **COMMON,
    "attn_output_gate": True,
    "eos_token_id": 248044,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 6,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_hidden_layers": 24,
    "output_gate_type": "swish",
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}
OUTER: dict[str, Any] = {
    "image_token_id": 248056,
    "language_model_only": False,
    "tie_word_embeddings": True,
    "video_token_id": 248057,
    "vision_config": {"depth": 12, "hidden_size": 768, "model_type": "qwen3_5_vision"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
DENSE: dict[str, Any] = {
    **OUTER,
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {**TEXT, "intermediate_size": 3584, "model_type": "qwen3_5_text"},
}
MIXTURE: dict[str, Any] = {
    **OUTER,
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {**TEXT, **EXPERTS, "model_type": "qwen3_5_moe_text"},
    "tie_word_embeddings": False,
}


def define(config: dict[str, Any]) -> tuple[DecoderDefinition, Ledger]:
    ledger = Ledger()
    return define_model(with_text_on_top(config), ledger), ledger


def test_qwen3_next_gives_its_layers() -> None:
    definition, ledger = define(NEXT)
    delta = RecurrentSpec(32, 16, 128, 128, 128**-0.5, True, False, True, 4)
    attention = SoftmaxSpec(16, 2, 256, 256**-0.5)
    assert definition.attention_specs() == (delta, delta, delta, attention) * 12
    assert [layer.rotary is None for layer in definition.layers[:4]] == [True, True, True, False]
    rotary = rotary_of(definition.layers[3])
    assert (rotary.head_dim, rotary.rotated_dim, rotary.theta) == (256, 64, 1e7)
    experts = definition.layers[0].feed_forward
    assert isinstance(experts, ExpertFeedForward)
    assert (experts.routing.num_experts, experts.routing.experts_per_token) == (512, 10)
    assert experts.shared_is_gated
    assert definition.norm_offset == 1.0
    assert ledger.degradations == ()


@pytest.mark.parametrize(("config", "feed_forward"), [(DENSE, DenseFeedForward), (MIXTURE, ExpertFeedForward)])
def test_qwen3_5_with_vision_gives_its_text_layers(config: dict[str, Any], feed_forward: type) -> None:
    definition, ledger = define(config)
    assert definition.tied_embedding is config["tie_word_embeddings"]
    assert len(definition.layers) == 24
    assert all(isinstance(layer.feed_forward, feed_forward) for layer in definition.layers)
    assert rotary_of(definition.layers[3]).rotated_dim == 64
    assert ledger.degradations == ()
    assert {note.subject for note in ledger.notes} == {
        "config field rope_parameters.mrope_interleaved",
        "config field rope_parameters.mrope_section",
        "config field full_attention_interval",
    }


def test_a_config_alone_tells_what_the_text_network_needs(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DENSE))
    checkpoint = open_description(path, Ledger())
    assert checkpoint.config["hidden_size"] == 2048
    assert "text_config" not in checkpoint.config


def test_the_text_section_of_other_models_stays_where_it_is() -> None:
    config = {"model_type": "gemma3", "text_config": {"hidden_size": 3}}
    assert with_text_on_top(config) == config


def test_the_output_projection_is_tied_as_the_whole_model_says() -> None:
    """The text network has none: transformers saves its section with the default."""
    section = {**DENSE["text_config"], "tie_word_embeddings": False}
    assert define({**DENSE, "text_config": section})[0].tied_embedding
    alone = {name: value for name, value in DENSE.items() if name != "tie_word_embeddings"}
    assert not define({**alone, "text_config": section})[0].tied_embedding
    assert define({**alone, "text_config": {**section, "tie_word_embeddings": True}})[0].tied_embedding


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("attn_output_gate", False, "attn_output_gate"),
        ("mamba_ssm_dtype", "bfloat16", "mamba_ssm_dtype"),
        ("output_gate_type", "sigmoid", "output_gate_type"),
        ("hidden_act", "gelu", "hidden_act"),
        ("layer_types", [LINEAR] * 24, "expected at least one layer of kind full_attention, got 24"),
        ("layer_types", ["mamba"] * 24, "expected layer_types of 24 entries"),
        ("linear_num_value_heads", 24, "expected heads in whole groups, got 24 heads on 16 key heads"),
        ("linear_conv_kernel_dim", 1, "expected a convolution over at least 2 tokens"),
    ],
)
def test_other_networks_are_refused(field: str, value: object, message: str) -> None:
    section = {**DENSE["text_config"], field: value}
    with pytest.raises(UnsupportedModelError, match=message):
        define({**DENSE, "text_config": section})


def test_experts_are_in_every_layer_of_qwen3_5() -> None:
    for field, value in (("mlp_only_layers", [1]), ("decoder_sparse_step", 2), ("norm_topk_prob", False)):
        with pytest.raises(UnsupportedModelError, match=field):
            define({**MIXTURE, "text_config": {**MIXTURE["text_config"], field: value}})


def test_an_architecture_of_another_type_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="expected architectures and model_type of one family"):
        define({**DENSE, "architectures": ["Qwen3_5MoeForConditionalGeneration"]})
