"""A model in one GGUF file, seen as a Hugging Face checkpoint.

Owns the joining of container, names, config and decoding. Does not know any of them in detail.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import torch

from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.loading.checkpoint import Checkpoint, TensorInfo
from sightline.models.loading.generation import GenerationDefaults
from sightline.models.loading.gguf_config import translate_config
from sightline.models.loading.gguf_file import GgufFile
from sightline.models.loading.gguf_names import ROPE_FACTORS, Heads, translate_tensors
from sightline.models.loading.gguf_quantization import can_dequantise, dequantise
from sightline.text.gguf_metadata import GgufMetadata
from sightline.text.gguf_tokenizer import end_token_ids, tokenizer_from_gguf
from sightline.text.tokenizer import Tokenizer


class GgufCheckpoint(Checkpoint):
    """Every weight is decoded to fp32 when it is loaded."""

    def __init__(self, path: Path, ledger: Ledger) -> None:
        self._file = GgufFile(path)
        metadata = GgufMetadata(self._file.metadata)
        shapes = {name: tensor.shape for name, tensor in self._file.tensors.items()}
        config = translate_config(metadata, shapes, ledger)
        self._sources = translate_tensors(metadata.required_text("general.architecture"), shapes, _heads(config))
        self._check_types()
        if ROPE_FACTORS in shapes:
            config["rope_frequency_factors"] = self._rope_factors(config["head_dim"])
        super().__init__(
            location=path,
            config=MappingProxyType(config),
            tensors=MappingProxyType({name: self._describe(source.name) for name, source in self._sources.items()}),
            generation=GenerationDefaults(eos_token_ids=end_token_ids(metadata)),
        )

    def load_tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self._file.metadata)

    def _read(self, name: str) -> torch.Tensor:
        source = self._sources[name]
        return source.layout(self._decode(source.name))

    def _decode(self, name: str) -> torch.Tensor:
        tensor = self._file.tensors[name]
        return dequantise(self._file.raw(tensor), tensor.storage, tensor.shape)

    def _describe(self, name: str) -> TensorInfo:
        tensor = self._file.tensors[name]
        return TensorInfo(tensor.shape, torch.float32, tensor.storage.name)

    def _check_types(self) -> None:
        for tensor in self._file.tensors.values():
            if not can_dequantise(tensor.storage):
                raise UnsupportedModelError(
                    f"expected {tensor.name!r} in a floating-point or quantised type, got "
                    f"{tensor.storage.name}, which has no decoder. Convert the model to F16, Q8_0 or Q4_K_M."
                )

    def _rope_factors(self, head_dim: object) -> list[float]:
        expected = f"expected one factor above 0 per pair of {head_dim} head dimensions in {ROPE_FACTORS!r}, got"
        shape = self._file.tensors[ROPE_FACTORS].shape
        if len(shape) != 1 or shape[0] * 2 != head_dim:
            raise CheckpointError(f"{expected} the shape {list(shape)}. Convert the model again.")
        factors: list[float] = self._decode(ROPE_FACTORS).tolist()
        if not all(0 < factor < float("inf") for factor in factors):
            raise CheckpointError(f"{expected} values from {min(factors)} to {max(factors)}. Convert the model again.")
        return factors


def _heads(config: dict[str, object]) -> Heads:
    query, key_value = config["num_attention_heads"], config["num_key_value_heads"]
    assert isinstance(query, int)
    assert isinstance(key_value, int)
    return Heads(query, key_value)
