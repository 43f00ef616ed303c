"""Decoding of quantised blocks, bit for bit against the gguf package."""

from __future__ import annotations

import numpy
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from sightline.models.loading.gguf.quantization import can_dequantise, dequantise
from sightline.models.loading.gguf.types import STORAGE_BY_CODE, StorageType

DECODABLE = [storage for storage in STORAGE_BY_CODE.values() if can_dequantise(storage)]


@pytest.mark.parametrize("storage", STORAGE_BY_CODE.values(), ids=lambda storage: storage.name)
def test_codes_names_and_sizes_are_those_of_the_gguf_package(storage: StorageType) -> None:
    theirs = GGMLQuantizationType(storage.code)
    assert theirs.name == storage.name
    assert GGML_QUANT_SIZES[theirs] == (storage.block_elements, storage.block_bytes)


@pytest.mark.parametrize("storage", DECODABLE, ids=lambda storage: storage.name)
def test_random_blocks_decode_to_the_same_bits(storage: StorageType) -> None:
    blocks = 24
    rows = 6
    raw = numpy.random.default_rng(7).integers(0, 256, (rows, blocks * storage.block_bytes), dtype=numpy.uint8)
    with numpy.errstate(all="ignore"):  # random bits hold infinities and NaNs, which both sides must keep
        expected = dequantize(raw, GGMLQuantizationType(storage.code))
        decoded = dequantise(memoryview(bytearray(raw.tobytes())), storage, (rows, blocks * storage.block_elements))
    assert decoded.dtype == torch.float32
    theirs = torch.from_numpy(numpy.ascontiguousarray(expected)).view(decoded.shape)
    finite = ~torch.isnan(theirs)
    assert torch.equal(torch.isnan(decoded), ~finite)
    assert torch.equal(decoded[finite].view(torch.int32), theirs[finite].view(torch.int32))


def test_types_without_a_decoder_are_known() -> None:
    without = {storage.name for storage in STORAGE_BY_CODE.values() if not can_dequantise(storage)}
    assert without == {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}
