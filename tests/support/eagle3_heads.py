"""Tiny random EAGLE-3 heads, saved in both formats, with weights of a scale at which every option matters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from support.eagle3_reference import Eagle3Reference, ReferenceOptions
from support.tiny_models import VOCAB, WEIGHT_SCALE

HIDDEN = 48
DRAFTED = 40
TARGET_LAYERS = 7
LAYER_IDS = (1, 3, 6)
"""States that the heads' configs list unless they say otherwise: what these layers take."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class HeadCase:
    """A kind of head."""

    options: ReferenceOptions = field(default_factory=ReferenceOptions)
    layer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the layer's config."""
    is_qwen3: bool = False
    is_original: bool = False
    """True for the original format, False for that of speculators."""
    layer_ids: tuple[int, ...] | None = LAYER_IDS
    """None for a config that does not list them."""
    num_drafted: int = DRAFTED
    stores_embedding: bool = True
    target_hidden: int = HIDDEN

    @property
    def num_taps(self) -> int:
        return 3 if self.layer_ids is None else len(self.layer_ids)

    def layer_config(self) -> PretrainedConfig:
        fields = {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "attn_implementation": "eager",
        }
        return (Qwen3Config if self.is_qwen3 else LlamaConfig)(**fields | dict(self.layer))


def make_weights(case: HeadCase, seed: int = 0) -> dict[str, Tensor]:
    """Random weights with the names of speculators, always with an embedding."""
    layer = case.layer_config()
    width, heads, kv_heads = layer.head_dim, layer.num_attention_heads, layer.num_key_value_heads
    inner, prefix = layer.intermediate_size, "layers.0."
    matrices = {
        "embed_tokens": (VOCAB, HIDDEN),
        "fc": (HIDDEN, case.num_taps * case.target_hidden),
        "lm_head": (case.num_drafted, HIDDEN),
        prefix + "self_attn.q_proj": (heads * width, 2 * HIDDEN),
        prefix + "self_attn.k_proj": (kv_heads * width, 2 * HIDDEN),
        prefix + "self_attn.v_proj": (kv_heads * width, 2 * HIDDEN),
        prefix + "self_attn.o_proj": (HIDDEN, heads * width),
        prefix + "mlp.gate_proj": (inner, HIDDEN),
        prefix + "mlp.up_proj": (inner, HIDDEN),
        prefix + "mlp.down_proj": (HIDDEN, inner),
    }
    norms = dict.fromkeys(
        ("norm", *(f"{prefix}{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))),
        HIDDEN,
    )
    if case.options.norm_before_fc:
        norms["input_norm"] = case.num_taps * case.target_hidden
    if case.options.fc_norm:
        norms |= {f"fc_norm.{i}": case.target_hidden for i in range(case.num_taps)}
    if case.is_qwen3:
        norms |= {f"{prefix}self_attn.{name}_norm": width for name in "qk"}
    biased = [prefix + f"self_attn.{name}_proj" for name in "qkvo"] if layer.attention_bias else []
    biased += [prefix + f"mlp.{name}_proj" for name in ("gate", "up", "down")] if getattr(layer, "mlp_bias", 0) else []
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * WEIGHT_SCALE

    weights = {f"{name}.weight": noise(*shape) for name, shape in matrices.items()}
    weights |= {f"{name}.weight": 1.0 + noise(size) for name, size in norms.items()}
    weights |= {f"{name}.bias": noise(matrices[name][0]) for name in biased}
    if case.num_drafted < VOCAB:
        tokens = torch.randperm(VOCAB, generator=generator)[: case.num_drafted].sort().values
        weights["d2t"] = tokens - torch.arange(case.num_drafted)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, tokens, True)
    return weights


def make_config(case: HeadCase) -> dict[str, Any]:
    """The contents of config.json."""
    layer = case.layer_config().to_diff_dict()
    head: dict[str, Any] = {"draft_vocab_size": case.num_drafted, **asdict(case.options)}
    if case.target_hidden != HIDDEN:
        head["target_hidden_size"] = case.target_hidden
    if case.is_original:
        if case.layer_ids is not None:
            head["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": [each - 1 for each in case.layer_ids],
                "use_aux_hidden_state": True,
            }
        return {**layer, **head, "architectures": ["LlamaForCausalLMEagle3"]}
    if case.layer_ids is not None:
        head["eagle_aux_hidden_state_layer_ids"] = list(case.layer_ids)
    return {
        **head,
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }


def save_head(case: HeadCase, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Saves weights, which have the names of speculators, and the config in the case's format."""
    stored = {name: each for name, each in weights.items() if case.stores_embedding or "embed" not in name}
    if case.is_original:
        stored = {name.replace("layers.0.", "midlayer."): each for name, each in stored.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(make_config(case)))


def reference(case: HeadCase, weights: Mapping[str, Tensor]) -> Eagle3Reference:
    return Eagle3Reference(case.layer_config(), weights, case.options)


CASES: dict[str, HeadCase] = {
    "plain": HeadCase(),
    "before_residual": HeadCase(ReferenceOptions(norm_before_residual=True)),
    "norm_before_fc": HeadCase(ReferenceOptions(norm_before_fc=True)),
    "fc_norm": HeadCase(ReferenceOptions(fc_norm=True), layer_ids=(0, 2, 5, 7)),
    "norm_output": HeadCase(ReferenceOptions(norm_output=True)),
    "all_norms": HeadCase(ReferenceOptions(norm_before_residual=True, norm_before_fc=True, norm_output=True)),
    "biases": HeadCase(layer={"attention_bias": True, "mlp_bias": True}),
    "rope": HeadCase(layer={"rope_parameters": LLAMA3_ROPE}),
    "qwen3": HeadCase(is_qwen3=True),
    "all_tokens": HeadCase(num_drafted=VOCAB, layer_ids=None),
    "shared_embedding": HeadCase(stores_embedding=False),
    "original": HeadCase(is_original=True, stores_embedding=False),
    "original_embedding": HeadCase(ReferenceOptions(norm_before_residual=True), is_original=True),
    "original_usual_layers": HeadCase(is_original=True, layer_ids=None, stores_embedding=False),
    "wide_target": HeadCase(target_hidden=64, is_original=True),
}
