"""DeepSeek V2, V3, R1 and V3.2, and Kimi K2, whose config names V3: latent attention, and experts above dense layers.

V2 routes by softmax, V3 by sigmoid with a learned correction. Both may limit a token to a few groups of experts. V3.2
is V3 with an indexer in each layer.
"""

from __future__ import annotations

from sightline.layers.routing import Score, Share
from sightline.models.config_reader import ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import FeedForward
from sightline.models.grouped_experts import (
    corrected_routing,
    expert_groups,
    expert_layers,
    grouped_routing,
    read_experts,
    with_predictors,
)
from sightline.models.latent_config import DEEPSEEK, latent_attention, latent_decoder
from sightline.models.shared_config import rope_section
from sightline.models.sparse_config import FULL, SparseDefaults, sparse_decoder

GREEDY, GROUP_LIMITED = "greedy", "group_limited_greedy"
"""The values of `topk_method`, which says how experts of V2 are chosen."""
_SPARSE = SparseDefaults(DEEPSEEK, index_heads=64, paired_neighbours=False, num_groups=8, groups_per_token=4)


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
    return _decoder(config, expert_layers(config, experts, first=0), paired_neighbours=True)


def deepseek_v3(config: ConfigReader) -> DecoderDefinition:
    """Reads a config of DeepSeek V3, R1 or Kimi K2."""
    routing = corrected_routing(config, num_groups=8, groups_per_token=4, scale=2.5)
    experts = read_experts(config, routing, num_shared=1)
    paired_neighbours = config.boolean("rope_interleave", default=True)
    definition = _decoder(config, expert_layers(config, experts, first=3), paired_neighbours=paired_neighbours)
    return with_predictors(config, definition, experts)


def deepseek_v32(config: ConfigReader) -> DecoderDefinition:
    """Reads a config of DeepSeek V3.2."""
    config.require("head_dim", None, config.count("qk_rope_head_dim", 64))
    return sparse_decoder(config, [FULL] * config.num_layers(), _SPARSE)


def _decoder(
    config: ConfigReader, feed_forwards: tuple[FeedForward, ...], *, paired_neighbours: bool
) -> DecoderDefinition:
    rope = rope_section(config)
    attention = latent_attention(config, rope, paired_neighbours=paired_neighbours)
    config.require("head_dim", None, attention.spec.rope_dim)
    return latent_decoder(config, [attention] * len(feed_forwards), feed_forwards, rope)
