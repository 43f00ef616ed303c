"""GLM 4.5, 4.5 Air, 4.6 and 4.7: heads that are rotated in part, and experts above dense layers."""

from __future__ import annotations

from sightline.models.attention import AttentionTensors
from sightline.models.config_reader import ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.grouped_experts import corrected_routing, expert_layers, read_experts, with_predictors
from sightline.models.norms import NormDefinition
from sightline.models.shared_config import plain_decoder

ROTATED_SHARE = 0.5
"""The default of `partial_rotary_factor`."""


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
