"""fp8 tensors in safetensors files: 8-bit floats in rectangular blocks, each with its own fp32 factor.

Pairs `*.weight` with `*.weight_scale_inv`, or with `*.scale` as DeepSeek V4 calls it, and decodes each pair to one fp32
matrix, rounding each element once. Pairs whose codes are 4-bit floats are another format: see `fp4_rows`. Does not know
models.

    x.weight           [outputs, inputs]                        float8_e4m3fn
    x.weight_scale_inv [ceil(outputs / 128), ceil(inputs / 128)] factors, fp32 or powers of two in float8_e8m0; the last
                                                                blocks may be smaller
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.kernels.packed_weights import FP8_BLOCK, WeightForm
from sightline.models.loading.checkpoint import TensorInfo
from sightline.models.loading.safetensors import fp4_rows
from sightline.models.loading.safetensors.file import SafetensorsFile
from sightline.models.loading.safetensors.packed import (
    UNCONVERTED,
    PackedFormat,
    PackedTensor,
    check_settings,
    check_unconverted,
)

METHOD = "fp8"
"""The format's name in `quantization_config`."""
SCALES = "_scale_inv"
_WEIGHT, _SCALE = ".weight", ".scale"
"""How the names of the two end if they do not begin alike."""
_CODES, _FACTORS = "F8_E4M3", ("F32", "F8_E8M0")
"""The stored types of codes, and those of factors, as the files name them."""
_SETTINGS = frozenset(
    {"quant_method", "fmt", "weight_block_size", "activation_scheme", "scale_fmt", "expert_dtype", UNCONVERTED}
)
"""The settings for activations have no effect: activations are not quantised. Nor has `expert_dtype`: the stored types
of tensors say it."""

Block = tuple[int, int]
"""The numbers of outputs and inputs of a block."""


def _form_of(block: Block) -> WeightForm:
    """The form in which experts of this block size are kept."""
    return WeightForm.FP8_BLOCKS if block == (FP8_BLOCK, FP8_BLOCK) else WeightForm.PLAIN


@dataclass(frozen=True)
class Fp8Tensor(PackedTensor):
    """A matrix stored as codes and a factor per block."""

    block: Block

    def describe(self) -> TensorInfo:
        name, scales_name = self.parts
        shape = self.codes.packed_shape(name, _CODES)
        scales = self.scales.packed_shape(scales_name, *_FACTORS)
        expected = tuple(-(-size // block) for size, block in zip(shape, self.block, strict=False))
        if len(shape) != 2 or scales != expected:
            raise CheckpointError(
                f"expected {name} of shape [outputs, inputs] and {SCALES} with a factor for each block of "
                f"{self.block[0]} x {self.block[1]}, got {shape} and {scales}. The file is damaged: get it again."
            )
        return TensorInfo(shape, torch.float32, _CODES, packed=_form_of(self.block))

    def read(self) -> Tensor:
        return decode(*self.read_packed(), self.block)

    def read_packed(self) -> tuple[Tensor, Tensor]:
        name, scales_name = self.parts
        return self.codes.read(name), self.scales.read(scales_name).float()


@dataclass(frozen=True)
class Fp8Blocks(PackedFormat):
    """The format with the size of its blocks."""

    block: Block

    def pair_tensors(self, owners: Mapping[str, SafetensorsFile]) -> Mapping[str, PackedTensor]:
        scales = {name.removesuffix(SCALES): name for name in owners if name.endswith(SCALES)}
        alone = sorted(set(scales) - set(owners))
        if alone:
            raise CheckpointError(
                f"expected {alone[0]!r} beside its {SCALES}, got the factors alone. Get the missing part."
            )
        # Other tensors may end so too, and have no matrix beside them.
        beside = {name.removesuffix(_SCALE) + _WEIGHT: name for name in owners if name.endswith(_SCALE)}
        scales |= {name: scale for name, scale in beside.items() if name in owners}
        check_unconverted(METHOD, self.section, sorted(scales))
        return {name: self._pair(name, scales[name], owners) for name in sorted(scales)}

    @property
    def expert_form(self) -> WeightForm:
        if self.section.get("expert_dtype") == "fp4":
            return WeightForm.MXFP4
        return _form_of(self.block)

    def _pair(self, name: str, scale: str, owners: Mapping[str, SafetensorsFile]) -> PackedTensor:
        if owners[name].stored_as(name) == fp4_rows.CODES:
            return fp4_rows.Fp4Tensor((name, scale), owners[name], owners[scale])
        return Fp8Tensor((name, scale), owners[name], owners[scale], self.block)


def read_section(section: Mapping[str, object]) -> Fp8Blocks:
    """The format that a config's section describes. Raises if it uses an unsupported setting."""
    check_settings(METHOD, section, _SETTINGS)
    for name, known in {
        "fmt": (None, "e4m3"),
        "activation_scheme": (None, "dynamic"),
        "scale_fmt": (None, "ue8m0"),
        "expert_dtype": (None, "fp8", "fp4"),
    }.items():
        if section.get(name) not in known:
            raise UnsupportedModelError(
                f"expected 'quantization_config' of fp8 with {name} {known[1]!r}, got {section[name]!r}. "
                "Use the unquantised model, or a GGUF file."
            )
    size = section.get("weight_block_size")
    match size:
        case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
            return Fp8Blocks(section, (outputs, inputs))
    raise UnsupportedModelError(
        f"expected 'quantization_config' of fp8 with a weight_block_size of two numbers above 0, got {size!r}: one "
        "factor for a whole tensor is another format. Use the unquantised model, or a GGUF file."
    )


def decode(codes: Tensor, factors: Tensor, block: Block) -> Tensor:
    """Decodes [outputs, inputs] float8_e4m3fn with a factor per block to [outputs, inputs] fp32."""
    outputs, inputs = block
    num_rows, num_columns = codes.shape
    decoded = codes.float()
    by_column = factors.repeat_interleave(inputs, dim=1)[:, :num_columns]
    num_whole = num_rows // outputs
    whole = decoded[: num_whole * outputs].view(num_whole, outputs, num_columns)
    whole.mul_(by_column[:num_whole].unsqueeze(1))
    decoded[num_whole * outputs :].mul_(by_column[num_whole:])  # the last block, if it has fewer rows
    return decoded
