"""LLVM instructions that Numba has no name for: typed loads and stores at addresses, atomics, calls by address, exp.

    load, store      one element of a dtype, converted from and to fp32
    atomics          on int64, sequentially consistent
    exp32            branch-free, so that loops over it become vector code

Addresses are int64. Nothing here checks a bound. Does not know what the numbers mean.
"""

from __future__ import annotations

import platform
from enum import IntEnum

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sightline.kernels.cpu.elementary import exp, tanh

INT8 = ir.IntType(8)
INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
FLOAT = ir.FloatType()
HALF = ir.HalfType()
IS_ARM = platform.machine() in ("aarch64", "arm64")
SPINS_PER_MICROSECOND = 400 if IS_ARM else 20
"""Turns of a waiting loop in a microsecond, roughly: x86's pause is the longer one."""


class Element(IntEnum):
    """The format of a number in memory."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT8 = 3
    """1 sign bit, 4 bits of exponent, 3 of mantissa; no infinity."""


ELEMENTS = {
    torch.float32: Element.FLOAT32,
    torch.bfloat16: Element.BFLOAT16,
    torch.float16: Element.FLOAT16,
    torch.float8_e4m3fn: Element.FLOAT8,
}


def _pointer(builder, address, index, kind):
    base = builder.inttoptr(address, kind.as_pointer())
    return builder.gep(base, [index])


@intrinsic(prefer_literal=True)
def load(typing_context, address, index, element):
    """The element at `index` of the array at `address`, as fp32. `element` is a literal."""
    kind = element.literal_value
    loaded = {0: _load32, 1: _load_bfloat16, 2: _load_half, 3: _load_float8}[kind]

    def generate(context, builder, signature, arguments):
        return loaded(builder, arguments[0], arguments[1])

    return types.float32(types.int64, types.int64, element), generate


@intrinsic(prefer_literal=True)
def store(typing_context, address, index, value, element):
    """Writes the fp32 `value`, rounded to the element, to `index` of the array at `address`."""
    kind = element.literal_value
    stored = {0: _store32, 1: _store_bfloat16, 2: _store_half, 3: _store_float8}[kind]

    def generate(context, builder, signature, arguments):
        stored(builder, arguments[0], arguments[1], arguments[2])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, element), generate


@intrinsic
def load64(typing_context, address, index):
    """The int64 at `index` of the array at `address`."""

    def generate(context, builder, signature, arguments):
        return builder.load(_pointer(builder, arguments[0], arguments[1], INT64))

    return types.int64(types.int64, types.int64), generate


@intrinsic
def store64(typing_context, address, index, value):
    """Writes an int64 to `index` of the array at `address`."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[2], _pointer(builder, arguments[0], arguments[1], INT64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def order32(typing_context, address, index):
    """An int32 that orders the fp32 at `index` of the array at `address`: zeros are equal, NaN is the largest."""

    def generate(context, builder, signature, arguments):
        bits = builder.load(_pointer(builder, arguments[0], arguments[1], INT32), align=4)
        size = builder.and_(bits, ir.Constant(INT32, 0x7FFFFFFF))
        is_negative = builder.icmp_signed("<", bits, ir.Constant(INT32, 0))
        order = builder.select(is_negative, builder.not_(size), size)
        order = builder.select(builder.icmp_signed("==", size, ir.Constant(INT32, 0)), size, order)
        is_nan = builder.icmp_signed(">", size, ir.Constant(INT32, 0x7F800000))
        return builder.select(is_nan, ir.Constant(INT32, 0x7FFFFFFF), order)

    return types.int32(types.int64, types.int64), generate


@intrinsic
def float_of(typing_context, bits):
    """The fp32 whose bits are the low half of `bits`: how arguments hold floats."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.trunc(arguments[0], INT32), FLOAT)

    return types.float32(types.int64), generate


@intrinsic
def atomic_load(typing_context, address):
    """Reads an int64 that other threads write."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def atomic_store(typing_context, address, value):
    """Writes an int64 that other threads read."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], INT64.as_pointer())
        builder.store_atomic(arguments[1], pointer, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def atomic_add(typing_context, address, value):
    """Adds to an int64 that other threads write, and returns what it was before."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def pause(typing_context):
    """Tells the processor that the thread spins."""

    def generate(context, builder, signature, arguments):
        # Hint 1 is Arm's yield.
        name, hints = ("llvm.aarch64.hint", [ir.Constant(INT32, 1)]) if IS_ARM else ("llvm.x86.sse2.pause", [])
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in hints])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), hints)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def call_kernel(typing_context, kernel, arguments, thread, num_threads):
    """Calls the kernel at an address: void(int64, int64, int64)."""

    def generate(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [INT64] * 3)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def exp32(typing_context, value):
    """e to the power of an fp32, within 2 units in the last place; 0 below -87.7, infinite above 88, NaN for NaN."""

    def generate(context, builder, signature, arguments):
        return exp(builder, arguments[0])

    return types.float32(types.float32), generate


