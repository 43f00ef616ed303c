"""Arithmetic inside kernels: products, and the rounding of values to cache entries, with the same bits as torch.

Also decides when warps may compute a product as a warp group. Does not know keys, rows or pages.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WARP_GROUP_ROWS = 64
"""The smallest number of rows of a product that four warps of SM90 compute as one group."""
BORDER = 16
"""Strides must be multiples of this many elements for Triton to use vector loads."""


@triton.jit
def product(a: tl.tensor, b: tl.tensor, added: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """a @ b + added, exact in fp32. Converts the operands for the interpreter, which misreads bf16."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, added, input_precision="ieee")


@triton.jit
def e4m3_bits(value: tl.tensor) -> tl.tensor:
    """The byte of the float8_e4m3fn nearest to an fp32 value, ties to even, saturated at ±448; NaN stays NaN.

    Uses integer arithmetic, so that the interpreter and every device give the same bits as torch.
    """
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, 0x43E00000)  # 448.0
    # Normal numbers, from 2^-6 on: drop 20 of 23 mantissa bits, add half an ulp so that ties round to even, and change
    # the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Subnormal numbers: the ulp of 2^14 is 2^-9, their step, so adding 2^14 rounds to it.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return (tl.where(is_nan, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def as_stored(value: tl.tensor, scale: tl.tensor, dtype: tl.constexpr, FP8: tl.constexpr):
    """A value as it will be read back, in fp32 and without the scale; and its stored form."""
    if FP8:
        # div_rn: plain division is an approximation on a GPU, and could round to other bytes than torch.
        kept = e4m3_bits(tl.div_rn(value.to(tl.float32), scale))
        back = kept.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        kept = value.to(dtype)
        back = kept.to(tl.float32)
    return back, kept


def stored_view(plane: Tensor) -> Tensor:
    """The view of a plane that kernels write to: e4m3 as bytes, because the interpreter rounds floats differently."""
    return plane.view(torch.uint8) if plane.dtype is torch.float8_e4m3fn else plane


def warps_for(wanted: int, rows: int, *loaded: Tensor) -> int:
    """The number of warps for a product of `rows` rows of `loaded` tensors: `wanted`, or two, to avoid a warp group.

    If Triton does not know that entries are aligned, it copies a block to shared memory by way of registers, and the
    warp-group product that version 3.6 generates for it reads out of bounds.
    """
    return wanted if rows < WARP_GROUP_ROWS or all(map(begins_on_borders, loaded)) else 2


def begins_on_borders(tensor: Tensor) -> bool:
    """True if Triton knows that entries are aligned: the address, every stride and the last dimension must be."""
    strides = all(stride == 1 or stride % BORDER == 0 for stride in tensor.stride())
    return strides and tensor.shape[-1] % BORDER == 0 and tensor.data_ptr() % 16 == 0
