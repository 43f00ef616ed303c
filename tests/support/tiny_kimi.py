"""Tiny Kimi Linears, Bailing hybrids and MiniMaxes: models with recurrent layers beside latent or softmax attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import (
    KimiLinearConfig,
    KimiLinearForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    PreTrainedModel,
)

from support.tiny_deepseek import Sizes
from support.tiny_models import _common, with_weights
from support.tiny_qwen_hybrid import slowed

FULL, LINEAR = "full_attention", "linear_attention"
LAYERS = [LINEAR, FULL, LINEAR, FULL]


def _latent(common: Sizes, **options: object) -> Sizes:
    """Dimensions that cannot be mistaken for each other, one dense layer, experts in groups."""
    sizes = {"num_key_value_heads": 6, "kv_lora_rank": 20, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8}
    experts = {"moe_intermediate_size": 24, "num_experts_per_tok": 3, "n_shared_experts": 2, "num_local_experts": 12}
    layers = {"num_hidden_layers": len(LAYERS), "layer_types": LAYERS}
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    unnamed = {name: value for name, value in common.items() if name != "head_dim"}
    return unnamed | sizes | {"v_head_dim": 16} | experts | layers | groups | options


def _kimi(common: Sizes, **options: object) -> PreTrainedModel:
    heads: Sizes = {"linear_head_dim": 14, "linear_num_heads": 5, "linear_conv_kernel_dim": 4}
    return _corrected(KimiLinearForCausalLM(KimiLinearConfig(**_latent(common, **heads | options))))


def _bailing(common: Sizes, **options: object) -> PreTrainedModel:
    pytest.importorskip("transformers.models.bailing_hybrid", reason="older releases of transformers do not have it")
    from transformers import BailingHybridConfig, BailingHybridForCausalLM

    given: Sizes = {"head_dim": 14, "short_conv_kernel_size": 3, "first_k_dense_replace": 1, "rope_theta": 100.0}
    return slowed(_corrected(BailingHybridForCausalLM(BailingHybridConfig(**_latent(common, **given | options)))))


def _corrected(model: PreTrainedModel) -> PreTrainedModel:
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    return model


def _minimax(common: Sizes, **options: object) -> PreTrainedModel:
    factors = {
        "full_attn_alpha_factor": 1.7,
        "full_attn_beta_factor": 0.6,
        "linear_attn_alpha_factor": 0.8,
        "linear_attn_beta_factor": 1.4,
        "mlp_alpha_factor": 1.3,
        "mlp_beta_factor": 0.7,
    }
    config = MiniMaxConfig(
        **common
        | {"num_hidden_layers": len(LAYERS), "layer_types": LAYERS, "intermediate_size": 24, "block_size": 16}
        | {"num_local_experts": 7, "num_experts_per_tok": 3, "rms_norm_eps": 0.05}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
        | factors
        | options
    )
    return MiniMaxForCausalLM(config)


KIMI: dict[str, Callable[[Sizes], PreTrainedModel]] = {
    "kimi_linear": _kimi,
    "kimi_linear_low": partial(
        _kimi, q_lora_rank=22, attention_bias=True, norm_topk_prob=False, n_group=1, topk_group=1
    ),
    "bailing_hybrid": _bailing,
    "bailing_hybrid_free": partial(_bailing, kda_safe_gate=False, attention_bias=True, norm_topk_prob=False),
    "minimax": _minimax,
    "minimax_window": partial(_minimax, sliding_window=9, num_hidden_layers=3, layer_types=[FULL, LINEAR, LINEAR]),
}
"""By family: made from the sizes that all tiny models have in common."""


def make_wide_kimi(num_heads: int, linear_head_dim: int = 64) -> PreTrainedModel:
    """A Kimi Linear of two layers, with latent heads of the sizes that kernels for GPUs are made for, and no experts.

    Its weights are small enough for half precision.
    """
    sizes: Sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    linear = {"linear_head_dim": linear_head_dim, "linear_num_heads": 2}
    layers = {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL], "mlp_layer_types": ["dense", "dense"]}
    torch.manual_seed(11)
    wide: Sizes = {"hidden_size": 128, "initializer_range": 0.1}
    return _kimi(_common(), **sizes | heads | linear | layers | wide).bfloat16().float().eval()


def make_kimi(family: str) -> PreTrainedModel:
    """A model with weights of a scale at which every feature matters."""
    torch.manual_seed(11)
    return with_weights(KIMI[family](_common()).eval())
