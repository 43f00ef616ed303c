"""Translation of GGUF metadata to the keys of a Hugging Face config.json.

Owns the meaning of the metadata of each supported architecture. A key that changes the result and is not
supported is refused; one whose meaning is not known is recorded. Does not read bytes, and does not know
tensor layouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.text.gguf_metadata import GgufMetadata

TensorShapes = Mapping[str, tuple[int, ...]]
"""Shapes by the tensor's name in the file."""

_LAYER_NUMBER = re.compile("0|[1-9][0-9]*")
MAX_LAYERS = 1 << 12
MAX_COUNT = (1 << 31) - 1
"""Of heads, positions and dimensions. What is sized by one of them is checked against the tensors elsewhere."""


@dataclass(frozen=True)
class ConfigReader:
    """How one `general.architecture` states its config."""

    read: Callable[[GgufMetadata, TensorShapes], dict[str, object]]
    keys: frozenset[str]
    """Keys below the architecture's prefix that `read` uses, beside the ones that all architectures share."""


def translate_config(metadata: GgufMetadata, shapes: TensorShapes, ledger: Ledger) -> dict[str, object]:
    """The model's config as a Hugging Face config.json would have it."""
    name = metadata.required_text("general.architecture")
    reader = _READERS.get(name)
    if reader is None:
        raise UnsupportedModelError(
            f"expected a GGUF file of one of the architectures {', '.join(sorted(_READERS))}, got {name!r}. "
            "Use the model's folder of safetensors, or another model."
        )
    _refuse_split_file(metadata)
    for key in metadata.keys_under(f"{name}."):
        suffix = key.removeprefix(f"{name}.")
        if suffix in reader.keys or suffix in _SHARED_KEYS:
            continue
        if suffix in _UNSUPPORTED_UNLESS:
            _refuse_unless_neutral(metadata, key, _UNSUPPORTED_UNLESS[suffix])
            continue
        ledger.record(
            f"GGUF metadata {key!r}",
            "is ignored: its meaning for this architecture is not known",
            "check the model's output against another engine, or convert the model again",
        )
    return reader.read(metadata, shapes)


def _refuse_split_file(metadata: GgufMetadata) -> None:
    parts = metadata.integer("split.count")
    if parts is not None and parts > 1:
        raise UnsupportedModelError(
            f"expected a model in one GGUF file, got one of {parts} parts. Join them with `llama-gguf-split --merge`."
        )


_SHARED_KEYS = frozenset(
    {
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "context_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scale_linear",
    }
)
"""Keys that every reader uses, and two that only tell of the model's training."""

_UNSUPPORTED_UNLESS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "expert_count": (0,),
        "expert_used_count": (0,),
        "attention.sliding_window": (0,),
        "attention.clamp_kqv": (0,),
        "attention.max_alibi_bias": (0,),
        "attention.scale": (),
        "attention.causal": (True,),
        "attention.temperature_length": (0,),
        "attn_logit_softcapping": (0,),
        "final_logit_softcapping": (0,),
        "logit_scale": (1,),
        "residual_scale": (1,),
        "embedding_scale": (1,),
        "use_parallel_residual": (False,),
        "rope.scaling.attn_factor": (1,),
        "rope.scaling.yarn_log_multiplier": (0,),
        "pooling_type": (0,),
    }
)
"""Keys that change the result, with the values under which they do not."""


def _refuse_unless_neutral(metadata: GgufMetadata, key: str, neutral: tuple[object, ...]) -> None:
    value = metadata.raw(key)
    if value not in neutral:
        allowed = " or ".join(map(repr, neutral)) or "no value"
        raise UnsupportedModelError(
            f"GGUF metadata {key!r}: expected {allowed}, got {value!r}, which changes the result and is not "
            "supported for this architecture. Use the model's folder of safetensors."
        )


def _common_config(metadata: GgufMetadata, shapes: TensorShapes, prefix: str) -> dict[str, object]:
    hidden_size = _positive(metadata, f"{prefix}.embedding_length")
    num_heads, num_key_value_heads = _head_counts(metadata, prefix)
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": _num_layers(metadata, shapes, prefix),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "intermediate_size": _uniform(metadata, f"{prefix}.feed_forward_length"),
        "vocab_size": _vocab_size(metadata, shapes, prefix, hidden_size),
        "max_position_embeddings": _positive(metadata, f"{prefix}.context_length"),
        "rms_norm_eps": _positive_number(metadata, f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_scaling": _rope_scaling(metadata, prefix),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.integer("tokenizer.ggml.eos_token_id"),
    }


