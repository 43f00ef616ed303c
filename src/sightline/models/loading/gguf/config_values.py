"""Numbers out of GGUF metadata, checked: what the config readers of all architectures share.

Owns the ranges of counts and the fields that mean the same everywhere. Does not know any one architecture, and
does not read bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.text.tokenizers.gguf_metadata import GgufMetadata

TensorShapes = Mapping[str, tuple[int, ...]]
"""Shapes by the tensor's name in the file."""

_LAYER_NUMBER = re.compile("0|[1-9][0-9]*")
MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 12
MAX_COUNT = (1 << 31) - 1
"""Of heads, positions and dimensions. What is sized by one of them is checked against the tensors elsewhere."""

_YARN_BETAS = (("beta_fast", 32.0), ("beta_slow", 1.0))
"""With the values under which a file that does not state them was trained."""


def common_config(metadata: GgufMetadata, shapes: TensorShapes, prefix: str) -> dict[str, object]:
    """The fields that every architecture states alike."""
    hidden_size = positive(metadata, f"{prefix}.embedding_length")
    num_heads, num_key_value_heads = _head_counts(metadata, prefix)
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers(metadata, shapes, prefix),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "intermediate_size": uniform(metadata, f"{prefix}.feed_forward_length"),
        "vocab_size": _vocab_size(metadata, shapes, prefix, hidden_size),
        "max_position_embeddings": positive(metadata, f"{prefix}.context_length"),
        "rms_norm_eps": positive_number(metadata, f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_theta": positive_number(metadata, f"{prefix}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, prefix),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.integer("tokenizer.ggml.eos_token_id"),
    }


def num_layers(metadata: GgufMetadata, shapes: TensorShapes, prefix: str) -> int:
    """The stated count, if it is that of the layers in the tensor directory."""
    key = f"{prefix}.block_count"
    stated = positive(metadata, key)
    parts = (name.split(".", 2) for name in shapes)
    named = {part[1] for part in parts if part[0] == "blk" and len(part) == 3 and _LAYER_NUMBER.fullmatch(part[1])}
    if stated > MAX_LAYERS or len(named) != stated or named != {str(layer) for layer in range(stated)}:
        raise CheckpointError(
            f"GGUF metadata {key!r}: expected the number of layers that have tensors, at most {MAX_LAYERS} and "
            f"numbered from 0, got {stated} for the tensors of {len(named)} layers. Convert the model again."
        )
    return stated


def expert_counts(metadata: GgufMetadata, prefix: str) -> tuple[int, int]:
    """Of all experts of a layer, and of those that a token uses."""
    count_key, used_key = f"{prefix}.expert_count", f"{prefix}.expert_used_count"
    count, used = positive(metadata, count_key), positive(metadata, used_key)
    if not used <= count <= MAX_EXPERTS:
        raise CheckpointError(
            f"GGUF metadata {count_key!r}: expected from {used_key} = {used} to {MAX_EXPERTS} experts, got {count}. "
            "Convert the model again."
        )
    return count, used


def head_dim(metadata: GgufMetadata, prefix: str, default: int) -> int:
    """The size of a head, of which rotary embeddings turn all."""
    key_length = positive(metadata, f"{prefix}.attention.key_length", default)
    value_length = positive(metadata, f"{prefix}.attention.value_length", key_length)
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


