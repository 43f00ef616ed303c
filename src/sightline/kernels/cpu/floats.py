"""Loads and stores of fp32, bf16 and fp16 numbers, which kernels compute with in fp32.

bf16 is converted with integer operations, which every processor has. fp16 uses LLVM's conversion.
"""

from __future__ import annotations

import torch

from sightline.kernels.cpu.emitter import F16, F32, I16, I32, Emitter, Value, vector


def load_floats(emitter: Emitter, address: Value, dtype: torch.dtype, count: int, offset: int = 0) -> Value:
    """`count` consecutive numbers of `dtype` as a vector of fp32."""
    build, floats = emitter.build, vector(F32, count)
    if dtype is torch.float32:
        return emitter.load(address, floats, offset, align=4)
    if dtype is torch.bfloat16:
        bits = emitter.load(address, vector(I16, count), offset, align=2)
        # The upper halves of fp32 numbers, between zeros.
        order = [place for index in range(count) for place in (count + index, index)]
        return build.bitcast(emitter.shuffle(bits, order, emitter.constant(bits.type, 0)), floats)
    if dtype is torch.float16:
        return build.fpext(emitter.load(address, vector(F16, count), offset, align=2), floats)
    raise ValueError(f"expected float32, bfloat16 or float16, got {dtype}")


def store_floats(emitter: Emitter, values: Value, address: Value, dtype: torch.dtype, offset: int = 0) -> None:
    """Writes a vector of fp32 as numbers of `dtype`, rounded to the nearest."""
    build, count = emitter.build, values.type.count
    if dtype is torch.float32:
        emitter.store(values, address, offset, align=4)
    elif dtype is torch.bfloat16:
        emitter.store(_bf16_bits(emitter, values), address, offset, align=2)
    elif dtype is torch.float16:
        emitter.store(build.fptrunc(values, vector(F16, count)), address, offset, align=2)
    else:
        raise ValueError(f"expected float32, bfloat16 or float16, got {dtype}")


def _bf16_bits(emitter: Emitter, values: Value) -> Value:
    """Rounds to the nearest, ties to even. NaN stays NaN."""
    build, words = emitter.build, vector(I32, values.type.count)
    bits = build.bitcast(values, words)
    odd = build.and_(build.lshr(bits, emitter.constant(words, 16)), emitter.constant(words, 1))
    rounded = build.add(bits, build.add(odd, emitter.constant(words, 0x7FFF)))
    quiet = build.or_(bits, emitter.constant(words, 0x400000))
    chosen = build.select(build.fcmp_unordered("uno", values, values), quiet, rounded)
    return build.trunc(build.lshr(chosen, emitter.constant(words, 16)), vector(I16, values.type.count))
