"""A model in one GGUF file, presented as a Hugging Face checkpoint.

Combines the container, names, config and decoding. Does not know any of them in detail.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import torch

from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.kernels.block_weights import BlockWeights
from sightline.kernels.coded_weights import CodedWeights
from sightline.models.loading.checkpoint import Checkpoint, TensorInfo
from sightline.models.loading.generation import GenerationDefaults
from sightline.models.loading.gguf.codes import as_blocks, block_bits, code_form, read_codes
from sightline.models.loading.gguf.config import translate_config
from sightline.models.loading.gguf.file import GgufFile, GgufTensor
from sightline.models.loading.gguf.names import ROPE_FACTORS, LayoutNumbers, TensorSource, translate_tensors
from sightline.models.loading.gguf.quantization import block_scales, can_dequantise, dequantise
from sightline.text.tokenizers.gguf import end_token_ids, tokenizer_from_gguf
from sightline.text.tokenizers.gguf_metadata import GgufMetadata
from sightline.text.tokenizers.tokenizer import Tokenizer

EMBEDDING = "model.embed_tokens.weight"


class GgufCheckpoint(Checkpoint):
    """`load` decodes weights to fp32; `load_codes` and `load_blocks` keep them quantised."""

    def __init__(self, path: Path, ledger: Ledger) -> None:
        self._file = GgufFile(path)
        metadata = GgufMetadata(self._file.metadata)
        shapes = {name: tensor.shape for name, tensor in self._file.tensors.items()}
        config = translate_config(metadata, shapes, ledger)
        self._sources = translate_tensors(metadata.required_text("general.architecture"), shapes, _counts(config))
        self._check_types()
        if ROPE_FACTORS in shapes:
            config["rope_frequency_factors"] = self._rope_factors(config["head_dim"])
        _record_what_is_missing(metadata, ledger)
        super().__init__(
            location=path,
            config=MappingProxyType(config),
            tensors=MappingProxyType({name: self._describe(source) for name, source in self._sources.items()}),
            generation=GenerationDefaults(eos_token_ids=end_token_ids(metadata)),
        )

    def load_tokenizer(self) -> Tokenizer:
        tokenizer = tokenizer_from_gguf(self._file.metadata)
        rows = self.tensors[EMBEDDING].shape[0]
        if tokenizer.vocab_size > rows:
            raise CheckpointError(
                f"{self.location}: expected at most {rows} tokens, the rows of the embedding, got "
                f"{tokenizer.vocab_size} under 'tokenizer.ggml.tokens'. Convert the model again."
            )
        return tokenizer

    def _read(self, name: str) -> torch.Tensor:
        source = self._sources[name]
        return source.layout.apply(*(self._decode(part, source.expert) for part in source.names))

    def load_scales(self, name: str) -> torch.Tensor | None:
        source = self._sources[name]
        if len(source.names) > 1:
            return None
        tensor = self._file.tensors[source.names[0]]
        return block_scales(self._raw(tensor, source.expert), tensor.storage)

    def _read_blocks(self, name: str) -> BlockWeights:
        return as_blocks(self._read_codes(name))

    def _read_codes(self, name: str) -> CodedWeights:
        source = self._sources[name]
        (stored,) = source.names
        tensor = self._file.tensors[stored]
        codes = read_codes(self._raw(tensor, source.expert), tensor.storage, source.shape)
        self._file.release(tensor)
        return codes.moved(source.layout.apply)

    def _decode(self, name: str, expert: int | None = None) -> torch.Tensor:
        tensor = self._file.tensors[name]
        shape = tensor.shape if expert is None else tensor.shape[1:]
        decoded = dequantise(self._raw(tensor, expert), tensor.storage, shape)
        if tensor.storage.name != "F32":  # decoded F32 still uses the mapped pages
            self._file.release(tensor)
        return decoded

    def _raw(self, tensor: GgufTensor, expert: int | None) -> memoryview:
        raw = self._file.raw(tensor)
        if expert is None:
            return raw
        num_bytes = tensor.num_bytes // tensor.shape[0]
        return raw[expert * num_bytes : (expert + 1) * num_bytes]

    def _describe(self, source: TensorSource) -> TensorInfo:
        stored = dict.fromkeys(self._file.tensors[name].storage.name for name in source.names)
        if not source.layout.keeps_rows or len(source.shape) != 2:
            return TensorInfo(source.shape, torch.float32, "+".join(stored))
        (name,) = source.names
        storage = self._file.tensors[name].storage
        return TensorInfo(source.shape, torch.float32, storage.name, block_bits(storage), codes=code_form(storage))

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


def _counts(config: dict[str, object]) -> LayoutNumbers:
    query, key_value = config["num_attention_heads"], config["num_key_value_heads"]
    experts = config.get("num_experts", config.get("num_local_experts", 0))
    assert isinstance(query, int)
    assert isinstance(key_value, int)
    assert isinstance(experts, int)
    return LayoutNumbers(query, key_value, experts)


def _record_what_is_missing(metadata: GgufMetadata, ledger: Ledger) -> None:
    """Records missing metadata without which the model runs, but perhaps not as it was trained."""
    if metadata.text("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in metadata:
        ledger.degrade(
            "GGUF metadata 'tokenizer.ggml.pre'",
            "is missing: words are split as for GPT-2, which may not be how the model was trained",
            "convert the model again with a current tool",
        )
    if not end_token_ids(metadata):
        ledger.degrade(
            "GGUF metadata 'tokenizer.ggml.eos_token_id'",
            "is missing, and so is every other end token: generation ends only at a limit or a stop string",
            "convert the model again, or give stop strings",
        )
