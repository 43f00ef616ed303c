"""The forms in which weights of experts are kept: as numbers, or quantised in blocks, decoded by the product."""

import math
from enum import IntEnum

FP8_BLOCK = 128
"""The number of outputs, and of inputs, of a block of `FP8_BLOCKS`."""


class WeightForm(IntEnum):
    """How weights [outputs, inputs] are kept."""

    PLAIN = 0
    """Weights in the dtype of the activations, without scales."""
    MXFP4 = 1
    """[outputs, inputs / 2] uint8, two inputs per byte, the lower bits first. Scales [outputs, inputs / 32] uint8 are
    exponents of two, 127 is 2^0."""
    FP8_BLOCKS = 2
    """float8_e4m3fn. Scales [blocks of outputs, blocks of inputs] are fp32; the last block of either may be smaller."""
    FP8_PRODUCTS = 3
    """Like `FP8_BLOCKS`, but the product is in fp8: activations are rounded to it, with a scale for each row and each
    `FP8_BLOCK` inputs."""


def packed_bytes(form: WeightForm, shape: tuple[int, ...]) -> int:
    """Bytes of the codes and scales of a tensor that decodes to `shape`, in a form that is not `PLAIN`."""
    num_weights = math.prod(shape)
    if form is WeightForm.MXFP4:
        return num_weights // 2 + num_weights // 32
    *matrices, outputs, inputs = shape
    num_scales = math.prod(matrices) * -(-outputs // FP8_BLOCK) * -(-inputs // FP8_BLOCK)
    return num_weights + 4 * num_scales
