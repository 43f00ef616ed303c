"""Configs of Nemotron-H, Granite 4 and LFM2 as they are published, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sightline.attention.spec import ConvolutionSpec, RecurrentSpec, SoftmaxSpec
from sightline.core.errors import UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.layers.activation import Activation
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import (
    AbsentFeedForward,
    DenseFeedForward,
    ExpertFeedForward,
    NarrowInputs,
    SelfGatedFeedForward,
)
from sightline.models.recurrent.mamba import MambaDefinition
from sightline.models.registry import define_model
from support.definitions import rotary_of, softmax_of

NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "initializer_range": 0.02,
    "intermediate_size": 15680,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 80,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, math.inf],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
NANO_EXPERTS: dict[str, Any] = NANO | {
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}
TINY: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 512,
    "layer_types": ["mamba"] * 5 + ["attention"] + (["mamba"] * 9 + ["attention"]) * 3 + ["mamba"] * 4,
    "logits_scaling": 6,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "output_router_logits": False,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.0,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}
LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
LFM2_EXPERTS: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": ["conv", "conv", "full_attention", "conv"] * 6,
    "max_position_embeddings": 128000,
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
    "vocab_size": 65536,
}


def define(config: dict[str, Any], ledger: Ledger | None = None) -> DecoderDefinition:
    return define_model(config, Ledger(strict=True) if ledger is None else ledger)


def test_a_config_of_nemotron_nano_gives_its_layers() -> None:
    definition = define(NANO)
    kinds = "".join(
        "-" if spec is None else "*" if isinstance(spec, SoftmaxSpec) else "M" for spec in definition.attention_specs()
    )
    assert kinds == NANO["hybrid_override_pattern"]
    mamba, mlp = definition.layers[0], definition.layers[1]
    assert isinstance(mamba.attention, MambaDefinition)
    assert mamba.attention.spec == RecurrentSpec(
        128, 8, 128, 80, 1.0, delta_rule=False, channel_decay=False, unit_keys=False, conv_width=4, skip=True
    )
    assert (mamba.attention.norm_groups, mamba.attention.time_limits) == (8, (0.0, math.inf))
    assert isinstance(mamba.feed_forward, AbsentFeedForward)
    assert mlp.feed_forward == SelfGatedFeedForward(15680, Activation.RELU)
    assert all(layer.rotary is None and layer.has_one_part for layer in definition.layers)
    billions = (definition.token_weights + 2 * 131072 * 4480) / 1e9
    assert billions == pytest.approx(8.9, abs=0.1)


def test_a_config_of_nemotron_3_nano_gives_its_experts() -> None:
    ledger = Ledger(strict=True)
    definition = define(NANO_EXPERTS, ledger)
    experts = definition.layers[1].feed_forward
    assert isinstance(experts, ExpertFeedForward)
    assert experts.gates_itself
    assert experts.narrow is None
    narrow = define(NANO_EXPERTS | {"moe_latent_size": 512, "mlp_bias": True}).layers[1].feed_forward
    assert isinstance(narrow, ExpertFeedForward)
    assert narrow.narrow == NarrowInputs(512, bias=True)
    assert narrow.num_weights(2688) < experts.num_weights(2688)
    assert experts.routing.corrected
    assert (experts.routing.num_experts, experts.routing.experts_per_token, experts.routing.scale) == (128, 6, 2.5)
    assert experts.shared == SelfGatedFeedForward(3712, Activation.RELU)
    notes = {note.subject: note.fact for note in ledger.notes}
    assert "attention knows no positions" in notes["config field rope_theta"]
    assert "limited by time_step_limit alone" in notes["config field time_step_min"]
    assert (definition.token_weights + 2 * 131072 * 2688) / 1e9 == pytest.approx(3.5, abs=0.2)


def test_a_config_of_granite_tiny_gives_its_layers() -> None:
    definition = define(TINY)
    softmax = [layer for layer in definition.layers if isinstance(layer.attention.spec, SoftmaxSpec)]
    assert len(softmax) == 4
    assert softmax_of(softmax[0]).spec == SoftmaxSpec(12, 4, 128, 0.0078125)
    assert softmax[0].rotary is None
    assert (definition.embedding_scale, definition.residual_scale, definition.logit_scale) == (12.0, 0.22, 1 / 6)
    mamba, feed_forward = definition.layers[0].attention, definition.layers[0].feed_forward
    assert isinstance(mamba, MambaDefinition)
    assert (mamba.norm_groups, mamba.spec.num_heads, mamba.spec.value_dim) == (1, 48, 64)
    assert isinstance(feed_forward, ExpertFeedForward)
    assert feed_forward.shared == DenseFeedForward(1024, Activation.SILU, joint=True)
    rotating = define(TINY | {"position_embedding_type": "rope"}).layers[5]
    assert rotary_of(rotating).theta == 10000.0


def test_a_config_of_lfm2_gives_its_layers() -> None:
    definition = define(LFM2)
    full = [layer for layer, spec in enumerate(definition.attention_specs()) if isinstance(spec, SoftmaxSpec)]
    assert full == [2, 5, 8, 10, 12, 14]
    assert definition.attention_specs()[0] == ConvolutionSpec(2048, 3)
    assert definition.layers[0].feed_forward == DenseFeedForward(8192, Activation.SILU)
    assert definition.tied_embedding
    assert (definition.token_weights + 65536 * 2048) / 1e9 == pytest.approx(1.17, abs=0.01)


def test_a_config_of_lfm2_with_experts_gives_its_layers() -> None:
    definition = define(LFM2_EXPERTS)
    kinds = [isinstance(layer.feed_forward, ExpertFeedForward) for layer in definition.layers]
    assert kinds == [False] * 2 + [True] * 22
    assert definition.layers[0].feed_forward == DenseFeedForward(7168, Activation.SILU)


def test_layers_that_keep_no_entries_do_not_cost_more_with_the_context() -> None:
    definition = define(LFM2)
    _, full = define(LFM2 | {"full_attn_idxs": list(range(16))}).step_costs()
    _, hybrid = definition.step_costs()
    assert 0.0 < hybrid < full / 2


@pytest.mark.parametrize(
    ("config", "changed", "match"),
    [
        (NANO, {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        (NANO, {"attention_bias": True}, "attention_bias"),
        (NANO, {"hybrid_override_pattern": "M-X"}, "from 1 to 4096 layers"),
        (NANO, {"num_hidden_layers": 55}, "num_hidden_layers"),
        (NANO, {"n_groups": 7}, "in whole groups"),
        (NANO, {"conv_kernel": 1}, "at least 2 tokens"),
        (NANO, {"rms_norm_eps": 1e-3}, "which are the same"),
        (NANO, {"time_step_limit": [0.1]}, "two numbers"),
        (NANO, {"time_step_limit": [0.5, 0.1]}, "two numbers"),
        (NANO_EXPERTS, {"n_shared_experts": 2}, "n_shared_experts"),
        (TINY, {"mamba_n_heads": 47}, "of equal sizes"),
        (TINY, {"mamba_d_head": 32}, "mamba_d_head"),
        (TINY, {"position_embedding_type": "alibi"}, "position_embedding_type"),
        (TINY, {"normalization_function": "layernorm"}, "normalization_function"),
        (LFM2, {"conv_L_cache": 1}, "conv_L_cache"),
        (LFM2, {"block_use_swiglu": False}, "block_use_swiglu"),
        (LFM2, {"full_attn_idxs": [2, 16]}, "full_attn_idxs"),
        (LFM2, {"conv_dim": 1024}, "conv_dim"),
    ],
)
def test_what_would_be_another_network_is_refused(config: dict[str, Any], changed: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        define(config | changed)
