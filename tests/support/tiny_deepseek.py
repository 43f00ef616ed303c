"""Tiny DeepSeeks, for the tiny models of all families."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

Sizes = dict[str, object]
"""Of a config, by name."""


def _latent(common: Sizes, **options: object) -> Sizes:
    """What the DeepSeeks have in common: dimensions that cannot be mistaken for each other, one dense layer."""
    sizes = {"num_key_value_heads": 6, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8}
    experts = {"moe_intermediate_size": 24, "num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1}
    return common | sizes | {"v_head_dim": 12, "num_hidden_layers": 3} | experts | options


def _yarn(mscale: float, mscale_all_dim: float) -> Sizes:
    ends = {"beta_fast": 2.0, "beta_slow": 0.5, "original_max_position_embeddings": 64}
    growth = {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    return {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0} | ends | growth


def _v2_lite(common: Sizes, **options: object) -> PreTrainedModel:
    """As V2-Lite: queries from the input directly, any expert."""
    config = DeepseekV2Config(
        **_latent(
            common,
            q_lora_rank=None,
            n_routed_experts=7,
            topk_method="greedy",
            routed_scaling_factor=1.7,
            rope_parameters=_yarn(1.5, 1.5),
            **options,
        )
    )
    return DeepseekV2ForCausalLM(config)


def _v2(common: Sizes) -> PreTrainedModel:
    """As V2: queries by way of few features, experts of a few groups."""
    config = DeepseekV2Config(
        **_latent(
            common,
            q_lora_rank=22,
            n_routed_experts=12,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            rope_theta=100.0,
            attention_bias=True,
        )
    )
    return DeepseekV2ForCausalLM(config)


def _v3(common: Sizes, **options: object) -> PreTrainedModel:
    config = DeepseekV3Config(
        **_latent(
            common,
            q_lora_rank=22,
            n_routed_experts=12,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            rope_parameters=_yarn(2.5, 1.2),
            **options,
        )
    )
    model = DeepseekV3ForCausalLM(config)
    for layer in model.model.layers[config.first_k_dense_replace :]:
        layer.mlp.gate.e_score_correction_bias.normal_(std=0.3)
    return model


DEEPSEEK: dict[str, Callable[[Sizes], PreTrainedModel]] = {
    "deepseek_v2": _v2_lite,
    "deepseek_v2_groups": _v2,
    "deepseek_v3": _v3,
    "deepseek_v3_halves": partial(_v3, rope_interleave=False, norm_topk_prob=False, attention_bias=True),
}
"""By family: made from the sizes that all tiny models have in common."""
DENSE_DEEPSEEK: dict[str, Callable[[Sizes], PreTrainedModel]] = {
    "deepseek_v2": partial(_v2_lite, first_k_dense_replace=3),
    "deepseek_v3": partial(_v3, first_k_dense_replace=3),
}
"""The same without experts."""


def make_wide_deepseek(common: Sizes, num_heads: int) -> PreTrainedModel:
    """A V3 of two dense layers, with heads of the sizes that kernels for GPUs are made for.

    Its weights are small enough for half precision.
    """
    sizes: Sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    heads: Sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads, "head_dim": 64}
    layers: Sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 2, "hidden_size": 128, "initializer_range": 0.1}
    return _v3(common, **sizes | heads | layers).bfloat16().float().eval()
