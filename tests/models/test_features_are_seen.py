"""Disabling any feature of a family moves the logits far beyond the tolerance: equality proves each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sightline.attention.spec import LatentSpec
from sightline.layers.routing import Routing, Score
from sightline.models.norms import NormDefinition
from support.changed_runtimes import error_of
from support.features import (
    Change,
    in_attention,
    in_definition,
    in_expert_layers,
    in_experts,
    in_gate,
    in_latent,
    in_latent_definition,
    in_layer,
    in_per_layer,
    in_proportional,
    in_rotary,
    in_routing,
    in_spec,
    in_tensors,
    in_yarn,
    other_lender,
    other_share,
    without_correction,
    without_latent_norm,
    without_mlp_bias,
    without_norms_of_queries,
    without_query_norm,
    without_router_bias,
    without_shared,
    without_sinks,
    without_value_norm,
)
from support.layers import without_bias
from support.tiny_models import (
    FAMILIES,
    Models,
)

TOLERANCE = 1e-4
VISIBLE = 100 * TOLERANCE


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
QK_NORM = in_attention("query and key norms", lambda x: replace(x, norms=None))
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


def unscaled(spec: LatentSpec) -> LatentSpec:
    return replace(spec, scale=(spec.nope_dim + spec.rope_dim) ** -0.5)


def other_score(routing: Routing) -> Routing:
    return replace(routing, score=Score.SIGMOID if routing.score is Score.SOFTMAX else Score.SOFTMAX)


def other_rank(routing: Routing) -> Routing:
    assert routing.groups is not None
    return replace(routing, groups=replace(routing.groups, ranked_by=3 - routing.groups.ranked_by))


LATENT = [
    *COMMON,
    *EXPERTS,
    in_latent_definition("epsilon of the inner norms", lambda x: replace(x, norms=NormDefinition(0.5))),
    in_latent_definition("pairs of the rotation", lambda x: replace(x, paired_neighbours=not x.paired_neighbours)),
    in_latent("latent norm", without_latent_norm),
    in_routing("scores of the router", other_score),
    in_routing("scaling factor", lambda x: replace(x, scale=1.0)),
    in_expert_layers("shared experts", without_shared),
]
LATENT_YARN = [*YARN, in_spec("mscale of all dimensions", unscaled)]
LATENT_BIAS = [
    in_latent("biases of what x gives", lambda x: replace(x, down=without_bias(x.down))),
    in_latent("output bias", lambda x: replace(x, output=without_bias(x.output))),
]
QUERY_NORM = in_latent("query norm", without_query_norm)
GROUPS = [
    in_routing("group limit", lambda x: replace(x, groups=None)),
    in_routing("what groups rank by", other_rank),
]
CORRECTION = in_expert_layers("correction", without_correction)
GLM = [
    *COMMON,
    *EXPERTS,
    CORRECTION,
    in_routing("scores of the router", other_score),
    in_routing("scaling factor", lambda x: replace(x, scale=1.0)),
    in_expert_layers("shared experts", without_shared),
    in_rotary("dimensions that are rotated", lambda rotary: replace(rotary, rotated_dim=None)),
    in_tensors("which dimensions are rotated", rotated_dim=None),
]
GEMMA4 = [
    in_rotary("rotary base", lambda rotary: replace(rotary, theta=rotary.theta * 10)),
    in_spec("score scale", lambda spec: replace(spec, scale=0.5)),
    in_definition("norm epsilon", norm_epsilon=0.5),
    *WINDOW,
    in_definition("embedding scale", embedding_scale=1.0),
    in_definition("logit softcap", logit_softcap=None),
    in_layer("norm after attention", lambda layer: replace(layer, attention_out_norm=None)),
    in_layer("norm after feed-forward", lambda layer: replace(layer, mlp_out_norm=None)),
    ROPE_SCALING,
    in_proportional("rope factor", lambda scaling: replace(scaling, factor=1.0)),
    in_proportional("pairs that turn", lambda scaling: replace(scaling, num_turning=scaling.num_turning - 1)),
    in_layer("scale of each layer", lambda layer: replace(layer, scale=None)),
    in_layer("norms of queries", without_norms_of_queries),
    in_layer("norm of values", without_value_norm),
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
    # As in the published ones, the two mscale are the same, and what cosines carry is 1.
    "deepseek_v2": [*LATENT, *(change for change in LATENT_YARN if change.name != "yarn attention factor")],
    "deepseek_v2_groups": [*LATENT, *LATENT_BIAS, *GROUPS, QUERY_NORM],
    "deepseek_v3": [*LATENT, *LATENT_YARN, *GROUPS, QUERY_NORM, CORRECTION],
    "deepseek_v3_halves": [*LATENT, *LATENT_YARN, *LATENT_BIAS, *GROUPS, QUERY_NORM, CORRECTION],
    "gemma4": [
        *GEMMA4,
        in_layer("inputs of each layer", lambda layer: replace(layer, per_layer=None)),
        in_per_layer("looked-up part of the inputs", lambda x: replace(x, embedding_scale=0.0)),
        in_per_layer("projected part of the inputs", lambda x: replace(x, projection_scale=0.0)),
        Change("whose cache is shared", define=other_lender),
    ],
    "gemma4_large": [*GEMMA4, QKV_BIAS, OUTPUT_BIAS],
    "glm4_moe": [*GLM, QK_NORM, QKV_BIAS],
    "glm4_moe_plain": [*GLM, *GROUPS],
}
CASES = [(family, change) for family, changes in FEATURES.items() for change in changes]


def test_every_family_has_features() -> None:
    assert set(FEATURES) == set(FAMILIES)


@pytest.mark.prove
@pytest.mark.parametrize("family", FAMILIES)
def test_an_unchanged_model_is_within_the_tolerance(models: Models, family: str) -> None:
    assert error_of(*models[family], Change("nothing")) <= TOLERANCE


@pytest.mark.prove
@pytest.mark.parametrize(("family", "change"), CASES, ids=[f"{family}-{change.name}" for family, change in CASES])
def test_disabling_a_feature_would_be_seen(models: Models, family: str, change: Change) -> None:
    assert error_of(*models[family], change) >= VISIBLE
