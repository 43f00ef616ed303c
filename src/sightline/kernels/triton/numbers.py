"""Numbers inside kernels: products, and what a cache keeps of a value. The same bits on every device as torch's.

Owns, too, what a product needs of memory for warps to compute it as a group. Does not know keys, rows or pages.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WARP_GROUP_ROWS = 64
"""The least rows of a product that four warps of SM90 compute as one group."""
BORDER = 16
"""Numbers: what strides are multiples of, if Triton is to move several at once."""


@triton.jit
def product(a: tl.tensor, b: tl.tensor, added: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """a @ b + added, exact in fp32. The interpreter takes bits of bf16 for integers: it gets what they stand for."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, added, input_precision="ieee")


@triton.jit
def e4m3_bits(value: tl.tensor) -> tl.tensor:
    """The byte of float8_e4m3fn nearest to an fp32 value, ties to even, saturated at ±448; NaN stays NaN.

    Integer arithmetic, so that the interpreter and every device give torch's bits.
    """
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, 0x43E00000)  # 448.0
    # Normal from 2^-6 on: 20 of 23 mantissa bits go, half an ulp is added so that ties come out even, and the bias of
    # the exponent changes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Subnormal: 2^14 has an ulp of 2^-9, which is the step there, so that the addition itself rounds.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return (tl.where(is_nan, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def as_stored(value: tl.tensor, scale: tl.tensor, dtype: tl.constexpr, FP8: tl.constexpr):
    """What is read back of a value, in fp32 and to be multiplied with the scale; and what is written of it."""
    if FP8:
        # div_rn: the plain quotient is an approximation on a device, and would round to other bytes than torch's.
        kept = e4m3_bits(tl.div_rn(value.to(tl.float32), scale))
        back = kept.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        kept = value.to(dtype)
        back = kept.to(tl.float32)
    return back, kept


def stored_view(plane: Tensor) -> Tensor:
    """What kernels write to: e4m3 as bytes, since the interpreter rounds floats otherwise."""
    return plane.view(torch.uint8) if plane.dtype is torch.float8_e4m3fn else plane


def warps_for(wanted: int, rows: int, *loaded: Tensor) -> int:
    """Warps for a product of so many rows, of what is `loaded`: as many as wanted, or two, which are no warp group.

    Where Triton does not know that entries begin on borders, it puts a block into shared memory by way of registers,
    and version 3.6 then makes of a warp group's product one that reads beyond it.
    """
    return wanted if rows < WARP_GROUP_ROWS or all(map(_begins_on_borders, loaded)) else 2


def _begins_on_borders(tensor: Tensor) -> bool:
    """Whether Triton knows it, by the address and each stride; a mask, too, must end on one."""
    strides = all(stride == 1 or stride % BORDER == 0 for stride in tensor.stride())
    return strides and tensor.shape[-1] % BORDER == 0 and tensor.data_ptr() % 16 == 0
