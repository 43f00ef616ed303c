"""Copies of a model in another dtype or format, for engines that cannot read the file, or not in the requested dtype.

Does not know which engines read the copies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
import torch
from gguf import (
    GGML_QUANT_SIZES,
    GGML_QUANT_VERSION,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
)
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from sightline.core.errors import ConfigError
from sightline.models.loading.checkpoint import Checkpoint

STORED_AS: Mapping[torch.dtype, GGMLQuantizationType] = MappingProxyType(
    {
        torch.float32: GGMLQuantizationType.F32,
        torch.float16: GGMLQuantizationType.F16,
        torch.bfloat16: GGMLQuantizationType.BF16,
    }
)
_FILE_TYPES: Mapping[GGMLQuantizationType, LlamaFileType] = MappingProxyType(
    {
        GGMLQuantizationType.F32: LlamaFileType.ALL_F32,
        GGMLQuantizationType.F16: LlamaFileType.MOSTLY_F16,
        GGMLQuantizationType.BF16: LlamaFileType.MOSTLY_BF16,
    }
)
_REWRITTEN_KEYS = frozenset({"general.architecture", "general.file_type", "general.quantization_version"})
_FOREIGN_KEYS = frozenset({"rope_frequency_factors"})
"""Config keys that only exist in the config of a GGUF file."""


def copy_gguf(source: Path, target: Path, kind: GGMLQuantizationType) -> None:
    """Writes a copy of `source` with matrices stored as `kind`, one of `STORED_AS`, and vectors as fp32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name in _REWRITTEN_KEYS or name.startswith("GGUF."):
            continue
        nested = field.types[1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], nested)
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    kinds = [kind if len(tensor.shape) > 1 else GGMLQuantizationType.F32 for tensor in reader.tensors]
    for tensor, stored in zip(reader.tensors, kinds, strict=True):
        shape = [int(size) for size in reversed(tensor.shape)]
        num_bytes = math.prod(shape) * GGML_QUANT_SIZES[stored][1]
        writer.add_tensor_info(tensor.name, shape, numpy.dtype(numpy.float32), num_bytes, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, stored in zip(reader.tensors, kinds, strict=True):
        writer.write_tensor_data(quantize(dequantize(tensor.data, tensor.tensor_type), stored))
    writer.close()


def copy_as_folder(checkpoint: Checkpoint, target: Path, dtype: torch.dtype) -> None:
    """Writes the model as a Hugging Face folder in `dtype`, without a tokenizer."""
    foreign = _FOREIGN_KEYS & checkpoint.config.keys()
    if foreign:
        raise ConfigError(
            f"expected a model whose config a Hugging Face folder can hold, got {checkpoint.location.name} with "
            f"{', '.join(foreign)}; give the model's own folder of safetensors"
        )
    target.mkdir()
    config: dict[str, Any] = {**checkpoint.config, "dtype": str(dtype).removeprefix("torch.")}
    (target / "config.json").write_text(json.dumps(config, indent=2))
    weights = {name: checkpoint.load(name).to(dtype).contiguous() for name in checkpoint.tensors}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
