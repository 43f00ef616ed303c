"""Tiny GLMs, for the tiny models of all families."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel

from support.tiny_deepseek import Sizes


def _glm4_moe(common: Sizes, **options: object) -> PreTrainedModel:
    experts = {"moe_intermediate_size": 24, "num_experts_per_tok": 3, "n_routed_experts": 12, "n_shared_experts": 2}
    config = Glm4MoeConfig(
        **common
        | {"num_hidden_layers": 3, "first_k_dense_replace": 1, "rope_theta": 100.0}
        | experts
        | {"routed_scaling_factor": 2.5}
        | options
    )
    model = Glm4MoeForCausalLM(config)
    for layer in model.model.layers[config.first_k_dense_replace :]:
        layer.mlp.gate.e_score_correction_bias.normal_(std=0.3)
    return model


GLM: dict[str, Callable[[Sizes], PreTrainedModel]] = {
    "glm4_moe": partial(_glm4_moe, use_qk_norm=True, attention_bias=True),
    "glm4_moe_plain": partial(_glm4_moe, n_group=4, topk_group=2, norm_topk_prob=False, tie_word_embeddings=True),
}
"""By family: made from the sizes that all tiny models have in common."""
