"""The forms in which weights of experts are kept: as numbers, or quantised in blocks, decoded by the product."""

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
