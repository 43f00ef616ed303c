"""Tiny models with sparse attention, whose indexers choose few tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
)

from support.tiny_models import VOCAB, random_prompts, reference_logits, with_weights

INDEX_HEADS = 16
"""Many: scores of few heads are often exactly 0, and the order of such ties is not the same everywhere."""
TOP_K = 8
CLEAR = 5e-6
"""The least margin of a choice, relative to the scores: ten times what fp32 rounds."""
MASKED = -1e30
"""transformers' scores of tokens that a query does not see are lower."""


def _sizes(**options: object) -> dict[str, object]:
    """Dimensions that cannot be mistaken for each other, one dense layer."""
    sizes: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "q_lora_rank": 22,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "moe_intermediate_size": 24,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "index_topk": TOP_K,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": 14,
        "attn_implementation": "eager",
    }
    return sizes | options


def _yarn() -> dict[str, object]:
    ends = {"beta_fast": 2.0, "beta_slow": 0.5, "original_max_position_embeddings": 64}
    return {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "mscale": 2.5, "mscale_all_dim": 1.2} | ends


def _v32(**options: object) -> PreTrainedModel:
    sizes = _sizes(n_group=4, topk_group=2, rope_parameters=_yarn(), **options)
    return DeepseekV32ForCausalLM(DeepseekV32Config(**sizes))


def _glm(**options: object) -> PreTrainedModel:
    sizes = _sizes(n_group=1, topk_group=1, rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    return GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**sizes | options))


SPARSE: dict[str, Callable[[], PreTrainedModel]] = {
    "deepseek_v32": _v32,
    "deepseek_v32_bias": partial(_v32, index_topk=16, attention_bias=True, norm_topk_prob=False),
    "glm_moe_dsa": partial(_glm, num_hidden_layers=5, indexer_types=["full", "shared", "full", "shared", "shared"]),
    "glm_moe_dsa_full": partial(_glm, index_topk=16),
}


def make_sparse(family: str) -> PreTrainedModel:
    """A model with weights of a scale at which every feature matters."""
    torch.manual_seed(11)
    model = with_weights(SPARSE[family]().eval())
    for layer in model.model.layers[model.config.first_k_dense_replace :]:
        layer.mlp.gate.e_score_correction_bias.normal_(std=0.3)
    return model


def clear_prompts(model: PreTrainedModel, lengths: Sequence[int]) -> list[list[int]]:
    """Random prompts on which no choice of the model depends on rounding."""
    return [_clear_prompt(model, length) for length in lengths]


def _clear_prompt(model: PreTrainedModel, length: int) -> list[int]:
    for seed in range(length, length + 50):
        [prompt] = random_prompts([length], seed)
        if least_margin(model, prompt) >= CLEAR:
            return prompt
    raise AssertionError(f"no prompt of {length} tokens has clear choices")


def least_margin(model: PreTrainedModel, tokens: Sequence[int]) -> float:
    """The least difference between the last token that an indexer chooses and the first that it does not, relative to
    the largest score."""
    margins, count, choose = [1.0], model.config.index_topk, torch.Tensor.topk

    def choose_and_look(scores: Tensor, k: int, **options: Any) -> Any:
        if k == count and scores.shape[-1] > count:
            seen = scores[scores > MASKED].abs().max()
            last, first_left = choose(scores, k + 1, dim=-1).values[..., -2:].unbind(-1)
            gaps = (last - first_left)[first_left > MASKED] / seen
            margins.extend(gaps.tolist())
        return choose(scores, k, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", choose_and_look)
        reference_logits(model, tokens)
    return min(margins)
