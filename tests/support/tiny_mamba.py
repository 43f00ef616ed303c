"""Tiny random models with Mamba-2 layers or short convolutions: Nemotron-H, Granite 4 and LFM2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
)

from support.tiny_deepseek import Sizes
from support.tiny_qwen_hybrid import slowed

MAMBA, FULL, CONV = "linear_attention", "full_attention", "conv"


def _nemotron_h(common: Sizes, kinds: list[str], **options: object) -> PreTrainedModel:
    config = NemotronHConfig(
        **common,
        layers_block_type=kinds,
        ssm_state_size=5,
        mamba_num_heads=6,
        mamba_head_dim=8,
        n_groups=2,
        conv_kernel=4,
        # A prefill of transformers has this as the least time of a token, and a decode has none.
        time_step_min=1e-12,
        **options,
    )
    model = NemotronHForCausalLM(config)
    for layer, kind in zip(model.model.layers, kinds, strict=True):
        if kind == "moe":
            layer.mixer.gate.e_score_correction_bias.normal_(std=0.3)
        if kind == MAMBA:
            # transformers draws it from `time_step_min`: the time of a token would be next to nothing.
            torch.nn.init.zeros_(layer.mixer.dt_bias)
    return slowed(model)


def _nemotron_h_dense(common: Sizes) -> PreTrainedModel:
    kinds = [MAMBA, "mlp", FULL, MAMBA, MAMBA, "mlp", FULL, "mlp"]
    return _nemotron_h(common, kinds, use_bias=True, mlp_bias=True)


def _nemotron_h_moe(common: Sizes, **options: object) -> PreTrainedModel:
    experts = {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 32,
        "routed_scaling_factor": 1.7,
    }
    kinds = ["moe", MAMBA, "moe", FULL, MAMBA, "moe"]
    return _nemotron_h(common, kinds, use_conv_bias=False, **experts | options)


def _granite(common: Sizes, **options: object) -> PreTrainedModel:
    settings = {name: value for name, value in common.items() if name != "head_dim"}
    config = GraniteMoeHybridConfig(
        **settings,
        num_hidden_layers=4,
        layer_types=[MAMBA, FULL, MAMBA, MAMBA],
        shared_intermediate_size=40,
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=5,
        mamba_d_head=12,
        mamba_expand=2,
        embedding_multiplier=3.0,
        logits_scaling=2.5,
        residual_multiplier=0.4,
        attention_multiplier=0.5,
        **options,
    )
    return slowed(GraniteMoeHybridForCausalLM(config))


def _granite_dense(common: Sizes) -> PreTrainedModel:
    return _granite(
        common,
        num_local_experts=0,
        tie_word_embeddings=True,
        position_embedding_type="nope",
        mamba_proj_bias=True,
        attention_bias=True,
    )


def _granite_moe(common: Sizes) -> PreTrainedModel:
    return _granite(
        common,
        num_local_experts=6,
        num_experts_per_tok=2,
        position_embedding_type="rope",
        rope_theta=100.0,
        mamba_conv_bias=False,
    )


def _lfm2(common: Sizes) -> PreTrainedModel:
    settings = {name: value for name, value in common.items() if name != "head_dim"}
    config = Lfm2Config(
        **settings,
        num_hidden_layers=4,
        layer_types=[CONV, FULL, CONV, FULL],
        conv_L_cache=3,
        conv_bias=True,
        block_multiple_of=12,
        block_ffn_dim_multiplier=1.5,
        rope_theta=100.0,
    )
    return Lfm2ForCausalLM(config)


def _lfm2_moe(common: Sizes) -> PreTrainedModel:
    settings = {name: value for name, value in common.items() if name != "head_dim"}
    config = Lfm2MoeConfig(
        **settings,
        num_hidden_layers=4,
        layer_types=[CONV, FULL, CONV, FULL],
        num_dense_layers=1,
        conv_L_cache=4,
        moe_intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=2,
        routed_scaling_factor=1.3,
        rope_theta=100.0,
        tie_word_embeddings=False,
    )
    model = Lfm2MoeForCausalLM(config)
    for layer in model.model.layers[config.num_dense_layers :]:
        layer.feed_forward.expert_bias.normal_(std=0.3)
    return model


MAMBA_HYBRIDS: dict[str, Callable[[Sizes], PreTrainedModel]] = {
    "nemotron_h": _nemotron_h_dense,
    "nemotron_h_moe": _nemotron_h_moe,
    "nemotron_h_narrow": partial(_nemotron_h_moe, moe_latent_size=20, mlp_bias=True),
    "granite_hybrid": _granite_dense,
    "granite_hybrid_moe": _granite_moe,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
}
