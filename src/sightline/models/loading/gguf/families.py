"""Translates the GGUF metadata of each architecture to the keys of a Hugging Face config.json.

Owns one reader per architecture, and the facts that converters leave out because llama.cpp knows them: layer patterns,
query scales, gates. Does not know tensor layouts, nor which keys may be ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sightline.core.errors import UnsupportedModelError
from sightline.models.loading.gguf.config_values import ArchitectureKeys, divided

_Config = dict[str, object]


@dataclass(frozen=True)
class ArchitectureReader:
    """How one `general.architecture` states its config."""

    read: Callable[[ArchitectureKeys], _Config]
    keys: frozenset[str] = frozenset()
    """Keys below the architecture's prefix that `read` uses, in addition to those that all architectures share."""


def _silu(keys: ArchitectureKeys, family: str, model_type: str) -> _Config:
    """The fields of an architecture with SiLU gates. The head size may be left out: then it is the width per head."""
    config = keys.common_config()
    per_head = 0 if "attention.key_length" in keys else divided(config, "hidden_size", "num_attention_heads")
    return config | {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": model_type,
        "head_dim": keys.head_dim(per_head),
        "hidden_act": "silu",
    }


def _llama(keys: ArchitectureKeys) -> _Config:
    """Llama, or Mistral: converters call both "llama", and only Mistral has a sliding window."""
    if not keys.has_window():
        return _silu(keys, "Llama", "llama") | {
            "attention_bias": "blk.0.attn_q.bias" in keys.shapes,
            "mlp_bias": "blk.0.ffn_gate.bias" in keys.shapes,
        }
    for foreign in ("blk.0.attn_q.bias", "blk.0.ffn_gate.bias", "rope_freqs.weight"):
        if foreign in keys.shapes:
            raise UnsupportedModelError(
                "expected no biases and no rope factors beside 'llama.attention.sliding_window', as in Mistral, got "
                f"{foreign!r}. Use the model's folder of safetensors."
            )
    return _silu(keys, "Mistral", "mistral") | {"sliding_window": keys.positive("attention.sliding_window")}


def _qwen2(keys: ArchitectureKeys) -> _Config:
    return _silu(keys, "Qwen2", "qwen2") | {"use_sliding_window": False}


def _qwen3(keys: ArchitectureKeys) -> _Config:
    return _silu(keys, "Qwen3", "qwen3") | {"attention_bias": False, "use_sliding_window": False}


def _qwen3moe(keys: ArchitectureKeys) -> _Config:
    num_experts, num_used = keys.expert_counts()
    return _silu(keys, "Qwen3Moe", "qwen3_moe") | {
        "attention_bias": False,
        "use_sliding_window": False,
        "num_experts": num_experts,
        "num_experts_per_tok": num_used,
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        # The architecture has experts in every layer and always normalises the weights of those chosen.
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _gemma(keys: ArchitectureKeys, family: str, model_type: str, *, period: int, layers_of_27b: int) -> _Config:
    config, size = keys.common_config(), keys.head_dim(256)
    # The converter stores no query scale. Only the 27B model, told by its number of layers, scales by width per head.
    is_27b = keys.num_layers() == layers_of_27b
    return config | {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": model_type,
        "head_dim": size,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": divided(config, "hidden_size", "num_attention_heads") if is_27b else size,
        "layer_types": keys.layer_types(period),
        "attention_bias": False,
    }


def _gemma2(keys: ArchitectureKeys) -> _Config:
    return _gemma(keys, "Gemma2", "gemma2", period=2, layers_of_27b=46) | {
        "sliding_window": keys.positive("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.softcapping("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.softcapping("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: ArchitectureKeys) -> _Config:
    return _gemma(keys, "Gemma3", "gemma3_text", period=6, layers_of_27b=62) | {
        "sliding_window": keys.positive("attention.sliding_window"),
        "rope_theta": keys.positive_number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.positive_number("rope.freq_base_swa", 10_000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.softcapping("final_logit_softcapping", None),
    }


def _gpt_oss(keys: ArchitectureKeys) -> _Config:
    num_experts, num_used = keys.expert_counts()
    config = _silu(keys, "GptOss", "gpt_oss")
    # If this model's config had no scaling it would mean YaRN. The YaRN of this model does not round its range.
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    assert isinstance(scaling, dict)
    return config | {
        "intermediate_size": keys.positive("expert_feed_forward_length", keys.uniform("feed_forward_length")),
        "num_local_experts": num_experts,
        "num_experts_per_tok": num_used,
        "sliding_window": keys.positive("attention.sliding_window"),
        "layer_types": keys.layer_types(2),
        "rope_scaling": scaling | ({"truncate": False} if scaling["rope_type"] == "yarn" else {}),
        "attention_bias": True,
        "swiglu_limit": 7.0,
    }


_WINDOW = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})
_EXPERTS = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})

CONFIG_READERS: Mapping[str, ArchitectureReader] = MappingProxyType(
    {
        "llama": ArchitectureReader(_llama, frozenset({"attention.sliding_window"})),
        "qwen2": ArchitectureReader(_qwen2),
        "qwen3": ArchitectureReader(_qwen3),
        "qwen3moe": ArchitectureReader(_qwen3moe, _EXPERTS),
        "gemma2": ArchitectureReader(_gemma2, _WINDOW | {"attn_logit_softcapping", "final_logit_softcapping"}),
        "gemma3": ArchitectureReader(_gemma3, _WINDOW | {"rope.freq_base_swa", "final_logit_softcapping"}),
        "gpt-oss": ArchitectureReader(_gpt_oss, _EXPERTS | _WINDOW),
    }
)
"""By `general.architecture`."""
