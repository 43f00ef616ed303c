"""MXFP4 tensors in safetensors files: 4-bit floats in blocks of 32 that share a power of two.

Pairs `*_blocks` with `*_scales` and decodes each pair exactly, to the layout of the unquantised tensor. Does not know
models.

    x_blocks [experts, outputs, inputs / 32, 16] uint8   two elements per byte, the lower bits first
    x_scales [experts, outputs, inputs / 32]     uint8   exponents, 127 is 2^0
    x        [experts, inputs, outputs]          bf16    holds every element exactly
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.kernels.packed_weights import WeightForm
from sightline.models.loading.checkpoint import TensorInfo
from sightline.models.loading.safetensors.file import SafetensorsFile
from sightline.models.loading.safetensors.packed import (
    UNCONVERTED,
    PackedFormat,
    PackedTensor,
    check_settings,
    check_unconverted,
)

METHOD = "mxfp4"
"""The format's name in `quantization_config`."""
BLOCKS, SCALES = "_blocks", "_scales"
_STORED = "U8"
"""The stored type of both, as the files name it."""
_BYTES = 16
"""The bytes of a block."""
_SETTINGS = frozenset({"quant_method", UNCONVERTED, "dequantize"})
"""Tensors are always decoded, whatever `dequantize` says: the values are the same."""


class Mxfp4Tensor(PackedTensor):
    """A tensor stored as blocks and scales."""

    def describe(self) -> TensorInfo:
        name, scales_name = self.parts
        blocks = self.codes.packed_shape(name, _STORED)
        scales = self.scales.packed_shape(scales_name, _STORED)
        if len(blocks) != 4 or blocks[-1] != _BYTES or blocks[:-1] != scales:
            raise CheckpointError(
                f"expected {name} of shape [experts, outputs, groups, {_BYTES}] and {SCALES} of the same "
                f"without the last, got {blocks} and {scales}. The file is damaged: get it again."
            )
        experts, outputs, groups, _ = blocks
        return TensorInfo((experts, groups * 2 * _BYTES, outputs), torch.bfloat16, "MXFP4", packed=WeightForm.MXFP4)

    def read(self) -> Tensor:
        name, scales_name = self.parts
        return decode(self.codes.read(name), self.scales.read(scales_name)).transpose(1, 2)

    def read_packed(self) -> tuple[Tensor, Tensor]:
        name, scales_name = self.parts
        return self.codes.read(name).flatten(2), self.scales.read(scales_name)


class Mxfp4(PackedFormat):
    """The format."""

    def pair_tensors(self, owners: Mapping[str, SafetensorsFile]) -> Mapping[str, PackedTensor]:
        halves = {suffix: {n.removesuffix(suffix) for n in owners if n.endswith(suffix)} for suffix in (BLOCKS, SCALES)}
        alone = halves[BLOCKS] ^ halves[SCALES]
        if alone:
            raise CheckpointError(
                f"expected {BLOCKS} and {SCALES} of every MXFP4 tensor, got one of the two of {min(alone)!r}. "
                "Get the missing part."
            )
        twice = halves[BLOCKS] & set(owners)
        if twice:
            raise CheckpointError(
                f"expected {min(twice)!r} as MXFP4 or unquantised, got both. Remove one from the files and their index."
            )
        check_unconverted(METHOD, self.section, sorted(halves[BLOCKS]))
        parts = {name: (name + BLOCKS, name + SCALES) for name in sorted(halves[BLOCKS])}
        return {name: Mxfp4Tensor(pair, *(owners[part] for part in pair)) for name, pair in parts.items()}

    @property
    def expert_form(self) -> WeightForm:
        return WeightForm.MXFP4


def read_section(section: Mapping[str, object]) -> Mxfp4:
    """The format that a config's section describes. Raises if it uses an unsupported setting."""
    check_settings(METHOD, section, _SETTINGS)
    if section.get("dequantize") not in (None, True, False):
        raise UnsupportedModelError(f"expected 'dequantize' to be true or false, got {section['dequantize']!r}.")
    return Mxfp4(section)


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """[experts, outputs, groups, 16] and [experts, outputs, groups] uint8 to [experts, outputs, groups * 32] bf16."""
    pairs, powers = _byte_values(), _scale_values()
    decoded = torch.empty(*blocks.shape, 2, dtype=torch.bfloat16)
    # One expert at a time: the indices take four times the memory of the stored bytes.
    for target, expert_blocks, expert_scales in zip(decoded, blocks, scales, strict=True):
        elements = pairs.index_select(0, expert_blocks.flatten().int()).view(target.shape)
        power = powers.index_select(0, expert_scales.flatten().int()).view(*expert_scales.shape, 1, 1)
        torch.mul(elements, power, out=target)
    return decoded.flatten(2)


def _byte_values() -> Tensor:
    """The two elements of each byte, [256, 2] bf16: one bit of sign, two of exponent, one of mantissa."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    elements = torch.cat((magnitudes, -magnitudes))
    byte = torch.arange(256)
    return torch.stack((elements[byte & 0x0F], elements[byte >> 4]), dim=1).bfloat16()


def _scale_values() -> Tensor:
    """The power of two of each scale, [256] bf16; the last is NaN."""
    powers = torch.pow(2.0, torch.arange(256, dtype=torch.float64) - 127)
    powers[255] = torch.nan
    return powers.bfloat16()
