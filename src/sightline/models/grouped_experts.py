"""Reading of the config fields of experts in groups, which DeepSeek and GLM name alike."""

from __future__ import annotations

from dataclasses import replace

from sightline.core.errors import UnsupportedModelError
from sightline.layers.activation import Activation
from sightline.layers.routing import Groups, Routing, Score, Share
from sightline.models.attention import AttentionDefinition
from sightline.models.config_reader import MAX_LAYERS, ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import DenseFeedForward, ExpertFeedForward, ExpertStorage, FeedForward
from sightline.models.shared_config import SAME_EXPERT_LAYERS, dense_layers

DENSE, SPARSE = "dense", "sparse"
"""The values of `mlp_layer_types`."""
CORRECTED = "noaux_tc"
"""The value of `topk_method` for experts that are chosen with a learned correction."""
EXPERT_FIELDS = """
    moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok
    routed_scaling_factor topk_group
"""


def corrected_routing(config: ConfigReader, *, num_groups: int, groups_per_token: int, scale: float) -> Routing:
    """Reads a routing by sigmoids with a learned correction. The numbers are defaults."""
    config.require("scoring_func", None, "sigmoid")
    config.require("topk_method", None, CORRECTED)
    share = Share.OF_CHOSEN if config.boolean("norm_topk_prob", default=True) else Share.OF_ALL
    limits = config.count("n_group", num_groups), config.count("topk_group", groups_per_token)
    groups = expert_groups(*limits, ranked_by=2)
    routing = grouped_routing(config, share, Score.SIGMOID, groups, experts_per_token=8, scale=scale)
    return replace(routing, corrected=True)


def grouped_routing(
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


def expert_groups(num_groups: int | None, groups_per_token: int | None, ranked_by: int) -> Groups | None:
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


def read_experts(config: ConfigReader, routing: Routing, *, num_shared: int) -> ExpertFeedForward:
    """Reads the experts of a layer. `num_shared` is a default."""
    config.may_idle("no layer has experts", *EXPERT_FIELDS.split())
    size = config.count("moe_intermediate_size")
    shared = config.optional_count("n_shared_experts", absent=num_shared)
    return ExpertFeedForward(
        intermediate_size=size,
        routing=routing,
        gate=Activation.SILU,
        storage=ExpertStorage.SEPARATE,
        shared=None if shared is None else DenseFeedForward(shared * size, Activation.SILU),
    )


def expert_layers(config: ConfigReader, experts: ExpertFeedForward, *, first: int) -> tuple[FeedForward, ...]:
    """The feed-forwards: experts in every `moe_layer_freq`-th layer from `first_k_dense_replace` on.

    `first` is the default of the latter.
    """
    config.may_idle("every layer has experts", "intermediate_size")
    config.may_idle(SAME_EXPERT_LAYERS, "first_k_dense_replace", "moe_layer_freq")
    first, step = config.count("first_k_dense_replace", first, least=0), config.count("moe_layer_freq", 1)
    return tuple(
        experts if index >= first and index % step == 0 else dense for index, dense in enumerate(dense_layers(config))
    )


def typed_expert_layers(config: ConfigReader, experts: ExpertFeedForward, *, first: int) -> tuple[FeedForward, ...]:
    """The feed-forwards: experts where `mlp_layer_types` says sparse, or else from `first_k_dense_replace` on.

    `first` is the default of the latter.
    """
    config.may_idle("every layer has experts", "intermediate_size")
    config.may_idle(f"{SAME_EXPERT_LAYERS}, or mlp_layer_types lists them", "first_k_dense_replace")
    listed = config.optional_kinds("mlp_layer_types", (DENSE, SPARSE))
    first = config.count("first_k_dense_replace", first, least=0)
    return tuple(
        experts if (index >= first if listed is None else listed[index] == SPARSE) else dense
        for index, dense in enumerate(dense_layers(config))
    )


def with_predictors(
    config: ConfigReader,
    definition: DecoderDefinition,
    experts: ExpertFeedForward,
    *,
    attention: AttentionDefinition | None = None,
) -> DecoderDefinition:
    """The definition with its layers for multi-token prediction, which have experts even if no other layer has.

    Their attention is that of the last layer, unless it is given.
    """
    count = config.count("num_nextn_predict_layers", 0, least=0, most=MAX_LAYERS)
    last = definition.layers[-1]
    layer = replace(last, feed_forward=experts, attention=attention or last.attention)
    return replace(definition, predictors=(layer,) * count)
