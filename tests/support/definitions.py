"""What a test knows about a layer's kind of attention."""

from __future__ import annotations

from sightline.layers.attention import SoftmaxAttention
from sightline.layers.latent import LatentAttention
from sightline.layers.rotary import RotarySpec
from sightline.models.attention import LatentAttentionDefinition, SoftmaxAttentionDefinition
from sightline.models.decoder_layer import DecoderLayer, StreamedLayer
from sightline.models.layer_definition import LayerDefinition


def softmax_of(layer: LayerDefinition) -> SoftmaxAttentionDefinition:
    assert isinstance(layer.attention, SoftmaxAttentionDefinition)
    return layer.attention


def latent_of(layer: LayerDefinition) -> LatentAttentionDefinition:
    assert isinstance(layer.attention, LatentAttentionDefinition)
    return layer.attention


def rotary_of(layer: LayerDefinition) -> RotarySpec:
    assert layer.rotary is not None
    return layer.rotary


def softmax_layer(layer: DecoderLayer | StreamedLayer) -> SoftmaxAttention:
    assert isinstance(layer.attention, SoftmaxAttention)
    return layer.attention


def latent_layer(layer: DecoderLayer | StreamedLayer) -> LatentAttention:
    assert isinstance(layer.attention, LatentAttention)
    return layer.attention
