"""Llama, the models that share its config (SmolLM2, TinyLlama, Llama 3), and Mistral, which adds a window."""

from __future__ import annotations

from dataclasses import replace

from sightline.models.attention import AttentionTensors
from sightline.models.config_reader import ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.rope_config import with_frequency_factors
from sightline.models.shared_config import dense_layers, plain_decoder


def llama(config: ConfigReader) -> DecoderDefinition:
    """Reads a Llama config."""
    config.require("rope_interleaved", None, False)
    feed_forwards = dense_layers(config, bias=config.boolean("mlp_bias", default=False))
    bias = config.boolean("attention_bias", default=False)
    tensors = AttentionTensors(qkv_bias=bias, output_bias=bias)
    definition = plain_decoder(config, [None] * len(feed_forwards), feed_forwards, tensors=tensors)
    factors = config.optional_list("rope_frequency_factors")
    return replace(
        definition,
        layers=tuple(
            replace(layer, rotary=layer.rotary and with_frequency_factors(layer.rotary, factors))
            for layer in definition.layers
        ),
    )


def mistral(config: ConfigReader) -> DecoderDefinition:
    """Reads a Mistral config. Every layer has the sliding window, unless it is null."""
    config.require("layer_types", None)
    feed_forwards = dense_layers(config)
    window = config.optional_count("sliding_window", absent=4096)
    return plain_decoder(config, [window] * len(feed_forwards), feed_forwards)