def _llama_config(metadata: GgufMetadata, shapes: TensorShapes) -> dict[str, object]:
    config = _common_config(metadata, shapes, "llama")
    head_dim = _head_dim(metadata, "llama", _divided(config, "hidden_size", "num_attention_heads"))
    config.update(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        head_dim=head_dim,
        hidden_act="silu",
        rope_theta=_positive_number(metadata, "llama.rope.freq_base", 10000.0),
        attention_bias="blk.0.attn_q.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
    )
    return config


def _gemma3_config(metadata: GgufMetadata, shapes: TensorShapes) -> dict[str, object]:
    config = _common_config(metadata, shapes, "gemma3")
    head_dim = _head_dim(metadata, "gemma3", 256)
    num_layers = _num_layers(metadata, shapes, "gemma3")
    # The converter stores no query scale. The 27B model, alone with 62 layers, scales by its width per head.
    per_head = _divided(config, "hidden_size", "num_attention_heads") if num_layers == 62 else head_dim
    config.update(
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        head_dim=head_dim,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=per_head,
        sliding_window=_positive(metadata, "gemma3.attention.sliding_window"),
        layer_types=_layer_types(metadata, num_layers),
        rope_theta=_positive_number(metadata, "gemma3.rope.freq_base", 1_000_000.0),
        rope_local_base_freq=_positive_number(metadata, "gemma3.rope.freq_base_swa", 10_000.0),
        attention_bias=False,
        attn_logit_softcapping=None,
        final_logit_softcapping=_softcapping(metadata),
    )
    return config


def _softcapping(metadata: GgufMetadata) -> float | None:
    key = "gemma3.final_logit_softcapping"
    return _positive_number(metadata, key) if metadata.number(key) else None


def _num_layers(metadata: GgufMetadata, shapes: TensorShapes, prefix: str) -> int:
    """The stated count, if it is that of the layers in the tensor directory."""
    key = f"{prefix}.block_count"
    stated = _positive(metadata, key)
    parts = (name.split(".", 2) for name in shapes)
    named = {part[1] for part in parts if part[0] == "blk" and len(part) == 3 and _LAYER_NUMBER.fullmatch(part[1])}
    if stated > MAX_LAYERS or len(named) != stated or named != {str(layer) for layer in range(stated)}:
        raise CheckpointError(
            f"GGUF metadata {key!r}: expected the number of layers that have tensors, at most {MAX_LAYERS} and "
            f"numbered from 0, got {stated} for the tensors of {len(named)} layers. Convert the model again."
        )
    return stated


def _head_counts(metadata: GgufMetadata, prefix: str) -> tuple[int, int]:
    """Of queries, and of keys and values."""
    num_heads = _uniform(metadata, f"{prefix}.attention.head_count")
    key = f"{prefix}.attention.head_count_kv"
    num_key_value_heads = _uniform(metadata, key) if key in metadata else num_heads
    if num_heads % num_key_value_heads:
        raise CheckpointError(
            f"GGUF metadata {key!r}: expected a divisor of the {num_heads} query heads, got {num_key_value_heads}. "
            "Convert the model again."
        )
    return num_heads, num_key_value_heads


