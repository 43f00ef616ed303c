"""Decoding of GGUF tensor bytes to fp32.

Owns the arithmetic. The common types are decoded with torch, in the operation order of the reference decoder,
so results are equal bit for bit; the rest go through the `gguf` package. Does not know files or tensor names.

A quantised row is a run of blocks of 32 or 256 elements. Each block has its own scale, and some types a
minimum, in fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from sightline.models.loading.gguf.types import StorageType


def dequantise(raw: memoryview, storage: StorageType, shape: tuple[int, ...]) -> torch.Tensor:
    """The elements of a tensor as fp32, shape `shape`.

    F32 input is not copied. `can_dequantise` must be true for the type.
    """
    data = torch.frombuffer(raw, dtype=torch.uint8)
    decode = _DECODERS.get(storage.name)
    if decode is not None:
        return decode(data.view(-1, storage.block_bytes)).view(shape)
    return _decode_with_reference(data, storage, shape)


def _halves(blocks: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The fp16 numbers in bytes `start` to `stop` of each block, as fp32 of shape [blocks, numbers]."""
    return blocks[:, start:stop].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[blocks, 16] bytes to [blocks, 32] of 0 to 15: the low nibbles of a block are its first half."""
    packed = packed.contiguous()
    return torch.stack((packed & 0x0F, packed >> 4), dim=1).view(packed.shape[0], -1)


def _decode_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks, 0, 2))


def _decode_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:]).float().sub_(8.0).mul_(_halves(blocks, 0, 2))


def _decode_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    halves = _halves(blocks, 0, 4)
    # Two rounded operations, as in the reference: a fused multiply-add would differ in the last bit.
    return _nibbles(blocks[:, 4:]).float().mul_(halves[:, :1]).add_(halves[:, 1:])


_DECODERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "F32": lambda blocks: blocks.view(torch.float32),
        "F16": lambda blocks: blocks.view(torch.float16).float(),
        "BF16": lambda blocks: blocks.view(torch.bfloat16).float(),
        "Q8_0": _decode_q8_0,
        "Q4_0": _decode_q4_0,
        "Q4_1": _decode_q4_1,
    }
)


_SCALES: Mapping[str, slice] = MappingProxyType(
    {
        **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS", "IQ1_S"), slice(0, 2)),
        **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), slice(0, 2)),
        **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), slice(0, 4)),
        "Q2_K": slice(80, 84),
        "Q3_K": slice(108, 110),
        "Q6_K": slice(208, 210),
        "TQ1_0": slice(52, 54),
        "TQ2_0": slice(64, 66),
    }
)
"""The bytes of a block that hold its fp16 scale, and its minimum if it has one. The rest of the block are integers."""


def block_scales(raw: memoryview, storage: StorageType) -> torch.Tensor | None:
    """The fp16 numbers of all blocks. If they are finite, so are the elements in fp32. None for other types."""
    if storage.name not in _SCALES:
        return None
    blocks = torch.frombuffer(raw, dtype=torch.uint8).view(-1, storage.block_bytes)
    return blocks[:, _SCALES[storage.name]].contiguous().view(torch.float16)


_REFERENCE = """
    Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ1_S IQ1_M IQ4_NL IQ4_XS TQ1_0 TQ2_0
    MXFP4 NVFP4
"""
_REFERENCE_ONLY = frozenset(_REFERENCE.split())
"""Types that the `gguf` package decodes."""


def can_dequantise(storage: StorageType) -> bool:
    """True if `dequantise` has a decoder. Integers and intermediate types of matrix products have none."""
    return storage.name in _DECODERS or storage.name in _REFERENCE_ONLY


_PIECE_ELEMENTS = 1 << 20


def _decode_with_reference(data: torch.Tensor, storage: StorageType, shape: tuple[int, ...]) -> torch.Tensor:
    # Imported here: the package takes longer to import than the default model takes to open.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    row_bytes = shape[-1] // storage.block_elements * storage.block_bytes
    rows = data.view(-1, row_bytes).numpy()
    decoded = torch.empty(shape, dtype=torch.float32)
    # In pieces: the package holds several times the size of what it decodes.
    step = max(1, _PIECE_ELEMENTS // shape[-1])
    for start in range(0, len(rows), step):
        piece = dequantize(rows[start : start + step], GGMLQuantizationType(storage.code))
        decoded.view(-1, shape[-1])[start : start + step] = torch.from_numpy(piece)
    return decoded
