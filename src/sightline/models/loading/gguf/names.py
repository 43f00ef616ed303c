"""Translation of GGUF tensor names to those of Hugging Face.

Owns the rules that say which tensors of a file make up which Hugging Face tensor. A tensor without a rule is an error.
Does not read bytes, does not decode them, and does not know metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.models.loading.gguf.config_values import TensorShapes
from sightline.models.loading.gguf.layouts import (
    INTERLEAVED,
    MINUS_ONE,
    TRANSPOSED,
    UNCHANGED,
    TensorLayout,
    split_pairs,
)

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, one per pair of dimensions.

Converters store the llama3 rope scaling as this tensor. Here it becomes part of the config.
"""


@dataclass(frozen=True)
class LayoutNumbers:
    """The numbers on which layouts depend."""

    query_heads: int
    key_value_heads: int
    experts: int
    """0 in a model without experts."""


@dataclass(frozen=True)
class TensorSource:
    """The tensors of the file that make up one Hugging Face tensor."""

    names: tuple[str, ...]
    """Names in the file, in the order in which `layout` takes them."""
    layout: TensorLayout
    shape: tuple[int, ...]
    """The shape of the Hugging Face tensor."""
    expert: int | None = None
    """If set, only this index of the outermost dimension is used."""


def translate_tensors(architecture: str, shapes: TensorShapes, counts: LayoutNumbers) -> dict[str, TensorSource]:
    """Sources by Hugging Face name. Every tensor of the file is mapped or refused."""
    translated: dict[str, TensorSource] = {}
    for name in shapes:
        if name == ROPE_FACTORS and architecture == "llama":
            continue
        rule, layer = _rule(architecture, name)
        if rule is None:
            raise UnsupportedModelError(
                f"expected only tensors of the architecture {architecture!r}, got {name!r}, which would be "
                "left out of the result. Use a conversion of a plain model, or a folder of safetensors."
            )
        translated.update(_sources(rule, name, layer, shapes, counts))
    return translated


@dataclass(frozen=True)
class _Rule:
    name: str
    """Hugging Face name; `{layer}` and `{expert}` stand for numbers."""
    layout: TensorLayout | Callable[[LayoutNumbers], TensorLayout] = UNCHANGED
    parts: tuple[str, ...] = ()
    """If several tensors make up this one: their names below the layer."""


def _sources(
    rule: _Rule, name: str, layer: str, shapes: TensorShapes, counts: LayoutNumbers
) -> Iterator[tuple[str, TensorSource]]:
    layout = rule.layout if isinstance(rule.layout, TensorLayout) else rule.layout(counts)
    if "{expert}" in rule.name:
        shape = shapes[name]
        if len(shape) != 3 or shape[0] != counts.experts:
            raise CheckpointError(
                f"expected {name!r} of shape [{counts.experts} experts, out, in], got {list(shape)}. "
                "Convert the model again."
            )
        for expert in range(counts.experts):
            yield rule.name.format(layer=layer, expert=expert), TensorSource((name,), layout, shape[1:], expert)
        return
    names = tuple(f"blk.{layer}.{part}" for part in rule.parts) or (name,)
    found = [shapes.get(part) for part in names]
    result = None if None in found else layout.shape(*found)
    if result is None:
        raise CheckpointError(
            f"expected {' and '.join(map(repr, names))} of shapes that go together, got "
            f"{' and '.join(str(None if shape is None else list(shape)) for shape in found)}. Convert the model again."
        )
    yield rule.name.format(layer=layer), TensorSource(names, layout, result)


def _rule(architecture: str, name: str) -> tuple[_Rule | None, str]:
    prefix, _, rest = name.partition(".")
    layer, _, suffix = rest.partition(".")
    if prefix == "blk" and layer.isascii() and layer.isdecimal() and layer == str(int(layer)):
        return _LAYER_RULES[architecture].get(suffix), layer
    return _OUTER_RULES[architecture].get(name), ""


_LAYER = "model.layers.{layer}."
_Rules = dict[str, _Rule]


def _rules(
    suffix: str, names: Mapping[str, str], layout: TensorLayout | Callable[[LayoutNumbers], TensorLayout] = UNCHANGED
) -> _Rules:
    """Rules for tensors whose names differ between the formats only before the `suffix`."""
    return {f"{own}.{suffix}": _Rule(f"{_LAYER}{name}.{suffix}", layout) for own, name in names.items()}


def _outer(norm: TensorLayout) -> _Rules:
    return {
        "token_embd.weight": _Rule("model.embed_tokens.weight"),
        "output.weight": _Rule("lm_head.weight"),
        "output_norm.weight": _Rule("model.norm.weight", norm),
    }


_OUTER_RULES: Mapping[str, _Rules] = MappingProxyType(
    {
        **{name: _outer(UNCHANGED) for name in ("llama", "qwen2", "qwen3", "qwen3moe", "gpt-oss")},
        **{name: _outer(MINUS_ONE) for name in ("gemma2", "gemma3")},
    }
)

_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_Q, _K, _V = {"attn_q": "self_attn.q_proj"}, {"attn_k": "self_attn.k_proj"}, {"attn_v": "self_attn.v_proj"}
_ATTENTION = {**_Q, **_K, **_V, "attn_output": "self_attn.o_proj"}
_FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}


def _llama() -> _Rules:
    rules = _rules("weight", _NORMS | _ATTENTION | _FEED_FORWARD) | _rules("bias", _ATTENTION | _FEED_FORWARD)
    for suffix in ("weight", "bias"):
        rules |= _rules(suffix, _Q, lambda counts: split_pairs(counts.query_heads))
        rules |= _rules(suffix, _K, lambda counts: split_pairs(counts.key_value_heads))
    return rules


def _gpt_oss() -> _Rules:
    rules = _rules("weight", {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"})
    for suffix, ending in (("weight", ""), ("bias", "_bias")):
        rules |= _rules(suffix, _ATTENTION | {"ffn_gate_inp": "mlp.router"})
        parts = (f"ffn_gate_exps.{suffix}", f"ffn_up_exps.{suffix}")
        gate_up = _Rule(f"{_LAYER}mlp.experts.gate_up_proj{ending}", INTERLEAVED, parts)
        rules |= dict.fromkeys(parts, gate_up)
    return rules | {
        "attn_sinks.weight": _Rule(f"{_LAYER}self_attn.sinks"),
        "ffn_down_exps.weight": _Rule(f"{_LAYER}mlp.experts.down_proj", TRANSPOSED),
        "ffn_down_exps.bias": _Rule(f"{_LAYER}mlp.experts.down_proj_bias"),
    }


_GEMMA = _rules("weight", _SANDWICH_NORMS, MINUS_ONE) | _rules("weight", _ATTENTION | _FEED_FORWARD)
_LAYER_RULES: Mapping[str, _Rules] = MappingProxyType(
    {
        "llama": _llama(),
        "qwen2": _rules("weight", _NORMS | _ATTENTION | _FEED_FORWARD) | _rules("bias", _Q | _K | _V),
        "qwen3": _rules("weight", _NORMS | _ATTENTION | _HEAD_NORMS | _FEED_FORWARD),
        "qwen3moe": _rules("weight", _NORMS | _ATTENTION | _HEAD_NORMS | _EXPERTS),
        "gemma2": _GEMMA,
        "gemma3": _GEMMA | _rules("weight", _HEAD_NORMS, MINUS_ONE),
        "gpt-oss": _gpt_oss(),
    }
)
"""By architecture and by the name below the layer."""