def _layer_types(metadata: GgufMetadata, num_layers: int) -> list[str]:
    """Every sixth layer attends to everything, unless the file says otherwise."""
    key = "gemma3.attention.sliding_window_pattern"
    pattern = metadata.raw(key)
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not set(map(type, pattern)) <= {bool}:
            raise CheckpointError(
                f"GGUF metadata {key!r}: expected {num_layers} booleans, got {len(pattern)} values. Convert it again."
            )
        windowed = [flag is True for flag in pattern]
    else:
        period = 6 if pattern is None else _positive(metadata, key)
        windowed = [(layer + 1) % period != 0 for layer in range(num_layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in windowed]


def _rope_scaling(metadata: GgufMetadata, prefix: str) -> dict[str, object] | None:
    kind = metadata.text(f"{prefix}.rope.scaling.type")
    factor = metadata.number(f"{prefix}.rope.scaling.factor")
    if factor is None:
        factor = metadata.number(f"{prefix}.rope.scale_linear")
        kind = kind if factor is None else kind or "linear"
    if kind in (None, "none"):
        return None
    if kind != "linear":
        raise UnsupportedModelError(
            f"GGUF metadata '{prefix}.rope.scaling.type': expected 'none' or 'linear', got {kind!r}, which "
            "changes the result and is not supported. Use the model's folder of safetensors."
        )
    if factor is None or factor <= 0:
        raise CheckpointError(
            f"GGUF metadata '{prefix}.rope.scaling.factor': expected a positive number for linear scaling, "
            f"got {factor}. Convert the model again."
        )
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _head_dim(metadata: GgufMetadata, prefix: str, default: int) -> int:
    key_length = _positive(metadata, f"{prefix}.attention.key_length", default)
    value_length = _positive(metadata, f"{prefix}.attention.value_length", key_length)
    if key_length % 2:
        raise UnsupportedModelError(
            f"GGUF metadata '{prefix}.attention.key_length': expected an even head size, got {key_length}. "
            "Rotary embeddings turn pairs of dimensions."
        )
    if key_length != value_length:
        raise UnsupportedModelError(
            f"GGUF metadata '{prefix}.attention.value_length': expected the key length {key_length}, "
            f"got {value_length}. Heads of two sizes are not supported."
        )
    rotated = metadata.integer(f"{prefix}.rope.dimension_count")
    if rotated not in (None, key_length):
        raise UnsupportedModelError(
            f"GGUF metadata '{prefix}.rope.dimension_count': expected the head size {key_length}, got {rotated}. "
            "Rotary embeddings on a part of the head are not supported for this architecture."
        )
    return key_length


def _vocab_size(metadata: GgufMetadata, shapes: TensorShapes, prefix: str, hidden_size: int) -> int:
    shape = shapes.get("token_embd.weight")
    if shape is None or len(shape) != 2 or shape[1] != hidden_size:
        raise CheckpointError(
            f"expected a tensor 'token_embd.weight' of shape [vocabulary, {hidden_size}], got {shape}. "
            "Convert the model again."
        )
    stated = metadata.integer(f"{prefix}.vocab_size")
    if stated not in (None, shape[0]):
        raise CheckpointError(
            f"GGUF metadata '{prefix}.vocab_size': expected {shape[0]}, the rows of 'token_embd.weight', got {stated}."
        )
    return shape[0]


def _positive(metadata: GgufMetadata, key: str, default: int | None = None) -> int:
    """A count; without a default the key must be there."""
    value = metadata.required_integer(key) if default is None or key in metadata else default
    if not 1 <= value <= MAX_COUNT:
        raise CheckpointError(
            f"GGUF metadata {key!r}: expected a number from 1 to {MAX_COUNT}, got {value}. Convert the model again."
        )
    return value


def _uniform(metadata: GgufMetadata, key: str) -> int:
    """A number that may be stored once per layer; it must be the same for all."""
    value = metadata.raw(key)
    if not isinstance(value, list):
        return _positive(metadata, key)
    distinct = set(metadata.integer_array(key) or ())
    if len(distinct) != 1 or not 1 <= min(distinct) <= MAX_COUNT:
        raise UnsupportedModelError(
            f"GGUF metadata {key!r}: expected one number from 1 to {MAX_COUNT} for all layers, got "
            f"{sorted(distinct)[:8]}. Use the model's folder of safetensors."
        )
    return distinct.pop()


def _positive_number(metadata: GgufMetadata, key: str, default: float | None = None) -> float:
    """A finite number above 0; without a default the key must be there."""
    stated = metadata.number(key)
    value = default if stated is None else stated
    if value is None or value <= 0:
        found = "no such key" if value is None else value
        raise CheckpointError(
            f"GGUF metadata {key!r}: expected a number above 0, got {found}. Convert the model again."
        )
    return value


def _divided(config: Mapping[str, object], total_key: str, parts_key: str) -> int:
    total, parts = config[total_key], config[parts_key]
    if not isinstance(total, int) or not isinstance(parts, int) or total % parts:
        raise CheckpointError(f"GGUF metadata: expected {total_key} {total} as a multiple of {parts_key} {parts}.")
    return total // parts


_READERS: Mapping[str, ConfigReader] = MappingProxyType(
    {
        "llama": ConfigReader(_llama_config, frozenset()),
        "gemma3": ConfigReader(
            _gemma3_config,
            frozenset(
                {
                    "attention.sliding_window",
                    "attention.sliding_window_pattern",
                    "rope.freq_base_swa",
                    "final_logit_softcapping",
                }
            ),
        ),
    }
)
