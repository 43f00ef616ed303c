"""Tiny Gemma 4 models, with and without what the published sizes have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Gemma4ForCausalLM, Gemma4TextConfig, PreTrainedModel

_KINDS = ["sliding_attention", "full_attention"]
_ROPE = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 300.0,
        "partial_rotary_factor": 0.5,
        "factor": 2.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}


def _gemma4(common: dict[str, Any], **options: Any) -> PreTrainedModel:
    settings = {
        "num_hidden_layers": 6,
        "layer_types": [*_KINDS, *_KINDS, *_KINDS],
        "sliding_window": 10,
        "global_head_dim": 16,
        "rope_parameters": _ROPE,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    }
    model = Gemma4ForCausalLM(Gemma4TextConfig(**common | settings | options))
    for index, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.6 + 0.2 * index)
    return model


def _small(common: dict[str, Any]) -> PreTrainedModel:
    """Like the small published sizes: inputs for each layer, and wide layers that share the cache of others."""
    return _gemma4(
        common,
        num_hidden_layers=7,
        layer_types=["sliding_attention", *_KINDS, "sliding_attention", "sliding_attention", *_KINDS],
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=common["vocab_size"],
    )


def _large(common: dict[str, Any]) -> PreTrainedModel:
    """Like the large dense size: layers with full attention have fewer heads, whose values are their keys."""
    return _gemma4(common, attention_k_eq_v=True, num_global_key_value_heads=1, attention_bias=True)


SHARING = ("gemma4",)
"""Families with layers that read the cache of others."""
GEMMA4: dict[str, Callable[[dict[str, Any]], PreTrainedModel]] = {"gemma4": _small, "gemma4_large": _large}
