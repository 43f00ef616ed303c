"""GLM 4.5 to 4.7: heads that are rotated in part, and experts above dense layers. GLM-5: DeepSeek V3.2 whose layers
may share indexers."""

from __future__ import annotations

from sightline.models.attention import AttentionTensors
from sightline.models.config_reader import ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.grouped_experts import corrected_routing, expert_layers, read_experts, with_predictors
from sightline.models.latent_config import LatentDefaults
from sightline.models.norms import NormDefinition
from sightline.models.shared_config import plain_decoder
from sightline.models.sparse_config import SparseDefaults, indexer_kinds, sparse_decoder

ROTATED_SHARE = 0.5
"""The default of `partial_rotary_factor`."""
_SPARSE = SparseDefaults(
    LatentDefaults(nope_dim=192, value_dim=256, query_rank=2048, norm_epsilon=1e-5),
    index_heads=32,
    paired_neighbours=True,
    num_groups=1,
    groups_per_token=1,
)
_HEAD_PARTS = {"rope": 64, "nope": _SPARSE.latent.nope_dim}


def glm4_moe(config: ConfigReader) -> DecoderDefinition:
    """Reads a config of GLM 4.5 to 4.7 with experts."""
    config.informational("output_router_logits", "router_aux_loss_coef")
    config.require("moe_layer_freq", None, 1)
    routing = corrected_routing(config, num_groups=1, groups_per_token=1, scale=1.0)
    experts = read_experts(config, routing, num_shared=1)
    feed_forwards = expert_layers(config, experts, first=1)
    norm = NormDefinition(config.positive("rms_norm_eps")) if config.boolean("use_qk_norm", default=False) else None
    tensors = AttentionTensors(norm, qkv_bias=config.boolean("attention_bias", default=False))
    windows = [None] * len(feed_forwards)
    definition = plain_decoder(config, windows, feed_forwards, rotated_share=ROTATED_SHARE, tensors=tensors)
    return with_predictors(config, definition, experts)


def glm_moe_dsa(config: ConfigReader) -> DecoderDefinition:
    """Reads a config of GLM-5 to 5.2."""
    # Which drafters may reuse a choice: it changes guesses, not answers. Ours choose anew.
    config.informational("index_share_for_mtp_iteration")
    # Published configs have the size of one of the two parts of a head here, which no network reads.
    config.require("head_dim", None, *(config.count(f"qk_{part}_head_dim", size) for part, size in _HEAD_PARTS.items()))
    return sparse_decoder(config, indexer_kinds(config), _SPARSE)
