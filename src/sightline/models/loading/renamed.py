"""Gives the tensors of a checkpoint the names that definitions ask for.

A decoder that was saved without its output projection, as embedding models are, has tensors `layers.0…` where the whole
model has `model.layers.0…`. Some families name the parts of a layer in their own way:

    stored                                              standard
    kimi_linear, minimax    block_sparse_moe            mlp
                            experts.N.w1, w3, w2        experts.N.gate_proj, up_proj, down_proj
    granitemoehybrid        shared_mlp.input_linear     mlp.gate_up_proj
                            block_sparse_moe            mlp
    nemotron_h              backbone.embeddings         model.embed_tokens
                            norm                        input_layernorm
                            mixer                       self_attn, mamba or mlp
    lfm2, lfm2_moe          operator_norm, ffn_norm     input_layernorm, post_attention_layernorm
                            feed_forward.w1, w3, w2     mlp.gate_proj, up_proj, down_proj
    bailing_hybrid          model.word_embeddings       model.embed_tokens
                            attention, attention.dense  self_attn, self_attn.o_proj
                            mlp.gate.expert_bias        mlp.gate.e_score_correction_bias
    qwen3_5                 model.language_model        model
    deepseek_v4             embed, head, hc_head_fn     model.embed_tokens, lm_head, model.hc_head.hc_fn
                            attn, ffn, attn_norm        self_attn, mlp, input_layernorm
                            wq_a, wkv, wgate, ape       q_a_proj, kv_proj, gate_proj, position_bias
                            indexer.compressor          compressor.indexer

A checkpoint may use the standard name of a part instead: transformers writes the dense layers of Kimi Linear under
`block_sparse_moe`, and the original repository under `mlp`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from sightline.core.errors import CheckpointError
from sightline.kernels.block_weights import BlockWeights
from sightline.kernels.coded_weights import CodedWeights
from sightline.models.loading.checkpoint import Checkpoint
from sightline.text.tokenizers.tokenizer import Tokenizer

PREFIX = "model."
_TELLING = "embed_tokens.weight"
"""A tensor that every decoder has: under this name if the prefix is missing."""
Rules = tuple[tuple[re.Pattern[str], str], ...]
"""Parts of stored names and what replaces them, applied in this order."""


def _rules(**replacements: str) -> Rules:
    return tuple((re.compile(pattern), name) for pattern, name in replacements.items())


_MIXTRAL = _rules(
    **{
        r"\.block_sparse_moe\.": ".mlp.",
        r"(\.experts\.\d+)\.w1\.": r"\1.gate_proj.",
        r"(\.experts\.\d+)\.w3\.": r"\1.up_proj.",
        r"(\.experts\.\d+)\.w2\.": r"\1.down_proj.",
    }
)
_BESIDE_VISION = _rules(**{r"^model\.language_model\.": "model."})
_LFM2 = _rules(
    **{
        r"^model\.embedding_norm\.": "model.norm.",
        r"\.operator_norm\.": ".input_layernorm.",
        r"\.ffn_norm\.": ".post_attention_layernorm.",
        r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
        r"\.([qk])_layernorm\.": r".\1_norm.",
        r"\.feed_forward\.expert_bias$": ".mlp.gate.e_score_correction_bias",
        r"\.feed_forward\.": ".mlp.",
        r"(\.mlp(?:\.experts\.\d+)?)\.w1\.": r"\1.gate_proj.",
        r"(\.mlp(?:\.experts\.\d+)?)\.w3\.": r"\1.up_proj.",
        r"(\.mlp(?:\.experts\.\d+)?)\.w2\.": r"\1.down_proj.",
    }
)
_DEEPSEEK_V4 = _rules(
    **{
        r"^embed\.": "model.embed_tokens.",
        r"^head\.": "lm_head.",
        r"^(layers|norm)\.": r"model.\1.",
        r"^hc_head_(fn|base|scale)$": r"model.hc_head.hc_\1",
        r"\.hc_(attn|ffn)_(fn|base|scale)$": r".\1_hc.\2",
        r"\.attn_norm\.": ".input_layernorm.",
        r"\.ffn_norm\.": ".post_attention_layernorm.",
        r"\.attn\.": ".self_attn.",
        r"\.ffn\.": ".mlp.",
        r"\.self_attn\.indexer\.compressor\.": ".self_attn.compressor.indexer.",
        r"\.self_attn\.indexer\.weights_proj\.": ".self_attn.compressor.indexer.scorer.weights_proj.",
        r"\.self_attn\.indexer\.": ".self_attn.compressor.indexer.",
        r"\.attn_sink$": ".sinks",
        r"\.ape$": ".position_bias",
        r"\.q_norm\.": ".q_a_norm.",
        r"(\.self_attn(?:\.compressor(?:\.indexer)?)?)\.norm\.": r"\1.kv_norm.",
        r"\.w([qo])_([ab])\.": r".\1_\2_proj.",
        r"\.wkv\.": ".kv_proj.",
        r"\.wgate\.": ".gate_proj.",
        r"\.mlp\.gate\.bias$": ".mlp.gate.e_score_correction_bias",
        r"(experts(?:\.\d+)?)\.w1\.": r"\1.gate_proj.",
        r"(experts(?:\.\d+)?)\.w3\.": r"\1.up_proj.",
        r"(experts(?:\.\d+)?)\.w2\.": r"\1.down_proj.",
    }
)
RULES: Mapping[str, Rules] = MappingProxyType(
    {
        **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _BESIDE_VISION),
        "granitemoehybrid": _rules(
            **{
                r"\.shared_mlp\.input_linear\.": ".mlp.gate_up_proj.",
                r"\.shared_mlp\.output_linear\.": ".mlp.down_proj.",
                r"\.block_sparse_moe\.input_linear\.weight$": ".mlp.experts.gate_up_proj",
                r"\.block_sparse_moe\.output_linear\.weight$": ".mlp.experts.down_proj",
                r"\.block_sparse_moe\.router\.(layer\.)?": ".mlp.gate.",
                r"\.block_sparse_moe\.": ".mlp.",
            }
        ),
        "nemotron_h": _rules(
            **{
                r"^backbone\.": "model.",
                r"^model\.embeddings\.": "model.embed_tokens.",
                r"^model\.norm_f\.": "model.norm.",
                r"(\.layers\.\d+)\.norm\.": r"\1.input_layernorm.",
                r"\.mixer\.([qkvo]_proj)\.": r".self_attn.\1.",
                r"\.mixer\.(A_log|D|dt_bias|(?:conv1d|in_proj|norm|out_proj)\..*)$": r".mamba.\1",
                r"\.mixer\.": ".mlp.",
            }
        ),
        "lfm2": _LFM2,
        "lfm2_moe": _LFM2,
        "deepseek_v4": _DEEPSEEK_V4,
        "kimi_linear": _MIXTRAL,
        "minimax": _MIXTRAL,
        "bailing_hybrid": _rules(
            **{
                r"^model\.word_embeddings\.": "model.embed_tokens.",
                r"\.attention\.dense\.": ".self_attn.o_proj.",
                r"\.attention\.": ".self_attn.",
                r"\.gate\.expert_bias$": ".gate.e_score_correction_bias",
            }
        ),
    }
)
"""By `model_type`."""


class RenamedCheckpoint(Checkpoint):
    """A view of another checkpoint with other names."""

    def __init__(self, stored: Checkpoint, names: Mapping[str, str]) -> None:
        """`names` has the stored name of each tensor by its new one."""
        self._stored = stored
        self._names = names
        tensors = {name: stored.tensors[old] for name, old in names.items()}
        super().__init__(stored.location, stored.config, MappingProxyType(tensors), stored.generation)

    def load_scales(self, name: str) -> torch.Tensor | None:
        self._check_name(name)
        return self._stored.load_scales(self._names[name])

    def file_of(self, name: str) -> Path:
        self._check_name(name)
        return self._stored.file_of(self._names[name])

    def load_tokenizer(self) -> Tokenizer:
        return self._stored.load_tokenizer()

    def _read(self, name: str) -> torch.Tensor:
        return self._stored.load(self._names[name])

    def _read_packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self._stored.load_packed(self._names[name])

    def _read_codes(self, name: str) -> CodedWeights:
        return self._stored.load_codes(self._names[name])

    def _read_blocks(self, name: str) -> BlockWeights:
        return self._stored.load_blocks(self._names[name])


def with_standard_names(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under the names that definitions ask for. Raises if two tensors would have the same."""
    rules = RULES.get(str(checkpoint.config.get("model_type")), ())
    prefix = PREFIX if _TELLING in checkpoint.tensors else ""
    names: dict[str, str] = {}
    for stored in checkpoint.tensors:
        name = standard_name(stored, rules, prefix)
        if name in names:
            raise CheckpointError(
                f"expected one tensor {name} in {checkpoint.location}, got {names[name]} and {stored}; remove the one "
                "that does not belong to the model"
            )
        names[name] = stored
    return RenamedCheckpoint(checkpoint, names) if list(names) != list(names.values()) else checkpoint


def standard_name(stored: str, rules: Rules, prefix: str = "") -> str:
    """The name that definitions ask for."""
    name = prefix + stored
    for pattern, replacement in rules:
        name = pattern.sub(replacement, name)
    return name
