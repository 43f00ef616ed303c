"""DeepSeek V2, V3 and R1, and Kimi K2, whose config names V3: latent attention, and experts above dense layers.

V2 routes by softmax, V3 by sigmoid with a learned correction. Both may limit a token to a few groups of experts.
"""

from __future__ import annotations

from dataclasses import replace

from sightline.attention.spec import LatentSpec
from sightline.core.errors import UnsupportedModelError
from sightline.layers.activation import Activation
from sightline.layers.routing import Groups, Routing, Score, Share
from sightline.models.attention import LatentAttentionDefinition
from sightline.models.config_reader import MAX_LAYERS, ConfigReader
from sightline.models.decoder import DecoderDefinition, LayerDefinition
from sightline.models.feed_forward import DenseFeedForward, ExpertFeedForward, ExpertStorage, FeedForward
from sightline.models.norms import NormDefinition
from sightline.models.rope_config import DEFAULT_THETA, rotary_spec, yarn_score_scale
from sightline.models.shared_config import SAME_EXPERT_LAYERS, dense_layers, rope_section

INNER_NORMS = NormDefinition(1e-6)
"""The norms of latents and low-rank queries. Their epsilon does not come from the config."""
GREEDY, GROUP_LIMITED, CORRECTED = "greedy", "group_limited_greedy", "noaux_tc"
"""The values of `topk_method`, which says how experts are chosen."""
EXPERT_FIELDS = """
    moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok
    routed_scaling_factor topk_group
"""


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
    groups = _groups(num_groups, groups_per_token, ranked_by=1) if method == GROUP_LIMITED else None
    routing = _routing(config, Share.OF_ALL, Score.SOFTMAX, groups, experts_per_token=None, scale=1.0)
    return _deepseek(
        config, _feed_forwards(config, routing, first_expert_layer=0, num_shared=2), paired_neighbours=True
    )


def deepseek_v3(config: ConfigReader) -> DecoderDefinition:
    """Reads a config of DeepSeek V3, R1 or Kimi K2."""
    config.require("scoring_func", None, "sigmoid")
    config.require("topk_method", None, CORRECTED)
    share = Share.OF_CHOSEN if config.boolean("norm_topk_prob", default=True) else Share.OF_ALL
    groups = _groups(config.count("n_group", 8), config.count("topk_group", 4), ranked_by=2)
    routing = _routing(config, share, Score.SIGMOID, groups, experts_per_token=8, scale=2.5)
    feed_forwards = _feed_forwards(config, replace(routing, corrected=True), first_expert_layer=3, num_shared=1)
    definition = _deepseek(config, feed_forwards, paired_neighbours=config.boolean("rope_interleave", default=True))
    return replace(definition, num_predictors=config.count("num_nextn_predict_layers", 0, least=0, most=MAX_LAYERS))


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


def _routing(
    config: ConfigReader,
    share: Share,
    score: Score,
    groups: Groups | None,
    *,
    experts_per_token: int | None,
    scale: float,
) -> Routing:
    """Reads the routing. `experts_per_token` and `scale` are defaults."""
    num_experts = config.count("n_routed_experts", most=MAX_LAYERS)
    experts_per_token = config.count("num_experts_per_tok", experts_per_token)
    scale = config.positive("routed_scaling_factor", scale)
    try:
        return Routing(num_experts, experts_per_token, share, score, groups, scale=scale)
    except ValueError as error:
        raise UnsupportedModelError(f"experts: {error}") from error


def _groups(num_groups: int | None, groups_per_token: int | None, ranked_by: int) -> Groups | None:
    """The limit on groups of experts; None if a token may use all groups."""
    if num_groups is None or groups_per_token is None:
        raise UnsupportedModelError(
            f"expected n_group and topk_group if groups of experts are limited, got {num_groups} and {groups_per_token}"
        )
    if num_groups == groups_per_token:
        return None
    try:
        return Groups(num_groups, groups_per_token, ranked_by)
    except ValueError as error:
        raise UnsupportedModelError(f"experts: {error}") from error


def _feed_forwards(
    config: ConfigReader, routing: Routing, *, first_expert_layer: int, num_shared: int
) -> tuple[FeedForward, ...]:
    """The feed-forwards: experts in every `moe_layer_freq`-th layer from `first_k_dense_replace` on.

    `first_expert_layer` and `num_shared` are defaults.
    """
    config.may_idle("every layer has experts", "intermediate_size")
    config.may_idle("no layer has experts", *EXPERT_FIELDS.split())
    config.may_idle(SAME_EXPERT_LAYERS, "first_k_dense_replace", "moe_layer_freq")
    size = config.count("moe_intermediate_size")
    shared = config.optional_count("n_shared_experts", absent=num_shared)
    experts = ExpertFeedForward(
        intermediate_size=size,
        routing=routing,
        gate=Activation.SILU,
        storage=ExpertStorage.SEPARATE,
        shared=None if shared is None else DenseFeedForward(shared * size, Activation.SILU),
    )
    first, step = config.count("first_k_dense_replace", first_expert_layer, least=0), config.count("moe_layer_freq", 1)
    return tuple(
        experts if index >= first and index % step == 0 else dense for index, dense in enumerate(dense_layers(config))
    )
