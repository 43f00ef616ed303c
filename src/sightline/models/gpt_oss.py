"""gpt-oss: experts in every layer, attention sinks, a window on every second layer, biases on every projection."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sightline.layers.activation import ClampedSwiglu
from sightline.layers.routing import Share
from sightline.models.attention import AttentionTensors
from sightline.models.config_reader import ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import ExpertFeedForward, ExpertStorage
from sightline.models.shared_config import FULL, SLIDING, layer_kinds, layer_windows, plain_decoder, read_routing

DEFAULT_ROPE: Mapping[str, object] = MappingProxyType(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)
"""Used if the config has no rope section. An empty `rope_parameters` counts as a section and means no scaling."""


def gpt_oss(config: ConfigReader) -> DecoderDefinition:
    """Reads a gpt-oss config."""
    config.informational("initial_context_length", "output_router_logits", "router_aux_loss_coef")
    routing = read_routing(config, Share.OF_CHOSEN, num_experts=128, experts_per_token=4)
    config.require("experts_per_token", None, routing.experts_per_token)
    experts = ExpertFeedForward(
        intermediate_size=config.count("intermediate_size"),
        routing=routing,
        gate=ClampedSwiglu(config.positive("swiglu_alpha", 1.702), config.positive("swiglu_limit", 7.0)),
        storage=ExpertStorage.STACKED,
    )
    config.may_idle("no layer has a window", "sliding_window")
    kinds = layer_kinds(config, lambda index: FULL if index % 2 else SLIDING)
    windows = layer_windows(kinds, config.optional_count("sliding_window", absent=128))
    bias = config.boolean("attention_bias", default=True)
    return plain_decoder(
        config,
        windows,
        [experts] * len(kinds),
        head_dim=64,
        theta=150_000.0,
        rope=DEFAULT_ROPE,
        sinks=True,
        tensors=AttentionTensors(qkv_bias=bias, output_bias=bias),
    )
