"""The storage types of GGUF tensors: their codes, names and block sizes. Does not know how a block is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class StorageType:
    """A storage type: `block_elements` consecutive elements of a row take `block_bytes` bytes."""

    code: int
    name: str
    block_elements: int
    block_bytes: int


STORAGE_BY_CODE: Mapping[int, StorageType] = MappingProxyType(
    {
        storage.code: storage
        for storage in (
            StorageType(0, "F32", 1, 4),
            StorageType(1, "F16", 1, 2),
            StorageType(2, "Q4_0", 32, 18),
            StorageType(3, "Q4_1", 32, 20),
            StorageType(6, "Q5_0", 32, 22),
            StorageType(7, "Q5_1", 32, 24),
            StorageType(8, "Q8_0", 32, 34),
            StorageType(9, "Q8_1", 32, 40),
            StorageType(10, "Q2_K", 256, 84),
            StorageType(11, "Q3_K", 256, 110),
            StorageType(12, "Q4_K", 256, 144),
            StorageType(13, "Q5_K", 256, 176),
            StorageType(14, "Q6_K", 256, 210),
            StorageType(15, "Q8_K", 256, 292),
            StorageType(16, "IQ2_XXS", 256, 66),
            StorageType(17, "IQ2_XS", 256, 74),
            StorageType(18, "IQ3_XXS", 256, 98),
            StorageType(19, "IQ1_S", 256, 50),
            StorageType(20, "IQ4_NL", 32, 18),
            StorageType(21, "IQ3_S", 256, 110),
            StorageType(22, "IQ2_S", 256, 82),
            StorageType(23, "IQ4_XS", 256, 136),
            StorageType(24, "I8", 1, 1),
            StorageType(25, "I16", 1, 2),
            StorageType(26, "I32", 1, 4),
            StorageType(27, "I64", 1, 8),
            StorageType(28, "F64", 1, 8),
            StorageType(29, "IQ1_M", 256, 56),
            StorageType(30, "BF16", 1, 2),
            StorageType(34, "TQ1_0", 256, 54),
            StorageType(35, "TQ2_0", 256, 66),
            StorageType(39, "MXFP4", 32, 17),
            StorageType(40, "NVFP4", 64, 36),
        )
    }
)
