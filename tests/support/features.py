"""Taking one feature out of a model: out of its definition, or out of the loaded network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch

from sightline.attention.kinds import SpecKind
from sightline.layers.activation import ClampedSwiglu
from sightline.layers.attention import SoftmaxAttention
from sightline.layers.latent import LatentAttention
from sightline.layers.mlp import GatedMlp
from sightline.layers.moe import Expert, ExpertMlp, SeparateExperts
from sightline.layers.norm import RmsNorm
from sightline.layers.per_layer import PerLayerInputs
from sightline.layers.rotary import ProportionalScaling, RotarySpec, YarnScaling
from sightline.layers.routing import Routing, Share
from sightline.models.attention import LatentAttentionDefinition
from sightline.models.decoder import Decoder, DecoderDefinition
from sightline.models.decoder_layer import DecoderLayer
from sightline.models.feed_forward import ExpertFeedForward
from support.definitions import latent_layer, latent_of, softmax_layer, softmax_of
from support.layers import experts_of, without_bias

_MixerT = TypeVar("_MixerT")


@dataclass(frozen=True)
class Change:
    """One feature taken out of a definition, or out of the loaded network."""

    name: str
    define: Callable[[DecoderDefinition], DecoderDefinition] = lambda definition: definition
    build: Callable[[Decoder], Decoder] = lambda decoder: decoder


def in_definition(name: str, **fields: object) -> Change:
    return Change(name, define=lambda definition: replace(definition, **fields))  # type: ignore[arg-type]


def in_spec(name: str, change: Callable[[Any], Any]) -> Change:
    """`change` takes and gives the spec of whatever kind of attention the layers have."""
    return Change(
        name,
        define=lambda definition: replace(
            definition,
            layers=tuple(
                replace(x, attention=replace(x.attention, spec=change(x.attention.spec))) for x in definition.layers
            ),
        ),
    )


def in_kind(name: str, kind: SpecKind, **fields: object) -> Change:
    """Changes the specs of a kind."""

    def define(definition: DecoderDefinition) -> DecoderDefinition:
        layers = [
            replace(x, attention=replace(x.attention, spec=replace(x.attention.spec, **fields)))  # type: ignore[arg-type]
            if x.attention.spec is not None and x.attention.spec.kind is kind
            else x
            for x in definition.layers
        ]
        return replace(definition, layers=tuple(layers))

    return Change(name, define=define)


def in_mixers(name: str, kind: type[_MixerT], change: Callable[[_MixerT], _MixerT]) -> Change:
    """In those layers whose attention is of that class."""

    def changed(layer: DecoderLayer) -> DecoderLayer:
        mixer = layer.attention
        return replace(layer, attention=change(mixer)) if isinstance(mixer, kind) else layer  # type: ignore[arg-type]

    return in_layer(name, changed)


def in_latent_definition(name: str, change: Callable[[LatentAttentionDefinition], LatentAttentionDefinition]) -> Change:
    return Change(
        name,
        define=lambda definition: replace(
            definition, layers=tuple(replace(x, attention=change(latent_of(x))) for x in definition.layers)
        ),
    )


def in_tensors(name: str, **fields: object) -> Change:
    return Change(
        name,
        define=lambda definition: replace(
            definition,
            layers=tuple(
                replace(x, attention=replace(softmax_of(x), tensors=replace(softmax_of(x).tensors, **fields)))  # type: ignore[arg-type]
                for x in definition.layers
            ),
        ),
    )


def in_rotary(name: str, change: Callable[[RotarySpec], RotarySpec]) -> Change:
    return Change(
        name,
        define=lambda definition: replace(
            definition,
            layers=tuple(x if x.rotary is None else replace(x, rotary=change(x.rotary)) for x in definition.layers),
        ),
    )


def in_yarn(name: str, change: Callable[[YarnScaling], YarnScaling]) -> Change:
    def changed(rotary: RotarySpec) -> RotarySpec:
        assert isinstance(rotary.scaling, YarnScaling)
        return replace(rotary, scaling=change(rotary.scaling))

    return in_rotary(name, changed)


def in_proportional(name: str, change: Callable[[ProportionalScaling], ProportionalScaling]) -> Change:
    """In those layers whose rotary embedding is of that kind."""

    def changed(rotary: RotarySpec) -> RotarySpec:
        scaling = rotary.scaling
        return replace(rotary, scaling=change(scaling)) if isinstance(scaling, ProportionalScaling) else rotary

    return in_rotary(name, changed)


def in_per_layer(name: str, change: Callable[[PerLayerInputs], PerLayerInputs]) -> Change:
    def changed(decoder: Decoder) -> Decoder:
        assert decoder.states.per_layer is not None
        return replace(decoder, states=replace(decoder.states, per_layer=change(decoder.states.per_layer)))

    return Change(name, build=changed)


def other_lender(definition: DecoderDefinition) -> DecoderDefinition:
    """The layers that borrow read the first layer of their kind, not the last."""
    specs = [layer.attention.spec for layer in definition.layers]
    return replace(
        definition,
        layers=tuple(
            layer if layer.lender is None else replace(layer, lender=specs.index(specs[layer.lender]))
            for layer in definition.layers
        ),
    )


def without_value_norm(layer: DecoderLayer) -> DecoderLayer:
    attention = layer.attention
    return replace(layer, attention=replace(attention, value_norm=None)) if has_own_entries(layer) else layer  # type: ignore[arg-type]


def without_norms_of_queries(layer: DecoderLayer) -> DecoderLayer:
    """Queries of layers with keys of their own keep their length."""
    attention = layer.attention
    return replace(layer, attention=replace(attention, norms=None)) if has_own_entries(layer) else layer  # type: ignore[arg-type]


def has_own_entries(layer: DecoderLayer) -> bool:
    return isinstance(layer.attention, SoftmaxAttention)


def in_routing(name: str, change: Callable[[Routing], Routing]) -> Change:
    def define(definition: DecoderDefinition) -> DecoderDefinition:
        layers = []
        for layer in definition.layers:
            feed_forward = layer.feed_forward
            if isinstance(feed_forward, ExpertFeedForward):
                feed_forward = replace(feed_forward, routing=change(feed_forward.routing))
            layers.append(replace(layer, feed_forward=feed_forward))
        return replace(definition, layers=tuple(layers))

    return Change(name, define=define)


def in_layer(name: str, change: Callable[[DecoderLayer], DecoderLayer]) -> Change:
    def changed(decoder: Decoder) -> Decoder:
        states = decoder.states
        # Layers with several residual streams have the same parts.
        layers = cast("tuple[DecoderLayer, ...]", states.layers)
        return replace(decoder, states=replace(states, layers=tuple(change(layer) for layer in layers)))

    return Change(name, build=changed)


def in_attention(name: str, change: Callable[[SoftmaxAttention], SoftmaxAttention]) -> Change:
    return in_layer(name, lambda layer: replace(layer, attention=change(softmax_layer(layer))))


def in_latent(name: str, change: Callable[[LatentAttention], LatentAttention]) -> Change:
    return in_layer(name, lambda layer: replace(layer, attention=change(latent_layer(layer))))


def in_expert_layers(name: str, change: Callable[[ExpertMlp], ExpertMlp]) -> Change:
    """In those layers that have experts."""

    def changed(layer: DecoderLayer) -> DecoderLayer:
        return replace(layer, mlp=change(layer.mlp)) if isinstance(layer.mlp, ExpertMlp) else layer

    return in_layer(name, changed)


def in_experts(name: str, change: Callable[[Expert], Expert]) -> Change:
    def changed(layer: DecoderLayer) -> DecoderLayer:
        assert isinstance(layer.mlp, ExpertMlp)
        return replace(layer, mlp=replace(layer.mlp, bank=SeparateExperts(tuple(map(change, experts_of(layer.mlp))))))

    return in_layer(name, changed)


def in_gate(name: str, **fields: float) -> Change:
    def changed(expert: Expert) -> Expert:
        assert isinstance(expert.gate, ClampedSwiglu)
        return replace(expert, gate=replace(expert.gate, **fields))

    return in_experts(name, changed)


def without_mlp_bias(layer: DecoderLayer) -> DecoderLayer:
    assert isinstance(layer.mlp, GatedMlp)
    return replace(layer, mlp=replace(layer.mlp, down=without_bias(layer.mlp.down)))


def without_router_bias(layer: DecoderLayer) -> DecoderLayer:
    assert isinstance(layer.mlp, ExpertMlp)
    return replace(layer, mlp=replace(layer.mlp, router=without_bias(layer.mlp.router)))


def without_sinks(attention: SoftmaxAttention) -> SoftmaxAttention:
    assert attention.sinks is not None
    return replace(attention, sinks=torch.full_like(attention.sinks, -math.inf))


def other_share(routing: Routing) -> Routing:
    return replace(routing, share=Share.OF_ALL if routing.share is Share.OF_CHOSEN else Share.OF_CHOSEN)


def no_norm(norm: RmsNorm) -> RmsNorm:
    """Leaves everything as it is: next to its epsilon, no mean square counts."""
    return RmsNorm(torch.full_like(norm.weight, 1e5), 1e10)


def without_query_norm(attention: LatentAttention) -> LatentAttention:
    assert attention.query_up is not None
    return replace(attention, query_up=replace(attention.query_up, norm=no_norm(attention.query_up.norm)))


def without_latent_norm(attention: LatentAttention) -> LatentAttention:
    return replace(attention, latent_norm=no_norm(attention.latent_norm))


def without_correction(mlp: ExpertMlp) -> ExpertMlp:
    assert mlp.correction is not None
    return replace(mlp, correction=None)


def without_shared(mlp: ExpertMlp) -> ExpertMlp:
    assert mlp.shared is not None
    return replace(mlp, shared=None)
