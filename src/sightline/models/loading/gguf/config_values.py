"""Checked values from the metadata keys of one GGUF architecture.

Owns the allowed ranges, and the fields that every architecture states alike. Does not know any one architecture, and
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
"""The limit for heads, positions and dimensions. Sizes that follow from them are checked against the tensors later."""

_YARN_BETAS = (("beta_fast", 32.0), ("beta_slow", 1.0))
"""YaRN's parameters and their defaults."""


class ArchitectureKeys:
    """The metadata keys below one architecture's prefix, and the shapes of the file's tensors.

    Methods take key names without the prefix.
    """

    def __init__(self, metadata: GgufMetadata, shapes: TensorShapes, architecture: str) -> None:
        self.shapes = shapes
        self._metadata = metadata
        self._architecture = architecture

    def __contains__(self, name: str) -> bool:
        return self._key(name) in self._metadata

    def common_config(self) -> dict[str, object]:
        """The Hugging Face config fields that every architecture states alike."""
        hidden_size = self.positive("embedding_length")
        num_heads, num_key_value_heads = self._head_counts()
        return {
            "hidden_size": hidden_size,
            "num_hidden_layers": self.num_layers(),
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_key_value_heads,
            "intermediate_size": self.uniform("feed_forward_length"),
            "vocab_size": self._vocab_size(hidden_size),
            "max_position_embeddings": self.positive("context_length"),
            "rms_norm_eps": self.positive_number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self.positive_number("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self.shapes,
            "bos_token_id": self._metadata.integer("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._metadata.integer("tokenizer.ggml.eos_token_id"),
        }

    def num_layers(self) -> int:
        """The stated number of layers, which must equal the number of layers that have tensors."""
        stated = self.positive("block_count")
        parts = (name.split(".", 2) for name in self.shapes)
        named = {part[1] for part in parts if part[0] == "blk" and len(part) == 3 and _LAYER_NUMBER.fullmatch(part[1])}
        if stated > MAX_LAYERS or len(named) != stated or named != {str(layer) for layer in range(stated)}:
            raise self._damaged(
                "block_count",
                f"expected the number of layers that have tensors, at most {MAX_LAYERS} and numbered from 0, got "
                f"{stated} for the tensors of {len(named)} layers",
            )
        return stated

    def expert_counts(self) -> tuple[int, int]:
        """The number of experts per layer, and how many of them a token uses."""
        count, used = self.positive("expert_count"), self.positive("expert_used_count")
        if not used <= count <= MAX_EXPERTS:
            raise self._damaged(
                "expert_count", f"expected from expert_used_count = {used} to {MAX_EXPERTS} experts, got {count}"
            )
        return count, used

    def head_dim(self, default: int) -> int:
        """The head size. Rotary embeddings must cover all of it."""
        key_length = self.positive("attention.key_length", default)
        value_length = self.positive("attention.value_length", key_length)
        if key_length % 2:
            raise self._unsupported(
                "attention.key_length",
                f"expected an even head size, got {key_length}. Rotary embeddings turn pairs of dimensions.",
            )
        if key_length != value_length:
            raise self._unsupported(
                "attention.value_length",
                f"expected the key length {key_length}, got {value_length}. Heads of two sizes are not supported.",
            )
        rotated = self._metadata.integer(self._key("rope.dimension_count"))
        if rotated not in (None, key_length):
            raise self._unsupported(
                "rope.dimension_count",
                f"expected the head size {key_length}, got {rotated}. Rotary embeddings on a part of the head are not "
                "supported for this architecture.",
            )
        return key_length

    def layer_types(self, period: int) -> list[str]:
        """The kind of each layer. By default every `period`-th has full attention and the others a window."""
        name, layers = "attention.sliding_window_pattern", self.num_layers()
        pattern = self._metadata.raw(self._key(name))
        if isinstance(pattern, list):
            if len(pattern) != layers or not set(map(type, pattern)) <= {bool}:
                raise self._damaged(name, f"expected {layers} booleans, got {len(pattern)} values")
            windowed = [flag is True for flag in pattern]
        else:
            period = self.positive(name, period)
            windowed = [(layer + 1) % period != 0 for layer in range(layers)]
        return ["sliding_attention" if flag else "full_attention" for flag in windowed]

    def has_window(self) -> bool:
        return bool(self._metadata.integer(self._key("attention.sliding_window")))

    def softcapping(self, name: str, default: float | None) -> float | None:
        """A cap above 0; a stated 0 means none."""
        stated = self._metadata.number(self._key(name))
        if stated is None:
            return default
        return self.positive_number(name) if stated else None

    def positive(self, name: str, default: int | None = None) -> int:
        """A count. Without a default the key must be there."""
        value = self._metadata.required_integer(self._key(name)) if default is None or name in self else default
        if not 1 <= value <= MAX_COUNT:
            raise self._damaged(name, f"expected a number from 1 to {MAX_COUNT}, got {value}")
        return value

    def uniform(self, name: str) -> int:
        """A count that may be stored once per layer; it must be the same for all."""
        key = self._key(name)
        if not isinstance(self._metadata.raw(key), list):
            return self.positive(name)
        distinct = set(self._metadata.integer_array(key) or ())
        if len(distinct) != 1 or not 1 <= min(distinct) <= MAX_COUNT:
            raise self._unsupported(
                name,
                f"expected one number from 1 to {MAX_COUNT} for all layers, got {sorted(distinct)[:8]}. Use the "
                "model's folder of safetensors.",
            )
        return distinct.pop()

    def positive_number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0. Without a default the key must be there."""
        stated = self._metadata.number(self._key(name))
        value = default if stated is None else stated
        if value is None or value <= 0:
            raise self._damaged(name, f"expected a number above 0, got {'no such key' if value is None else value}")
        return value

    def _head_counts(self) -> tuple[int, int]:
        """The numbers of query heads and of key-value heads."""
        num_heads, name = self.uniform("attention.head_count"), "attention.head_count_kv"
        num_key_value_heads = self.uniform(name) if name in self else num_heads
        if num_heads % num_key_value_heads:
            raise self._damaged(name, f"expected a divisor of the {num_heads} query heads, got {num_key_value_heads}")
        return num_heads, num_key_value_heads

    def _rope_scaling(self) -> dict[str, object] | None:
        kind = self._metadata.text(self._key("rope.scaling.type"))
        factor = self._metadata.number(self._key("rope.scaling.factor"))
        older = self._metadata.number(self._key("rope.scale_linear"))
        if older is not None and factor not in (None, older):
            raise self._damaged("rope.scale_linear", f"expected the scaling factor {factor}, got {older}")
        factor = older if factor is None else factor
        kind = "linear" if kind is None and factor else kind  # as in llama.cpp, where a factor of 0 is none
        if kind in (None, "none"):
            return None
        if kind not in ("linear", "yarn"):
            raise self._unsupported(
                "rope.scaling.type",
                f"expected 'none', 'linear' or 'yarn', got {kind!r}, which changes the result and is not supported. "
                "Use the model's folder of safetensors.",
            )
        if factor is None or factor <= 0:
            raise self._damaged("rope.scaling.factor", f"expected a positive number for {kind} scaling, got {factor}")
        if kind == "yarn":
            return self._yarn_scaling(factor)
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}

    def _yarn_scaling(self, factor: float) -> dict[str, object]:
        trained = self.positive("context_length")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.positive("rope.scaling.original_context_length", trained),
            **{name: self.positive_number(f"rope.scaling.yarn_{name}", default) for name, default in _YARN_BETAS},
        }

    def _vocab_size(self, hidden_size: int) -> int:
        shape = self.shapes.get("token_embd.weight")
        if shape is None or len(shape) != 2 or shape[1] != hidden_size:
            raise CheckpointError(
                f"expected a tensor 'token_embd.weight' of shape [vocabulary, {hidden_size}], got {shape}. "
                "Convert the model again."
            )
        stated = self._metadata.integer(self._key("vocab_size"))
        if stated not in (None, shape[0]):
            raise self._damaged("vocab_size", f"expected {shape[0]}, the rows of 'token_embd.weight', got {stated}")
        return shape[0]

    def _key(self, name: str) -> str:
        return f"{self._architecture}.{name}"

    def _damaged(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"GGUF metadata {self._key(name)!r}: {what}. Convert the model again.")

    def _unsupported(self, name: str, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"GGUF metadata {self._key(name)!r}: {what}")


def divided(config: Mapping[str, object], total_key: str, parts_key: str) -> int:
    """The quotient of two integers of a config; it must be whole."""
    total, parts = config[total_key], config[parts_key]
    if not isinstance(total, int) or not isinstance(parts, int) or total % parts:
        raise CheckpointError(f"GGUF metadata: expected {total_key} {total} as a multiple of {parts_key} {parts}.")
    return total // parts
