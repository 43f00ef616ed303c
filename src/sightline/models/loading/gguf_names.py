"""Translation of GGUF tensor names and layouts to those of Hugging Face.

Owns what a GGUF converter changed on the way in, and undoes it. A tensor that no rule names is refused, never
dropped. Does not read bytes, does not decode them, and does not know metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from sightline.core.errors import UnsupportedModelError

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, one per pair of dimensions.

Converters store the llama3 rope scaling this way. It is part of the config, not a weight.
"""

Layout = Callable[[torch.Tensor], torch.Tensor]
"""Turns a decoded tensor of the file into the one Hugging Face stores."""


@dataclass(frozen=True)
class Heads:
    """The head counts, on which the row order of the projections depends."""

    query: int
    key_value: int


@dataclass(frozen=True)
class TensorSource:
    """Where a Hugging Face tensor comes from."""

    name: str
    """Its name in the file."""
    layout: Layout


def translate_tensors(architecture: str, names: Iterable[str], heads: Heads) -> dict[str, TensorSource]:
    """Sources by Hugging Face name. Every tensor of the file is mapped or refused."""
    translated: dict[str, TensorSource] = {}
    for name in names:
        if name == ROPE_FACTORS and architecture == "llama":
            continue
        rule, layer = _rule(architecture, name)
        if rule is None:
            raise UnsupportedModelError(
                f"expected only tensors of the architecture {architecture!r}, got {name!r}, which would be "
                "left out of the result. Use a conversion of a plain model, or a folder of safetensors."
            )
        translated[rule.name.format(layer=layer)] = TensorSource(name, rule.layout(heads))
    return translated


def _unchanged(_heads: Heads) -> Layout:
    return lambda tensor: tensor


def _minus_one(_heads: Heads) -> Layout:
    """Gemma scales by (1 + weight); its converter stores the sum so that a plain norm can read it."""
    return lambda tensor: tensor - 1.0


def _query_rows(heads: Heads) -> Layout:
    return lambda tensor: _split_pairs(tensor, heads.query)


def _key_rows(heads: Heads) -> Layout:
    return lambda tensor: _split_pairs(tensor, heads.key_value)


def _split_pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes the row order for rotary embeddings that rotate neighbouring rows.

    Within each head, rows (0, half, 1, half + 1, ...) become (0, 1, ..., half, half + 1, ...).
    """
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


@dataclass(frozen=True)
class _Rule:
    name: str
    """Hugging Face name; `{layer}` stands for the layer's number."""
    layout: Callable[[Heads], Layout] = _unchanged


def _rule(architecture: str, name: str) -> tuple[_Rule | None, str]:
    prefix, _, rest = name.partition(".")
    layer, _, suffix = rest.partition(".")
    if prefix == "blk" and layer.isascii() and layer.isdecimal() and layer == str(int(layer)):
        return _RULES[architecture].get(f"blk.*.{suffix}"), layer
    return _RULES[architecture].get(name), ""


_LAYER = "model.layers.{layer}"

_PROJECTIONS: Mapping[str, _Rule] = MappingProxyType(
    {
        "token_embd.weight": _Rule("model.embed_tokens.weight"),
        "output.weight": _Rule("lm_head.weight"),
        "blk.*.attn_v.weight": _Rule(f"{_LAYER}.self_attn.v_proj.weight"),
        "blk.*.attn_output.weight": _Rule(f"{_LAYER}.self_attn.o_proj.weight"),
        "blk.*.ffn_gate.weight": _Rule(f"{_LAYER}.mlp.gate_proj.weight"),
        "blk.*.ffn_up.weight": _Rule(f"{_LAYER}.mlp.up_proj.weight"),
        "blk.*.ffn_down.weight": _Rule(f"{_LAYER}.mlp.down_proj.weight"),
    }
)

_RULES: Mapping[str, Mapping[str, _Rule]] = MappingProxyType(
    {
        "llama": {
            **_PROJECTIONS,
            "output_norm.weight": _Rule("model.norm.weight"),
            "blk.*.attn_norm.weight": _Rule(f"{_LAYER}.input_layernorm.weight"),
            "blk.*.ffn_norm.weight": _Rule(f"{_LAYER}.post_attention_layernorm.weight"),
            "blk.*.attn_q.weight": _Rule(f"{_LAYER}.self_attn.q_proj.weight", _query_rows),
            "blk.*.attn_k.weight": _Rule(f"{_LAYER}.self_attn.k_proj.weight", _key_rows),
            "blk.*.attn_q.bias": _Rule(f"{_LAYER}.self_attn.q_proj.bias", _query_rows),
            "blk.*.attn_k.bias": _Rule(f"{_LAYER}.self_attn.k_proj.bias", _key_rows),
            "blk.*.attn_v.bias": _Rule(f"{_LAYER}.self_attn.v_proj.bias"),
            "blk.*.attn_output.bias": _Rule(f"{_LAYER}.self_attn.o_proj.bias"),
            "blk.*.ffn_gate.bias": _Rule(f"{_LAYER}.mlp.gate_proj.bias"),
            "blk.*.ffn_up.bias": _Rule(f"{_LAYER}.mlp.up_proj.bias"),
            "blk.*.ffn_down.bias": _Rule(f"{_LAYER}.mlp.down_proj.bias"),
        },
        "gemma3": {
            **_PROJECTIONS,
            "output_norm.weight": _Rule("model.norm.weight", _minus_one),
            "blk.*.attn_q.weight": _Rule(f"{_LAYER}.self_attn.q_proj.weight"),
            "blk.*.attn_k.weight": _Rule(f"{_LAYER}.self_attn.k_proj.weight"),
            "blk.*.attn_q_norm.weight": _Rule(f"{_LAYER}.self_attn.q_norm.weight", _minus_one),
            "blk.*.attn_k_norm.weight": _Rule(f"{_LAYER}.self_attn.k_norm.weight", _minus_one),
            "blk.*.attn_norm.weight": _Rule(f"{_LAYER}.input_layernorm.weight", _minus_one),
            "blk.*.post_attention_norm.weight": _Rule(f"{_LAYER}.post_attention_layernorm.weight", _minus_one),
            "blk.*.ffn_norm.weight": _Rule(f"{_LAYER}.pre_feedforward_layernorm.weight", _minus_one),
            "blk.*.post_ffw_norm.weight": _Rule(f"{_LAYER}.post_feedforward_layernorm.weight", _minus_one),
        },
    }
)
