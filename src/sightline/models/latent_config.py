"""Reading of the config fields of latent attention, which DeepSeek, GLM and hybrids with latent layers name alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sightline.attention.spec import LatentSpec
from sightline.models.attention import LatentAttentionDefinition
from sightline.models.config_reader import MAX_LAYERS, ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import FeedForward
from sightline.models.layer_definition import LayerDefinition
from sightline.models.norms import NormDefinition
from sightline.models.rope_config import DEFAULT_THETA, rotary_spec, yarn_score_scale

INNER_NORMS = NormDefinition(1e-6)
"""The norms of latents and low-rank queries. Their epsilon does not come from the config."""


class LatentDefaults(NamedTuple):
    """Values for fields that a config leaves out."""

    nope_dim: int = 128
    value_dim: int = 128
    query_rank: int = 1536
    norm_epsilon: float = 1e-6


DEEPSEEK = LatentDefaults()


def latent_spec(config: ConfigReader, score_scale: float = 1.0, defaults: LatentDefaults = DEEPSEEK) -> LatentSpec:
    """Reads the sizes of heads and latents. `score_scale` multiplies the usual scale of scores."""
    num_heads = config.count("num_attention_heads", most=MAX_LAYERS)
    config.require("num_key_value_heads", None, num_heads)
    nope_dim = config.count("qk_nope_head_dim", defaults.nope_dim)
    rope_dim = config.count("qk_rope_head_dim", 64)
    config.require("qk_head_dim", None, nope_dim + rope_dim)
    return LatentSpec(
        num_q_heads=num_heads,
        latent_dim=config.count("kv_lora_rank", 512),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=config.count("v_head_dim", defaults.value_dim),
        scale=(nope_dim + rope_dim) ** -0.5 * score_scale,
    )


def latent_attention(
    config: ConfigReader,
    rope: Mapping[str, object],
    *,
    paired_neighbours: bool,
    defaults: LatentDefaults = DEEPSEEK,
) -> LatentAttentionDefinition:
    """Reads the attention of a layer; `rope` is the config's section on the rotation."""
    return LatentAttentionDefinition(
        spec=latent_spec(config, yarn_score_scale(rope), defaults),
        query_rank=config.optional_count("q_lora_rank", absent=defaults.query_rank),
        paired_neighbours=paired_neighbours,
        norms=INNER_NORMS,
        bias=config.boolean("attention_bias", default=False),
    )


def latent_decoder(
    config: ConfigReader,
    attentions: Sequence[LatentAttentionDefinition],
    feed_forwards: Sequence[FeedForward],
    rope: Mapping[str, object],
    *,
    defaults: LatentDefaults = DEEPSEEK,
) -> DecoderDefinition:
    """Reads the rest of a decoder whose layers all have latent attention, with one rotation."""
    config.informational("aux_loss_alpha", "ep_size", "output_router_logits", "router_aux_loss_coef", "seq_aux")
    config.require("hidden_act", "silu")
    config.require("quantization_config", None)
    num_positions = config.count("max_position_embeddings")
    rotary = rotary_spec(rope, attentions[0].spec.rope_dim, DEFAULT_THETA, num_positions)
    return DecoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=num_positions,
        hidden_size=config.count("hidden_size"),
        layers=tuple(
            LayerDefinition(attention, rotary, feed_forward)
            for attention, feed_forward in zip(attentions, feed_forwards, strict=True)
        ),
        norm_epsilon=config.positive("rms_norm_eps", defaults.norm_epsilon),
        tied_embedding=config.boolean("tie_word_embeddings", default=False),
        causal=config.boolean("is_causal", default=True),
    )
