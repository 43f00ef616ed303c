"""Qwen 2 (biases on queries, keys and values), Qwen 3 (norms on queries and keys) and Qwen 3 with experts."""

from __future__ import annotations

from sightline.layers.activation import Activation
from sightline.layers.routing import Share
from sightline.models.attention import AttentionTensors
from sightline.models.config_reader import ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import ExpertFeedForward, ExpertStorage, FeedForward
from sightline.models.norms import NormDefinition
from sightline.models.shared_config import (
    FULL,
    SAME_EXPERT_LAYERS,
    SLIDING,
    dense_layers,
    layer_kinds,
    layer_windows,
    plain_decoder,
    read_routing,
)

_EXPERT_FIELDS = "moe_intermediate_size num_experts num_local_experts num_experts_per_tok norm_topk_prob"


def qwen2(config: ConfigReader) -> DecoderDefinition:
    """Reads a Qwen 2 or 2.5 config."""
    config.require("use_mrope", None, False)
    tensors = AttentionTensors(qkv_bias=True)
    return plain_decoder(config, _upper_windows(config), dense_layers(config), tensors=tensors)


def qwen3(config: ConfigReader) -> DecoderDefinition:
    """Reads a Qwen 3 config."""
    tensors = _with_norms(config)
    return plain_decoder(config, _upper_windows(config), dense_layers(config), head_dim=128, tensors=tensors)


def qwen3_moe(config: ConfigReader) -> DecoderDefinition:
    """Reads a config of Qwen 3 with experts. If there is a sliding window, every layer has it."""
    config.informational("output_router_logits", "router_aux_loss_coef")
    config.may_idle("if there is a sliding window, every layer has it", "max_window_layers")
    config.require("layer_types", None)
    share = Share.OF_CHOSEN if config.boolean("norm_topk_prob", default=False) else Share.OF_ALL
    experts = ExpertFeedForward(
        intermediate_size=config.count("moe_intermediate_size", 768),
        routing=read_routing(config, share, num_experts=128, experts_per_token=8),
        gate=Activation.SILU,
        storage=ExpertStorage.SEPARATE,
    )
    feed_forwards = expert_layers(config, experts)
    windows = [_window(config)] * len(feed_forwards)
    return plain_decoder(config, windows, feed_forwards, tensors=_with_norms(config))


def _with_norms(config: ConfigReader) -> AttentionTensors:
    bias = config.boolean("attention_bias", default=False)
    return AttentionTensors(NormDefinition(config.positive("rms_norm_eps")), qkv_bias=bias, output_bias=bias)


def _window(config: ConfigReader) -> int | None:
    """The sliding window, if `use_sliding_window` switches it on."""
    config.may_idle("no layer has a window", "sliding_window", "use_sliding_window")
    window = config.optional_count("sliding_window", absent=4096)
    return window if config.boolean("use_sliding_window", default=False) else None


def _upper_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """The window of each layer: layers from `max_window_layers` on have it, unless the config lists the kinds."""
    config.may_idle("no layer has a window, or layer_types lists those that do", "max_window_layers")
    window, first = _window(config), config.count("max_window_layers", 28, least=0)
    kinds = layer_kinds(config, lambda index: SLIDING if window is not None and index >= first else FULL)
    return layer_windows(kinds, window)


def expert_layers(config: ConfigReader, experts: ExpertFeedForward) -> tuple[FeedForward, ...]:
    """The feed-forwards: experts in every `decoder_sparse_step`-th layer that is not listed as dense."""
    config.may_idle("every layer has experts", "intermediate_size")
    config.may_idle("no layer has experts", *_EXPERT_FIELDS.split())
    config.may_idle(SAME_EXPERT_LAYERS, "decoder_sparse_step", "mlp_only_layers")
    step, dense = config.count("decoder_sparse_step", 1), config.indices("mlp_only_layers")
    return tuple(
        feed_forward if index in dense or (index + 1) % step else experts
        for index, feed_forward in enumerate(dense_layers(config))
    )
