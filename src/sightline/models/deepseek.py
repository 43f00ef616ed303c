"""DeepSeek V2, V3 and R1, and Kimi K2, whose config names V3: latent attention, and experts above dense layers.

V2 routes by softmax, V3 by sigmoid with a learned correction. Both may limit a token to a few groups of experts.
"""

from __future__ import annotations

from sightline.attention.spec import LatentSpec
from sightline.layers.routing import Score, Share
from sightline.models.attention import LatentAttentionDefinition
from sightline.models.config_reader import MAX_LAYERS, ConfigReader
from sightline.models.decoder import DecoderDefinition, LayerDefinition
from sightline.models.feed_forward import FeedForward
from sightline.models.grouped_experts import (
    corrected_routing,
    expert_groups,
    expert_layers,
    grouped_routing,
    read_experts,
    with_predictors,
)
from sightline.models.norms import NormDefinition
from sightline.models.rope_config import DEFAULT_THETA, rotary_spec, yarn_score_scale
from sightline.models.shared_config import rope_section

INNER_NORMS = NormDefinition(1e-6)
"""The norms of latents and low-rank queries. Their epsilon does not come from the config."""
GREEDY, GROUP_LIMITED = "greedy", "group_limited_greedy"
"""The values of `topk_method`, which says how experts of V2 are chosen."""


def deepseek_v2(config: ConfigReader) -> DecoderDefinition:
    """Reads a config of DeepSeek V2 or V2-Lite."""
    config.require("scoring_func", None, "softmax")
    config.require("rope_interleave", None, True)
    config.require("mlp_bias", None, False)
    # Implementations disagree on whether the scaling factor then applies; no published model sets it.
    config.require("norm_topk_prob", None, False)
    config.may_idle("topk_method is greedy", "n_group", "topk_group")
    config.may_idle("there is one group of experts, or a token may use all of them", "topk_method")
    method = config.choice("topk_method", (GREEDY, GROUP_LIMITED), GREEDY)
    num_groups, groups_per_token = config.optional_count("n_group"), config.optional_count("topk_group")
    groups = expert_groups(num_groups, groups_per_token, ranked_by=1) if method == GROUP_LIMITED else None
    routing = grouped_routing(config, Share.OF_ALL, Score.SOFTMAX, groups, experts_per_token=None, scale=1.0)
    experts = read_experts(config, routing, num_shared=2)
    return _deepseek(config, expert_layers(config, experts, first=0), paired_neighbours=True)


def deepseek_v3(config: ConfigReader) -> DecoderDefinition:
    """Reads a config of DeepSeek V3, R1 or Kimi K2."""
    routing = corrected_routing(config, num_groups=8, groups_per_token=4, scale=2.5)
    experts = read_experts(config, routing, num_shared=1)
    paired_neighbours = config.boolean("rope_interleave", default=True)
    definition = _deepseek(config, expert_layers(config, experts, first=3), paired_neighbours=paired_neighbours)
    return with_predictors(config, definition, experts)


def _deepseek(
    config: ConfigReader, feed_forwards: tuple[FeedForward, ...], *, paired_neighbours: bool
) -> DecoderDefinition:
    config.informational("aux_loss_alpha", "ep_size", "output_router_logits", "router_aux_loss_coef", "seq_aux")
    config.require("hidden_act", "silu")
    config.require("quantization_config", None)
    num_heads = config.count("num_attention_heads", most=MAX_LAYERS)
    num_positions = config.count("max_position_embeddings")
    config.require("num_key_value_heads", None, num_heads)
    nope_dim, rope_dim = config.count("qk_nope_head_dim", 128), config.count("qk_rope_head_dim", 64)
    config.require("qk_head_dim", None, nope_dim + rope_dim)
    config.require("head_dim", None, rope_dim)
    rope = rope_section(config)
    attention = LatentAttentionDefinition(
        spec=LatentSpec(
            num_q_heads=num_heads,
            latent_dim=config.count("kv_lora_rank", 512),
            rope_dim=rope_dim,
            nope_dim=nope_dim,
            value_dim=config.count("v_head_dim", 128),
            scale=(nope_dim + rope_dim) ** -0.5 * yarn_score_scale(rope),
        ),
        query_rank=config.optional_count("q_lora_rank", absent=1536),
        paired_neighbours=paired_neighbours,
        norms=INNER_NORMS,
        bias=config.boolean("attention_bias", default=False),
    )
    rotary = rotary_spec(rope, rope_dim, DEFAULT_THETA, num_positions)
    return DecoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=num_positions,
        hidden_size=config.count("hidden_size"),
        layers=tuple(LayerDefinition(attention, rotary, feed_forward) for feed_forward in feed_forwards),
        norm_epsilon=config.positive("rms_norm_eps", 1e-6),
        tied_embedding=config.boolean("tie_word_embeddings", default=False),
        causal=config.boolean("is_causal", default=True),
    )
