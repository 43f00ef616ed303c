"""Tiny Qwen3-Next and Qwen3.5, for the tiny models of all families."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from support.tiny_deepseek import Sizes

LINEAR, FULL = "linear_attention", "full_attention"
SLOW = -2.0
"""The centre of the logarithms of decay rates. With transformers' own, a state is forgotten within a token or two."""
HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 7,
    "num_experts_per_tok": 3,
}
ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
MROPE = ROPE | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}


def _sizes(common: Sizes, **options: object) -> Sizes:
    kinds = {"num_hidden_layers": 4, "layer_types": [LINEAR, FULL, LINEAR, LINEAR]}
    # Older releases of transformers store their own factor beside the one in the section.
    return {**common, **HEADS, **kinds, "rope_parameters": ROPE, "partial_rotary_factor": 0.5, **options}


def slowed(model: PreTrainedModel) -> PreTrainedModel:
    """The model, whose states last."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(SLOW)
    return model


def _qwen3_next(common: Sizes, **options: object) -> PreTrainedModel:
    return slowed(Qwen3NextForCausalLM(Qwen3NextConfig(**_sizes(common, **EXPERTS) | options)))


def _qwen3_5(common: Sizes, **options: object) -> PreTrainedModel:
    return slowed(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_sizes(common) | options)))


def _qwen3_5_moe(common: Sizes, **options: object) -> PreTrainedModel:
    sizes = {name: value for name, value in _sizes(common, **EXPERTS).items() if name != "intermediate_size"}
    return slowed(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**sizes | options)))


QWEN_HYBRID: dict[str, Callable[[Sizes], PreTrainedModel]] = {
    "qwen3_next": partial(_qwen3_next, attention_bias=True, mlp_only_layers=[2]),
    "qwen3_next_plain": partial(
        _qwen3_next, layer_types=None, full_attention_interval=2, norm_topk_prob=False, tie_word_embeddings=True
    ),
    "qwen3_5": partial(_qwen3_5, rope_parameters=MROPE, tie_word_embeddings=True),
    "qwen3_5_moe": _qwen3_5_moe,
}
"""By family: made from the sizes that all tiny models have in common."""


def with_vision(common: Sizes, *, experts: bool) -> PreTrainedModel:
    """Qwen3.5 with networks for images beside the one for text."""
    sizes = _sizes(common, rope_parameters=MROPE)
    special = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    if experts:
        text = {name: value for name, value in (sizes | EXPERTS).items() if name != "intermediate_size"}
        config = Qwen3_5MoeConfig(text_config=text, vision_config=dict(VISION), **special)
        return slowed(Qwen3_5MoeForConditionalGeneration(config))
    config = Qwen3_5Config(text_config=sizes, vision_config=dict(VISION), tie_word_embeddings=True, **special)
    return slowed(Qwen3_5ForConditionalGeneration(config))
