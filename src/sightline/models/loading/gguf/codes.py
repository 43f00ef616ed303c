"""The stored integers of quantised GGUF tensors, with their scales: nothing is decoded.

Does not know files or tensor names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.kernels.block_weights import BlockWeights, CodeBits
from sightline.kernels.coded_weights import CodedWeights, CodeForm
from sightline.models.loading.gguf.types import StorageType

_SPAN = 256


class _Parts(NamedTuple):
    """The parts of blocks, one block per row, in the dtypes of `CodedWeights`."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    steps: Tensor | None = None
    minimum_steps: Tensor | None = None


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The fp16 number at byte `start` of each block, [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes to [..., 2 * n] of 0 to 15: the low nibbles come first."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """[blocks, 4] bytes to [blocks, 32] of 0 or 1, the lowest bit of the first byte first."""
    places = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> places) & 1).view(len(packed), -1)


def _read_q8_0(blocks: Tensor) -> _Parts:
    # Flipping the sign bit of a signed byte adds 128 to it.
    return _Parts(blocks[:, 2:] ^ 0x80, _halves(blocks, 0))


def _read_q4_0(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[:, 2:]), _halves(blocks, 0))


def _read_q4_1(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _read_q5_0(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4, _halves(blocks, 0))


def _read_q5_1(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4, _halves(blocks, 0), _halves(blocks, 2))


def _steps(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 steps and 8 minimum steps of 6 bits in [blocks, 12] bytes, int8.

    The upper two bits of the first 8 bytes are those of the last four steps, whose lower bits are in the last 4 bytes.
    """
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    steps = torch.cat((first & 63, (last & 0x0F) | (first >> 6) << 4), dim=1)
    minimum_steps = torch.cat((second & 63, (last >> 4) | (second >> 6) << 4), dim=1)
    return steps.view(torch.int8), minimum_steps.view(torch.int8)


def _read_q4_k(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, _SPAN)
    steps, minimum_steps = _steps(blocks[:, 4:16])
    return _Parts(codes, _halves(blocks, 0), -_halves(blocks, 2), steps, minimum_steps)


def _read_q5_k(blocks: Tensor) -> _Parts:
    lower = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    # Bit g of byte i is the fifth bit of code i of group g.
    places = torch.arange(8, dtype=torch.uint8).view(8, 1)
    higher = (blocks[:, 16:48].unsqueeze(1) >> places) & 1
    steps, minimum_steps = _steps(blocks[:, 4:16])
    codes = (lower | higher << 4).view(-1, _SPAN)
    return _Parts(codes, _halves(blocks, 0), -_halves(blocks, 2), steps, minimum_steps)


def _read_q6_k(blocks: Tensor) -> _Parts:
    # In each half of 128 codes: the low nibbles of 64 bytes, then their high nibbles; the upper bits four to a byte.
    lower = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    places = 2 * torch.arange(4, dtype=torch.uint8).view(4, 1)
    higher = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> places) & 3
    steps = blocks[:, 192:208].contiguous().view(torch.int8)
    return _Parts((lower | higher << 4).view(-1, _SPAN), _halves(blocks, 208), steps=steps)


class _CodeReader(NamedTuple):
    form: CodeForm
    read: Callable[[Tensor], _Parts]


_CODE_READERS: Mapping[str, _CodeReader] = MappingProxyType(
    {
        "Q8_0": _CodeReader(CodeForm(8, 128, 32, 32, has_minima=False), _read_q8_0),
        "Q4_0": _CodeReader(CodeForm(4, 8, 32, 32, has_minima=False), _read_q4_0),
        "Q4_1": _CodeReader(CodeForm(4, 0, 32, 32, has_minima=True), _read_q4_1),
        "Q5_0": _CodeReader(CodeForm(5, 16, 32, 32, has_minima=False), _read_q5_0),
        "Q5_1": _CodeReader(CodeForm(5, 0, 32, 32, has_minima=True), _read_q5_1),
        "Q4_K": _CodeReader(CodeForm(4, 0, 32, _SPAN, has_minima=True), _read_q4_k),
        "Q5_K": _CodeReader(CodeForm(5, 0, 32, _SPAN, has_minima=True), _read_q5_k),
        "Q6_K": _CodeReader(CodeForm(6, 32, 16, _SPAN, has_minima=False), _read_q6_k),
    }
)


def code_form(storage: StorageType) -> CodeForm | None:
    """The form of a type's codes if `read_codes` supports it, otherwise None."""
    reader = _CODE_READERS.get(storage.name)
    return None if reader is None else reader.form


def read_codes(raw: memoryview, storage: StorageType, shape: tuple[int, ...]) -> CodedWeights:
    """The stored codes of a tensor [out_features, in_features], copied out of `raw`. The type must have a `code_form`.

    Once dequantised, finite numbers equal those of `dequantise`.
    """
    reader = _CODE_READERS[storage.name]
    parts = reader.read(torch.frombuffer(raw, dtype=torch.uint8).view(-1, storage.block_bytes))
    by_row = [None if part is None else part.reshape(shape[0], -1) for part in parts]
    codes, scales, minima, steps, minimum_steps = by_row
    assert codes is not None
    assert scales is not None
    return CodedWeights(reader.form, codes, scales, minima, steps, minimum_steps)


_BLOCK_BITS: Mapping[str, CodeBits] = MappingProxyType(
    {"Q8_0": CodeBits.EIGHT, "Q4_0": CodeBits.FOUR, "Q4_1": CodeBits.FOUR}
)


def block_bits(storage: StorageType) -> CodeBits | None:
    """The width of a type's codes if `as_blocks` supports it (blocks of 32 codes with a scale), otherwise None."""
    return _BLOCK_BITS.get(storage.name)


def as_blocks(weights: CodedWeights) -> BlockWeights:
    """The same weights with a scale and a minimum for every 32 inputs in fp32. The type must have `block_bits`."""
    scales, minima = weights.group_scales(), weights.group_minima()
    if minima is None:
        minima = scales * -weights.form.zero
    return BlockWeights(weights.codes, scales, minima, CodeBits(weights.form.bits))
