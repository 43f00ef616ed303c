"""fp4 matrices in safetensors files: 4-bit floats in rows, each 32 of which share a power of two.

The experts of DeepSeek V4 are published so, beside other matrices in fp8. Decodes each pair exactly. Does not know
models, nor how pairs are found.

    x.weight [outputs, inputs / 2]  int8          two elements per byte, the lower bits first
    x.scale  [outputs, inputs / 32] float8_e8m0   powers of two
"""

from __future__ import annotations

import torch
from torch import Tensor

from sightline.core.errors import CheckpointError
from sightline.kernels.packed_weights import WeightForm
from sightline.models.loading.checkpoint import TensorInfo
from sightline.models.loading.safetensors.mxfp4 import decode
from sightline.models.loading.safetensors.packed import PackedTensor

CODES, SCALES = "I8", "F8_E8M0"
"""The stored types of the two, as the files name them."""
_GROUP = 32
"""Elements that share a scale."""


class Fp4Tensor(PackedTensor):
    """A matrix stored as codes and scales."""

    def describe(self) -> TensorInfo:
        name, scales_name = self.parts
        codes = self.codes.packed_shape(name, CODES)
        scales = self.scales.packed_shape(scales_name, SCALES)
        if len(codes) != 2 or codes[1] * 2 % _GROUP or scales != (codes[0], codes[1] * 2 // _GROUP):
            raise CheckpointError(
                f"expected {name} of shape [outputs, inputs / 2] and {scales_name} with a scale for each {_GROUP} "
                f"inputs of an output, got {codes} and {scales}. The file is damaged: get it again."
            )
        return TensorInfo((codes[0], codes[1] * 2), torch.bfloat16, "FP4", packed=WeightForm.MXFP4)

    def read(self) -> Tensor:
        codes, scales = self.read_packed()
        return decode(codes.view(1, *scales.shape, _GROUP // 2), scales.unsqueeze(0))[0]

    def read_packed(self) -> tuple[Tensor, Tensor]:
        name, scales_name = self.parts
        return self.codes.read(name).view(torch.uint8), self.scales.read(scales_name).view(torch.uint8)
