"""Llama and the models that share its config: SmolLM2, TinyLlama, Llama 3."""

from __future__ import annotations

from sightline.attention.spec import SoftmaxSpec
from sightline.layers.mlp import Activation
from sightline.models.config_reader import ConfigReader
from sightline.models.decoder import DecoderDefinition, LayerDefinition
from sightline.models.rope_config import DEFAULT_THETA, rotary_spec, with_frequency_factors


def llama(config: ConfigReader) -> DecoderDefinition:
    """What a Llama config describes."""
    config.require("hidden_act", "silu")
    config.require("quantization_config", None)
    config.require("rope_interleaved", None, False)
    hidden_size = config.count("hidden_size")
    num_heads, num_kv_heads = config.heads()
    head_dim = config.count("head_dim", hidden_size // num_heads)
    theta = config.positive("rope_theta", DEFAULT_THETA)
    section = config.optional_section("rope_parameters") or config.optional_section("rope_scaling") or {}
    rotary = with_frequency_factors(
        rotary_spec(section, head_dim, theta), config.optional_list("rope_frequency_factors")
    )
    spec = SoftmaxSpec(num_q_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5)
    return DecoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=config.count("max_position_embeddings"),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        layers=(LayerDefinition(spec, rotary),) * config.num_layers(),
        norm_epsilon=config.positive("rms_norm_eps"),
        activation=Activation.SILU,
        tied_embedding=config.boolean("tie_word_embeddings", default=False),
        attention_bias=config.boolean("attention_bias", default=False),
        mlp_bias=config.boolean("mlp_bias", default=False),
    )
