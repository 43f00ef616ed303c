"""Disabling any feature of a family moves the logits far beyond the tolerance: equality proves each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from sightline.attention.spec import SoftmaxSpec, group_layers
from sightline.core.config import EngineConfig
from sightline.core.ledger import Ledger
from sightline.layers.attention import SoftmaxAttention
from sightline.layers.mlp import GatedMlp
from sightline.layers.moe import ClampedSwiglu, Expert, ExpertMlp, Routing, Share
from sightline.layers.rotary import RotarySpec, YarnScaling
from sightline.models.decoder import Decoder, DecoderDefinition, DecoderLayer
from sightline.models.feed_forward import ExpertFeedForward
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from sightline.runner.build import Runtime, assemble_runtime, make_store, select_backends
from support.attention_cases import CPU
from support.layers import without_bias
from support.tiny_models import (
    FAMILIES,
    Models,
    load_runtime,
    random_prompts,
    reference_logits,
    relative_error,
    stepped_logits,
)

TOLERANCE = 1e-4
VISIBLE = 100 * TOLERANCE


@dataclass(frozen=True)
class Change:
    """One feature taken out of a definition, or out of the loaded network."""

    name: str
    define: Callable[[DecoderDefinition], DecoderDefinition] = lambda definition: definition
    build: Callable[[Decoder], Decoder] = lambda decoder: decoder


def in_definition(name: str, **fields: object) -> Change:
    return Change(name, define=lambda definition: replace(definition, **fields))  # type: ignore[arg-type]


def in_spec(name: str, change: Callable[[SoftmaxSpec], SoftmaxSpec]) -> Change:
    return Change(
        name,
        define=lambda definition: replace(
            definition, layers=tuple(replace(x, attention=change(x.attention)) for x in definition.layers)
        ),
    )


def in_rotary(name: str, change: Callable[[RotarySpec], RotarySpec]) -> Change:
    return Change(
        name,
        define=lambda definition: replace(
            definition, layers=tuple(replace(x, rotary=change(x.rotary)) for x in definition.layers)
        ),
    )


def in_yarn(name: str, change: Callable[[YarnScaling], YarnScaling]) -> Change:
    def changed(rotary: RotarySpec) -> RotarySpec:
        assert isinstance(rotary.scaling, YarnScaling)
        return replace(rotary, scaling=change(rotary.scaling))

    return in_rotary(name, changed)


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
    return Change(name, build=lambda decoder: replace(decoder, layers=tuple(change(x) for x in decoder.layers)))


def in_attention(name: str, change: Callable[[SoftmaxAttention], SoftmaxAttention]) -> Change:
    return in_layer(name, lambda layer: replace(layer, attention=change(layer.attention)))


def in_experts(name: str, change: Callable[[Expert], Expert]) -> Change:
    def changed(layer: DecoderLayer) -> DecoderLayer:
        assert isinstance(layer.mlp, ExpertMlp)
        return replace(layer, mlp=replace(layer.mlp, experts=tuple(change(x) for x in layer.mlp.experts)))

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


COMMON = [
    in_rotary("rotary base", lambda rotary: replace(rotary, theta=rotary.theta * 10)),
    in_spec("score scale", lambda spec: replace(spec, scale=1.0)),
    in_definition("norm epsilon", norm_epsilon=0.5),
]
WINDOW = [
    in_spec("window", lambda spec: replace(spec, window=None)),
    in_spec("window by one", lambda spec: replace(spec, window=spec.window and spec.window + 1)),
]
ROPE_SCALING = in_rotary("rope scaling", lambda rotary: replace(rotary, scaling=None))
YARN = [
    ROPE_SCALING,
    in_yarn("yarn factor", lambda yarn: replace(yarn, factor=1.0)),
    in_yarn("yarn attention factor", lambda yarn: replace(yarn, attention_factor=1.0)),
    in_yarn("yarn fast end", lambda yarn: replace(yarn, beta_fast=32.0)),
    in_yarn("yarn slow end", lambda yarn: replace(yarn, beta_slow=1.5)),
    in_yarn("yarn truncation", lambda yarn: replace(yarn, truncate=not yarn.truncate)),
]
QKV_BIAS = in_attention("query, key and value biases", lambda x: replace(x, qkv=without_bias(x.qkv)))
OUTPUT_BIAS = in_attention("output bias", lambda x: replace(x, output=without_bias(x.output)))
QK_NORM = in_attention("query and key norms", lambda x: replace(x, q_norm=None, k_norm=None))
GEMMA = [
    *COMMON,
    *WINDOW,
    in_definition("norm offset", norm_offset=0.0),
    in_definition("embedding scale", embedding_scale=1.0),
    in_definition("logit softcap", logit_softcap=None),
    in_layer("norm after attention", lambda layer: replace(layer, attention_out_norm=None)),
    in_layer("norm after feed-forward", lambda layer: replace(layer, mlp_out_norm=None)),
]
EXPERTS = [
    in_routing("share of the chosen experts", other_share),
    in_routing("number of experts a token", lambda x: replace(x, experts_per_token=x.experts_per_token - 1)),
]
FEATURES: dict[str, list[Change]] = {
    "llama": [*COMMON, QKV_BIAS, OUTPUT_BIAS],
    "llama3": [*COMMON, ROPE_SCALING, in_layer("mlp bias", without_mlp_bias)],
    "mistral": [*COMMON, *WINDOW, ROPE_SCALING],
    "qwen2": [
        *COMMON,
        *WINDOW,
        in_spec("layers without the window", lambda spec: replace(spec, window=11)),
        *YARN,
        QKV_BIAS,
    ],
    "qwen3": [*COMMON, QK_NORM, QKV_BIAS, OUTPUT_BIAS],
    "gemma2": [*GEMMA, in_spec("score softcap", lambda spec: replace(spec, softcap=None))],
    "gemma3": [*GEMMA, ROPE_SCALING, QK_NORM],
    "qwen3_moe": [*COMMON, *WINDOW, QK_NORM, *EXPERTS],
    "qwen3_moe_plain": [*COMMON, QK_NORM, *EXPERTS],
    "gpt_oss": [
        *COMMON,
        *WINDOW,
        *YARN,
        *EXPERTS,
        QKV_BIAS,
        OUTPUT_BIAS,
        in_attention("sinks", without_sinks),
        in_layer("router bias", without_router_bias),
        in_experts("bias of gate and up", lambda x: replace(x, gate_up=without_bias(x.gate_up))),
        in_experts("bias of down", lambda x: replace(x, down=without_bias(x.down))),
        in_gate("clamp limit", limit=1e9),
        in_gate("gate's alpha", alpha=1.0),
    ],
}
CASES = [(family, change) for family, changes in FEATURES.items() for change in changes]


@cache
def base_runtime(folder: Path) -> Runtime:
    return load_runtime(folder, EngineConfig(attention_backend="torch", cache_tokens=256, max_num_seqs=2))


def changed_runtime(folder: Path, change: Change) -> Runtime:
    """A runtime for the same weights with one feature disabled."""
    ledger = Ledger()
    checkpoint = open_checkpoint(folder, ledger)
    base = base_runtime(folder)
    original = define_model(checkpoint.config, ledger)
    assert isinstance(original, DecoderDefinition)
    definition = change.define(original)
    decoder = change.build(
        definition.load(WeightReader(checkpoint, torch.float32, CPU, ledger, lambda done, total: None))
    )
    groups = group_layers(definition.attention_specs())
    selections = select_backends(base.config, groups, [selection.candidate for selection in base.selections[:1]])
    return assemble_runtime(base.config, definition, decoder, groups, selections, make_store(base.config, groups))


def test_every_family_has_features() -> None:
    assert set(FEATURES) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unchanged_model_is_within_the_tolerance(models: Models, family: str) -> None:
    assert error_of(models, family, Change("nothing")) <= TOLERANCE


@pytest.mark.parametrize(("family", "change"), CASES, ids=[f"{family}-{change.name}" for family, change in CASES])
def test_disabling_a_feature_would_be_seen(models: Models, family: str, change: Change) -> None:
    assert error_of(models, family, change) >= VISIBLE


def error_of(models: Models, family: str, change: Change) -> float:
    model, folder = models[family]
    [sequence] = random_prompts([48])
    [got] = stepped_logits(changed_runtime(folder, change), [sequence], [20], chunk=64)
    return relative_error(got, reference_logits(model, sequence)[19:])
