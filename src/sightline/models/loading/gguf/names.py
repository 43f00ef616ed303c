"""Translation of GGUF tensor names to those of Hugging Face.

Owns which tensors of a file make up which of a checkpoint. A tensor that no rule names is refused, never dropped.
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

Converters store the llama3 rope scaling this way. It is part of the config, not a weight.
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
    """Where a Hugging Face tensor comes from."""

    names: tuple[str, ...]
    """In the file, in the order in which `layout` takes them."""
    layout: TensorLayout
    shape: tuple[int, ...]
    """As Hugging Face has it."""
    expert: int | None = None
    """Only this index of the outermost dimension; None for the whole tensor."""


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
    """The names below the layer of all tensors that make up this one, where they are several."""


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


def _query_rows(counts: LayoutNumbers) -> TensorLayout:
    return split_pairs(counts.query_heads)


def _key_rows(counts: LayoutNumbers) -> TensorLayout:
    return split_pairs(counts.key_value_heads)


def _rule(architecture: str, name: str) -> tuple[_Rule | None, str]:
    prefix, _, rest = name.partition(".")
    layer, _, suffix = rest.partition(".")
    if prefix == "blk" and layer.isascii() and layer.isdecimal() and layer == str(int(layer)):
        return _LAYER_RULES[architecture].get(suffix), layer
    return _OUTER_RULES[architecture].get(name), ""


_LAYER = "model.layers.{layer}"
_Rules = Mapping[str, _Rule]


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

_PLAIN_NORMS: _Rules = {
    "attn_norm.weight": _Rule(f"{_LAYER}.input_layernorm.weight"),
    "ffn_norm.weight": _Rule(f"{_LAYER}.post_attention_layernorm.weight"),
}
_ATTENTION: _Rules = {
    "attn_q.weight": _Rule(f"{_LAYER}.self_attn.q_proj.weight"),
    "attn_k.weight": _Rule(f"{_LAYER}.self_attn.k_proj.weight"),
    "attn_v.weight": _Rule(f"{_LAYER}.self_attn.v_proj.weight"),
    "attn_output.weight": _Rule(f"{_LAYER}.self_attn.o_proj.weight"),
}
_QKV_BIASES: _Rules = {
    "attn_q.bias": _Rule(f"{_LAYER}.self_attn.q_proj.bias"),
    "attn_k.bias": _Rule(f"{_LAYER}.self_attn.k_proj.bias"),
    "attn_v.bias": _Rule(f"{_LAYER}.self_attn.v_proj.bias"),
}
_OUTPUT_BIAS: _Rules = {"attn_output.bias": _Rule(f"{_LAYER}.self_attn.o_proj.bias")}
_HEAD_NORMS: _Rules = {
    "attn_q_norm.weight": _Rule(f"{_LAYER}.self_attn.q_norm.weight"),
    "attn_k_norm.weight": _Rule(f"{_LAYER}.self_attn.k_norm.weight"),
}
_FEED_FORWARD: _Rules = {
    "ffn_gate.weight": _Rule(f"{_LAYER}.mlp.gate_proj.weight"),
    "ffn_up.weight": _Rule(f"{_LAYER}.mlp.up_proj.weight"),
    "ffn_down.weight": _Rule(f"{_LAYER}.mlp.down_proj.weight"),
}
_SANDWICH_NORMS: _Rules = {
    "attn_norm.weight": _Rule(f"{_LAYER}.input_layernorm.weight", MINUS_ONE),
    "post_attention_norm.weight": _Rule(f"{_LAYER}.post_attention_layernorm.weight", MINUS_ONE),
    "ffn_norm.weight": _Rule(f"{_LAYER}.pre_feedforward_layernorm.weight", MINUS_ONE),
    "post_ffw_norm.weight": _Rule(f"{_LAYER}.post_feedforward_layernorm.weight", MINUS_ONE),
}
_LLAMA: _Rules = {
    **_PLAIN_NORMS,
    **_ATTENTION,
    **_QKV_BIASES,
    **_OUTPUT_BIAS,
    **_FEED_FORWARD,
    "attn_q.weight": _Rule(f"{_LAYER}.self_attn.q_proj.weight", _query_rows),
    "attn_k.weight": _Rule(f"{_LAYER}.self_attn.k_proj.weight", _key_rows),
    "attn_q.bias": _Rule(f"{_LAYER}.self_attn.q_proj.bias", _query_rows),
    "attn_k.bias": _Rule(f"{_LAYER}.self_attn.k_proj.bias", _key_rows),
    "ffn_gate.bias": _Rule(f"{_LAYER}.mlp.gate_proj.bias"),
    "ffn_up.bias": _Rule(f"{_LAYER}.mlp.up_proj.bias"),
    "ffn_down.bias": _Rule(f"{_LAYER}.mlp.down_proj.bias"),
}
_QWEN3MOE: _Rules = {
    **_PLAIN_NORMS,
    **_ATTENTION,
    **_HEAD_NORMS,
    "ffn_gate_inp.weight": _Rule(f"{_LAYER}.mlp.gate.weight"),
    "ffn_gate_exps.weight": _Rule(f"{_LAYER}.mlp.experts.{{expert}}.gate_proj.weight"),
    "ffn_up_exps.weight": _Rule(f"{_LAYER}.mlp.experts.{{expert}}.up_proj.weight"),
    "ffn_down_exps.weight": _Rule(f"{_LAYER}.mlp.experts.{{expert}}.down_proj.weight"),
}


def _gate_up(suffix: str, name: str) -> _Rules:
    parts = (f"ffn_gate_exps.{suffix}", f"ffn_up_exps.{suffix}")
    return dict.fromkeys(parts, _Rule(name, INTERLEAVED, parts))


_GPT_OSS: _Rules = {
    "attn_norm.weight": _Rule(f"{_LAYER}.input_layernorm.weight"),
    "post_attention_norm.weight": _Rule(f"{_LAYER}.post_attention_layernorm.weight"),
    **_ATTENTION,
    **_QKV_BIASES,
    **_OUTPUT_BIAS,
    "attn_sinks.weight": _Rule(f"{_LAYER}.self_attn.sinks"),
    "ffn_gate_inp.weight": _Rule(f"{_LAYER}.mlp.router.weight"),
    "ffn_gate_inp.bias": _Rule(f"{_LAYER}.mlp.router.bias"),
    **_gate_up("weight", f"{_LAYER}.mlp.experts.gate_up_proj"),
    **_gate_up("bias", f"{_LAYER}.mlp.experts.gate_up_proj_bias"),
    "ffn_down_exps.weight": _Rule(f"{_LAYER}.mlp.experts.down_proj", TRANSPOSED),
    "ffn_down_exps.bias": _Rule(f"{_LAYER}.mlp.experts.down_proj_bias"),
}

_LAYER_RULES: Mapping[str, _Rules] = MappingProxyType(
    {
        "llama": _LLAMA,
        "qwen2": {**_PLAIN_NORMS, **_ATTENTION, **_QKV_BIASES, **_FEED_FORWARD},
        "qwen3": {**_PLAIN_NORMS, **_ATTENTION, **_HEAD_NORMS, **_FEED_FORWARD},
        "qwen3moe": _QWEN3MOE,
        "gemma2": {**_SANDWICH_NORMS, **_ATTENTION, **_FEED_FORWARD},
        "gemma3": {
            **_SANDWICH_NORMS,
            **_ATTENTION,
            **_FEED_FORWARD,
            "attn_q_norm.weight": _Rule(f"{_LAYER}.self_attn.q_norm.weight", MINUS_ONE),
            "attn_k_norm.weight": _Rule(f"{_LAYER}.self_attn.k_norm.weight", MINUS_ONE),
        },
        "gpt-oss": _GPT_OSS,
    }
)
"""By architecture and by the name below the layer."""
