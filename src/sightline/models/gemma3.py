"""Gemma 3, text: windowed layers with a full one in between, each kind with its own rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping

from sightline.attention.spec import SoftmaxSpec
from sightline.core.errors import UnsupportedModelError
from sightline.layers.mlp import Activation
from sightline.layers.rotary import RotarySpec
from sightline.models.config_reader import ConfigReader
from sightline.models.decoder import DecoderDefinition, LayerDefinition
from sightline.models.rope_config import rotary_spec

FULL, SLIDING = "full_attention", "sliding_attention"


def gemma3(config: ConfigReader) -> DecoderDefinition:
    """What a Gemma 3 text config describes."""
    config.require("hidden_activation", "gelu_pytorch_tanh")
    config.require("hidden_act", "gelu_pytorch_tanh")
    config.require("attn_logit_softcapping", None)
    config.require("use_bidirectional_attention", None, False)
    config.require("quantization_config", None)
    hidden_size, head_dim = config.count("hidden_size"), config.count("head_dim", 256)
    rotaries = _rotaries(config, head_dim)
    window = config.count("sliding_window", 4096)
    scale = config.positive("query_pre_attn_scalar", 256) ** -0.5
    num_heads, num_kv_heads = config.heads()
    layers = tuple(
        LayerDefinition(
            SoftmaxSpec(num_heads, num_kv_heads, head_dim, scale, window=window if kind == SLIDING else None),
            rotaries[kind],
        )
        for kind in _layer_kinds(config)
    )
    return DecoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=config.count("max_position_embeddings"),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        layers=layers,
        norm_epsilon=config.positive("rms_norm_eps", 1e-6),
        activation=Activation.GELU_TANH,
        tied_embedding=config.boolean("tie_word_embeddings", default=True),
        norm_offset=1.0,
        embedding_scale=hidden_size**0.5,
        qk_norm=True,
        sandwich_norms=True,
        attention_bias=config.boolean("attention_bias", default=False),
        logit_softcap=config.optional_positive("final_logit_softcapping"),
    )


def _layer_kinds(config: ConfigReader) -> tuple[str, ...]:
    """One of `FULL` and `SLIDING` for each layer, from the list or from the period."""
    num_layers = config.num_layers()
    period = config.count("sliding_window_pattern", 6)
    listed = config.optional_list("layer_types")
    if listed is None:
        return tuple(SLIDING if (index + 1) % period else FULL for index in range(num_layers))
    kinds = tuple(str(kind) for kind in listed)
    if len(kinds) != num_layers or set(kinds) - {FULL, SLIDING}:
        raise UnsupportedModelError(
            f"gemma3: expected layer_types of {num_layers} entries out of {FULL} and {SLIDING}, got {kinds}"
        )
    return kinds


def _rotaries(config: ConfigReader, head_dim: int) -> dict[str, RotarySpec]:
    """The rotary embedding of each kind of layer, in the newer or the older form of the config."""
    full_theta = config.positive("rope_theta", 1_000_000.0)
    sliding_theta = config.positive("rope_local_base_freq", 10_000.0)
    by_kind = config.optional_section("rope_parameters") or {}
    if set(by_kind) - {FULL, SLIDING}:
        raise UnsupportedModelError(
            f"gemma3: expected rope_parameters for {FULL} and {SLIDING}, got {', '.join(sorted(by_kind))}"
        )
    sections = {
        FULL: by_kind.get(FULL, config.optional_section("rope_scaling") or {}),
        SLIDING: by_kind.get(SLIDING, {}),
    }
    thetas = {FULL: full_theta, SLIDING: sliding_theta}
    specs = {}
    for kind, section in sections.items():
        if not isinstance(section, Mapping):
            raise UnsupportedModelError(f"gemma3: expected rope_parameters.{kind} to be an object, got {section!r}")
        specs[kind] = rotary_spec(section, head_dim, thetas[kind])
    return specs