def layer_types(metadata: GgufMetadata, prefix: str, layers: int, period: int) -> list[str]:
    """Each `period`-th layer attends to everything and the others to a window, unless the file says otherwise."""
    key = f"{prefix}.attention.sliding_window_pattern"
    pattern = metadata.raw(key)
    if isinstance(pattern, list):
        if len(pattern) != layers or not set(map(type, pattern)) <= {bool}:
            raise CheckpointError(
                f"GGUF metadata {key!r}: expected {layers} booleans, got {len(pattern)} values. Convert it again."
            )
        windowed = [flag is True for flag in pattern]
    else:
        period = positive(metadata, key, period)
        windowed = [(layer + 1) % period != 0 for layer in range(layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in windowed]


def softcapping(metadata: GgufMetadata, key: str, default: float | None) -> float | None:
    """A cap above 0; a stated 0 means none."""
    stated = metadata.number(key)
    if stated is None:
        return default
    return positive_number(metadata, key) if stated else None


def positive(metadata: GgufMetadata, key: str, default: int | None = None) -> int:
    """A count; without a default the key must be there."""
    value = metadata.required_integer(key) if default is None or key in metadata else default
    if not 1 <= value <= MAX_COUNT:
        raise CheckpointError(
            f"GGUF metadata {key!r}: expected a number from 1 to {MAX_COUNT}, got {value}. Convert the model again."
        )
    return value


def uniform(metadata: GgufMetadata, key: str) -> int:
    """A number that may be stored once per layer; it must be the same for all."""
    value = metadata.raw(key)
    if not isinstance(value, list):
        return positive(metadata, key)
    distinct = set(metadata.integer_array(key) or ())
    if len(distinct) != 1 or not 1 <= min(distinct) <= MAX_COUNT:
        raise UnsupportedModelError(
            f"GGUF metadata {key!r}: expected one number from 1 to {MAX_COUNT} for all layers, got "
            f"{sorted(distinct)[:8]}. Use the model's folder of safetensors."
        )
    return distinct.pop()


def positive_number(metadata: GgufMetadata, key: str, default: float | None = None) -> float:
    """A finite number above 0; without a default the key must be there."""
    stated = metadata.number(key)
    value = default if stated is None else stated
    if value is None or value <= 0:
        found = "no such key" if value is None else value
        raise CheckpointError(
            f"GGUF metadata {key!r}: expected a number above 0, got {found}. Convert the model again."
        )
    return value


def divided(config: Mapping[str, object], total_key: str, parts_key: str) -> int:
    total, parts = config[total_key], config[parts_key]
    if not isinstance(total, int) or not isinstance(parts, int) or total % parts:
        raise CheckpointError(f"GGUF metadata: expected {total_key} {total} as a multiple of {parts_key} {parts}.")
    return total // parts


def _head_counts(metadata: GgufMetadata, prefix: str) -> tuple[int, int]:
    """Of queries, and of keys and values."""
    num_heads = uniform(metadata, f"{prefix}.attention.head_count")
    key = f"{prefix}.attention.head_count_kv"
    num_key_value_heads = uniform(metadata, key) if key in metadata else num_heads
    if num_heads % num_key_value_heads:
        raise CheckpointError(
            f"GGUF metadata {key!r}: expected a divisor of the {num_heads} query heads, got {num_key_value_heads}. "
            "Convert the model again."
        )
    return num_heads, num_key_value_heads


def _rope_scaling(metadata: GgufMetadata, prefix: str) -> dict[str, object] | None:
    kind = metadata.text(f"{prefix}.rope.scaling.type")
    factor = metadata.number(f"{prefix}.rope.scaling.factor")
    older = metadata.number(f"{prefix}.rope.scale_linear")
    if older is not None and factor not in (None, older):
        raise CheckpointError(
            f"GGUF metadata '{prefix}.rope.scale_linear': expected the scaling factor {factor}, got {older}. "
            "Convert the model again."
        )
    factor = older if factor is None else factor
    kind = "linear" if kind is None and factor else kind  # as in llama.cpp, where a factor of 0 is none
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"GGUF metadata '{prefix}.rope.scaling.type': expected 'none', 'linear' or 'yarn', got {kind!r}, which "
            "changes the result and is not supported. Use the model's folder of safetensors."
        )
    if factor is None or factor <= 0:
        raise CheckpointError(
            f"GGUF metadata '{prefix}.rope.scaling.factor': expected a positive number for {kind} scaling, "
            f"got {factor}. Convert the model again."
        )
    if kind == "yarn":
        return _yarn_scaling(metadata, prefix, factor)
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _yarn_scaling(metadata: GgufMetadata, prefix: str, factor: float) -> dict[str, object]:
    scaling = f"{prefix}.rope.scaling"
    trained = positive(metadata, f"{prefix}.context_length")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": positive(metadata, f"{scaling}.original_context_length", trained),
        **{name: positive_number(metadata, f"{scaling}.yarn_{name}", default) for name, default in _YARN_BETAS},
    }


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
