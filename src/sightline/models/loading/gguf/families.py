"""What the GGUF metadata of each architecture says, in the keys of its Hugging Face config.json.

Owns one reader an architecture, with what converters leave out because llama.cpp knows it: layer patterns, query
scales, gates. Does not know tensor layouts, nor which keys may be ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sightline.core.errors import UnsupportedModelError
from sightline.models.loading.gguf.config_values import (
    TensorShapes,
    common_config,
    divided,
    expert_counts,
    head_dim,
    layer_types,
    num_layers,
    positive,
    positive_number,
    softcapping,
    uniform,
)
from sightline.text.tokenizers.gguf_metadata import GgufMetadata


@dataclass(frozen=True)
class ArchitectureReader:
    """How one `general.architecture` states its config."""

    read: Callable[[GgufMetadata, TensorShapes], dict[str, object]]
    keys: frozenset[str] = frozenset()
    """Keys below the architecture's prefix that `read` uses, beside the ones that all architectures share."""


def _llama(metadata: GgufMetadata, shapes: TensorShapes) -> dict[str, object]:
    """Llama, and Mistral, which converters call "llama" as well: a sliding window is what tells it apart."""
    config = common_config(metadata, shapes, "llama")
    config.update(head_dim=_head_dim_or_share(metadata, config, "llama"), hidden_act="silu")
    window = "llama.attention.sliding_window"
    if not metadata.integer(window):
        config.update(
            architectures=["LlamaForCausalLM"],
            model_type="llama",
            attention_bias="blk.0.attn_q.bias" in shapes,
            mlp_bias="blk.0.ffn_gate.bias" in shapes,
        )
        return config
    foreign = [name for name in ("blk.0.attn_q.bias", "blk.0.ffn_gate.bias", "rope_freqs.weight") if name in shapes]
    if foreign:
        raise UnsupportedModelError(
            f"expected no biases and no rope factors beside {window!r}, as in Mistral, got {foreign[0]!r}. "
            "Use the model's folder of safetensors."
        )
    config.update(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=positive(metadata, window))
    return config


def _qwen2(metadata: GgufMetadata, shapes: TensorShapes) -> dict[str, object]:
    config = common_config(metadata, shapes, "qwen2")
    config.update(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        head_dim=_head_dim_or_share(metadata, config, "qwen2"),
        hidden_act="silu",
        use_sliding_window=False,
    )
    return config


def _qwen3(metadata: GgufMetadata, shapes: TensorShapes) -> dict[str, object]:
    config = common_config(metadata, shapes, "qwen3")
    config.update(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        head_dim=_head_dim_or_share(metadata, config, "qwen3"),
        hidden_act="silu",
        attention_bias=False,
        use_sliding_window=False,
    )
    return config


def _qwen3moe(metadata: GgufMetadata, shapes: TensorShapes) -> dict[str, object]:
    config = common_config(metadata, shapes, "qwen3moe")
    num_experts, num_used = expert_counts(metadata, "qwen3moe")
    config.update(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        head_dim=_head_dim_or_share(metadata, config, "qwen3moe"),
        hidden_act="silu",
        attention_bias=False,
        use_sliding_window=False,
        num_experts=num_experts,
        num_experts_per_tok=num_used,
        moe_intermediate_size=positive(metadata, "qwen3moe.expert_feed_forward_length"),
        # The architecture has experts in every layer and always normalises the weights of those chosen.
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    )
    return config


def _gemma2(metadata: GgufMetadata, shapes: TensorShapes) -> dict[str, object]:
    config = common_config(metadata, shapes, "gemma2")
    size = head_dim(metadata, "gemma2", 256)
    layers = num_layers(metadata, shapes, "gemma2")
    config.update(
        architectures=["Gemma2ForCausalLM"],
        model_type="gemma2",
        head_dim=size,
        hidden_activation="gelu_pytorch_tanh",
        # The converter stores no query scale. The 27B model, alone with 46 layers, scales by its width per head.
        query_pre_attn_scalar=divided(config, "hidden_size", "num_attention_heads") if layers == 46 else size,
        sliding_window=positive(metadata, "gemma2.attention.sliding_window", 4096),
        layer_types=layer_types(metadata, "gemma2", layers, 2),
        attention_bias=False,
        attn_logit_softcapping=softcapping(metadata, "gemma2.attn_logit_softcapping", 50.0),
        final_logit_softcapping=softcapping(metadata, "gemma2.final_logit_softcapping", 30.0),
    )
    return config


def _gemma3(metadata: GgufMetadata, shapes: TensorShapes) -> dict[str, object]:
    config = common_config(metadata, shapes, "gemma3")
    size = head_dim(metadata, "gemma3", 256)
    layers = num_layers(metadata, shapes, "gemma3")
    config.update(
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        head_dim=size,
        hidden_activation="gelu_pytorch_tanh",
        # As for Gemma 2; here the 27B model is the one of 62 layers.
        query_pre_attn_scalar=divided(config, "hidden_size", "num_attention_heads") if layers == 62 else size,
        sliding_window=positive(metadata, "gemma3.attention.sliding_window"),
        layer_types=layer_types(metadata, "gemma3", layers, 6),
        rope_theta=positive_number(metadata, "gemma3.rope.freq_base", 1_000_000.0),
        rope_local_base_freq=positive_number(metadata, "gemma3.rope.freq_base_swa", 10_000.0),
        attention_bias=False,
        attn_logit_softcapping=None,
        final_logit_softcapping=softcapping(metadata, "gemma3.final_logit_softcapping", None),
    )
    return config


def _gpt_oss(metadata: GgufMetadata, shapes: TensorShapes) -> dict[str, object]:
    config = common_config(metadata, shapes, "gpt-oss")
    num_experts, num_used = expert_counts(metadata, "gpt-oss")
    feed_forward = uniform(metadata, "gpt-oss.feed_forward_length")
    scaling = config["rope_scaling"]
    config.update(
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        head_dim=_head_dim_or_share(metadata, config, "gpt-oss"),
        hidden_act="silu",
        intermediate_size=positive(metadata, "gpt-oss.expert_feed_forward_length", feed_forward),
        num_local_experts=num_experts,
        num_experts_per_tok=num_used,
        sliding_window=positive(metadata, "gpt-oss.attention.sliding_window"),
        layer_types=layer_types(metadata, "gpt-oss", num_layers(metadata, shapes, "gpt-oss"), 2),
        # A missing scaling would mean YaRN to this model's config; its YaRN does not round the corrected range.
        rope_scaling={"rope_type": "default"} if not isinstance(scaling, dict) else {**scaling, **_exact_yarn(scaling)},
        attention_bias=True,
        swiglu_limit=7.0,
    )
    return config


def _exact_yarn(scaling: Mapping[str, object]) -> dict[str, object]:
    return {"truncate": False} if scaling["rope_type"] == "yarn" else {}


def _head_dim_or_share(metadata: GgufMetadata, config: Mapping[str, object], prefix: str) -> int:
    """The stated head size, or else the width per head."""
    if f"{prefix}.attention.key_length" in metadata:
        return head_dim(metadata, prefix, 0)
    return head_dim(metadata, prefix, divided(config, "hidden_size", "num_attention_heads"))


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