@intrinsic
def tanh32(typing_context, value):
    """The hyperbolic tangent of an fp32."""

    def generate(context, builder, signature, arguments):
        return tanh(builder, arguments[0])

    return types.float32(types.float32), generate


@intrinsic
def min32(typing_context, value, limit):
    """The smaller of two fp32; NaN if `value` is."""

    def generate(context, builder, signature, arguments):
        value, limit = arguments
        return builder.select(builder.fcmp_ordered(">", value, limit), limit, value)

    return types.float32(types.float32, types.float32), generate


@intrinsic
def max32(typing_context, value, limit):
    """The larger of two fp32; NaN if `value` is."""

    def generate(context, builder, signature, arguments):
        value, limit = arguments
        return builder.select(builder.fcmp_ordered("<", value, limit), limit, value)

    return types.float32(types.float32, types.float32), generate


def _load32(builder, address, index):
    return builder.load(_pointer(builder, address, index, FLOAT), align=4)


def _load_bfloat16(builder, address, index):
    bits = builder.zext(builder.load(_pointer(builder, address, index, INT16), align=2), INT32)
    return builder.bitcast(builder.shl(bits, ir.Constant(INT32, 16)), FLOAT)


def _load_half(builder, address, index):
    return builder.fpext(builder.load(_pointer(builder, address, index, HALF), align=2), FLOAT)


def _load_float8(builder, address, index):
    """Shifts exponent and mantissa to their places in fp32, and corrects the bias by a product, subnormals included."""
    bits = builder.zext(builder.load(_pointer(builder, address, index, INT8)), INT32)
    sign = builder.shl(builder.and_(bits, ir.Constant(INT32, 0x80)), ir.Constant(INT32, 24))
    rest = builder.and_(bits, ir.Constant(INT32, 0x7F))
    scaled = builder.bitcast(builder.shl(rest, ir.Constant(INT32, 20)), FLOAT)
    magnitude = builder.bitcast(builder.fmul(scaled, ir.Constant(FLOAT, 2.0**120)), INT32)
    is_nan = builder.icmp_unsigned("==", rest, ir.Constant(INT32, 0x7F))
    magnitude = builder.select(is_nan, ir.Constant(INT32, 0x7FC00000), magnitude)
    return builder.bitcast(builder.or_(magnitude, sign), FLOAT)


def _store32(builder, address, index, value):
    builder.store(value, _pointer(builder, address, index, FLOAT), align=4)


def _store_bfloat16(builder, address, index, value):
    """Rounds to the nearest, ties to even. NaN stays NaN."""
    bits = builder.bitcast(value, INT32)
    high = builder.lshr(bits, ir.Constant(INT32, 16))
    odd = builder.and_(high, ir.Constant(INT32, 1))
    rounded = builder.lshr(builder.add(builder.add(bits, ir.Constant(INT32, 0x7FFF)), odd), ir.Constant(INT32, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.select(is_nan, builder.or_(high, ir.Constant(INT32, 0x40)), rounded)
    builder.store(builder.trunc(kept, INT16), _pointer(builder, address, index, INT16), align=2)


def _store_half(builder, address, index, value):
    builder.store(builder.fptrunc(value, HALF), _pointer(builder, address, index, HALF), align=2)


def _store_float8(builder, address, index, value):
    """Saturates at ±448, then rounds to the nearest, ties to even. NaN stays NaN."""
    bits = builder.bitcast(value, INT32)
    sign = builder.lshr(builder.and_(bits, ir.Constant(INT32, 0x80000000)), ir.Constant(INT32, 24))
    size = builder.bitcast(builder.and_(bits, ir.Constant(INT32, 0x7FFFFFFF)), FLOAT)
    size = builder.select(builder.fcmp_ordered(">", size, ir.Constant(FLOAT, 448.0)), ir.Constant(FLOAT, 448.0), size)
    # Normal numbers: rebias, and round away the low 20 bits of the mantissa.
    plain = builder.bitcast(size, INT32)
    odd = builder.and_(builder.lshr(plain, ir.Constant(INT32, 20)), ir.Constant(INT32, 1))
    rebased = builder.sub(plain, ir.Constant(INT32, (127 - 7) << 23))
    normal = builder.lshr(builder.add(builder.add(rebased, ir.Constant(INT32, 0x7FFFF)), odd), ir.Constant(INT32, 20))
    # Subnormal ones are multiples of 2**-9: adding 2**14 leaves exactly these bits, rounded.
    shifted = builder.bitcast(builder.fadd(size, ir.Constant(FLOAT, 2.0**14)), INT32)
    small = builder.sub(shifted, ir.Constant(INT32, (14 + 127) << 23))
    is_small = builder.fcmp_ordered("<", size, ir.Constant(FLOAT, 2.0**-6))
    code = builder.select(is_small, small, normal)
    code = builder.select(builder.fcmp_unordered("uno", value, value), ir.Constant(INT32, 0x7F), code)
    byte = builder.trunc(builder.or_(code, sign), INT8)
    builder.store(byte, _pointer(builder, address, index, INT8))
