"""Gemma 2 and Gemma 3 (text): layers with and without a sliding window, norms before and after every sub-layer.

Gemma 2 soft-caps its scores. Gemma 3 normalises queries and keys, and each kind of layer has its own rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sightline.attention.spec import SoftmaxSpec
from sightline.core.errors import UnsupportedModelError
from sightline.layers.activation import Activation
from sightline.layers.rotary import RotarySpec
from sightline.models.attention import AttentionTensors, SoftmaxAttentionDefinition
from sightline.models.config_reader import ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import DenseFeedForward
from sightline.models.layer_definition import LayerDefinition
from sightline.models.norms import NormDefinition
from sightline.models.rope_config import rotary_spec, state_once
from sightline.models.shared_config import FULL, ROPE_IDLE, SLIDING, layer_kinds, layer_windows, one_rotary


def gemma2(config: ConfigReader) -> DecoderDefinition:
    """Reads a Gemma 2 config. Every second layer has full attention."""
    rotary = one_rotary(config, _head_dim(config), config.count("max_position_embeddings"))
    kinds = layer_kinds(config, lambda index: FULL if index % 2 else SLIDING)
    config.may_idle("no layer has a window", "sliding_window")
    window = config.optional_count("sliding_window", absent=4096)
    config.require("sliding_window_size", None, window)
    softcap = config.optional_positive("attn_logit_softcapping", absent=50.0)
    definition = _gemma(config, layer_windows(kinds, window), [rotary] * len(kinds), softcap)
    return replace(definition, logit_softcap=config.optional_positive("final_logit_softcapping", absent=30.0))


def gemma3(config: ConfigReader) -> DecoderDefinition:
    """Reads a Gemma 3 text config. By default every sixth layer has full attention."""
    config.require("attn_logit_softcapping", None)
    config.may_idle("layer_types lists the layers that have a window", "sliding_window_pattern")
    config.may_idle("no layer has a window", "sliding_window")
    period = config.count("sliding_window_pattern", 6)
    kinds = layer_kinds(config, lambda index: SLIDING if (index + 1) % period else FULL)
    rotaries = _rotaries(config, _head_dim(config))
    windows = layer_windows(kinds, config.count("sliding_window", 4096))
    definition = _gemma(config, windows, [rotaries[kind] for kind in kinds], softcap=None, qk_norm=True)
    return replace(definition, logit_softcap=config.optional_positive("final_logit_softcapping"))


def _gemma(
    config: ConfigReader,
    windows: Sequence[int | None],
    rotaries: Sequence[RotarySpec],
    softcap: float | None,
    *,
    qk_norm: bool = False,
) -> DecoderDefinition:
    config.require("hidden_activation", "gelu_pytorch_tanh")
    config.require("hidden_act", "gelu_pytorch_tanh")
    config.require("use_bidirectional_attention", None, False)
    config.require("quantization_config", None)
    hidden_size, bias = config.count("hidden_size"), config.boolean("attention_bias", default=False)
    num_heads, num_kv_heads = config.heads()
    scale = config.positive("query_pre_attn_scalar", 256) ** -0.5
    feed_forward = DenseFeedForward(config.count("intermediate_size"), Activation.GELU_TANH)
    norms = NormDefinition(config.positive("rms_norm_eps", 1e-6), offset=1.0)
    tensors = AttentionTensors(norms if qk_norm else None, qkv_bias=bias, output_bias=bias)
    specs = (SoftmaxSpec(num_heads, num_kv_heads, _head_dim(config), scale, window, softcap) for window in windows)
    return DecoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=config.count("max_position_embeddings"),
        hidden_size=hidden_size,
        layers=tuple(
            LayerDefinition(SoftmaxAttentionDefinition(spec, tensors), rotary, feed_forward)
            for spec, rotary in zip(specs, rotaries, strict=True)
        ),
        norm_epsilon=norms.epsilon,
        tied_embedding=config.boolean("tie_word_embeddings", default=True),
        norm_offset=norms.offset,
        embedding_scale=hidden_size**0.5,
        sandwich_norms=True,
        causal=config.boolean("is_causal", default=True),
    )


def _head_dim(config: ConfigReader) -> int:
    return config.count("head_dim", 256)


def _rotaries(config: ConfigReader, head_dim: int) -> dict[str, RotarySpec]:
    """The rotary embedding of each kind of layer, from the newer or the older form of the config."""
    config.may_idle(ROPE_IDLE, "rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")
    by_kind = config.optional_section("rope_parameters") or {}
    if set(by_kind) - {FULL, SLIDING}:
        raise UnsupportedModelError(
            f"gemma3: expected rope_parameters for {FULL} and {SLIDING}, got {', '.join(sorted(by_kind))}"
        )
    sections = {kind: _section(by_kind, kind) for kind in (FULL, SLIDING)}
    for key, value in (config.optional_section("rope_scaling") or {}).items():
        state_once(sections[FULL], "rope_type" if key == "type" else key, value, f"rope_scaling.{key}")
    thetas = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}
    specs = {}
    for kind, section in sections.items():
        outside, default = thetas[kind]
        if outside in config:
            state_once(section, "rope_theta", config.positive(outside), outside)
        if section.get("truncate", True) is not True:
            raise UnsupportedModelError(
                f"gemma3: truncate = {section['truncate']!r} for one kind of layers is not supported: transformers "
                "does not apply it"
            )
        specs[kind] = rotary_spec(section, head_dim, default, config.count("max_position_embeddings"))
    return specs


def _section(by_kind: Mapping[str, object], kind: str) -> dict[str, object]:
    """A copy of the rope parameters of one kind of layer; empty if they are null or missing."""
    section = by_kind.get(kind)
    if section is not None and not isinstance(section, Mapping):
        raise UnsupportedModelError(f"gemma3: expected rope_parameters.{kind} to be an object, got {section!r}")
    return {} if section is None else dict(section)
