"""Rounding of a product's inputs to 8 bits, in blocks of 32 with a scale each.

    scale = largest |x| / 127            code = round(x * 127 / largest |x|), ties to even
    sums  = sum of the codes 0 to 15, sum of the codes 16 to 31

The codes of a block are in the order of the inputs. Where a processor multiplies pairs of rows, the two blocks of rows
0 and 1, of rows 2 and 3, and so on exchange octets, which are 8 consecutive codes; a last row without another does not:

    block of the first row     octet 0 of the first row, octet 0 of the second row, octet 1 of the first, of the second
    block of the second row    octet 2 of the first row, octet 2 of the second row, octet 3 of the first, of the second

A block whose largest number is below 2**-120 has codes 0: the factor of its codes would be infinite. A block with NaN
or infinities has a scale that is NaN or infinite, so that the outputs are not finite either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sightline.kernels.cpu.compiler import ENTRY, CompiledKernel, compile_kernel
from sightline.kernels.cpu.emitter import F32, I8, I32, I64, Emitter, Value, vector
from sightline.kernels.cpu.floats import load_floats
from sightline.kernels.cpu.once import Once
from sightline.kernels.cpu.panels import BLOCK
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.vector_unit import UNITS

CODES_OFFSET = 0
SCALE_OFFSET = 32
SUM_OFFSETS = (36, 40)
SCALED_SUM_OFFSET = 44
"""scale * sum of all 32 codes, in fp32."""
INPUT_BLOCK_BYTES = 48
_LARGEST = 127.0
_TINY = 2.0**-120
_ROUNDER = 1.5 * 2**23
"""Added to a small number, and subtracted again, it rounds the number to a whole one: its last bit is worth 1."""


def input_bytes(in_features: int) -> int:
    """The memory of a quantised row."""
    return in_features // BLOCK * INPUT_BLOCK_BYTES


class QuantiseArguments(NamedTuple):
    """The numbers that the kernel reads, in their order."""

    inputs: int
    """Address of the rows to quantise."""
    input_row_bytes: int
    blocks: int
    """Address of the result, aligned to 16 bytes: the blocks of a row, then those of the next row."""
    rows: int
    blocks_per_row: int


@Once
def quantise_kernel(dtype: torch.dtype, processor: Processor) -> CompiledKernel:
    """The kernel that quantises rows of `dtype`; see `QuantiseArguments`."""
    name = f"quantise-{str(dtype).removeprefix('torch.')}"
    return compile_kernel(name, (dtype,), lambda module: write_quantise(module, dtype, processor), processor)


def write_quantise(module: Any, dtype: torch.dtype, processor: Processor) -> None:
    """Fills an LLVM module with the kernel."""
    pairs_rows = UNITS[processor.instructions].pairs_rows
    emitter = Emitter(module, ENTRY, 3)
    arguments, thread, num_threads = emitter.arguments
    given = QuantiseArguments(
        *(emitter.load(arguments, I64, 8 * i, align=8) for i in range(len(QuantiseArguments._fields)))
    )
    first, stop = emitter.share(emitter.times(given.rows, given.blocks_per_row), thread, num_threads)
    with emitter.loop(first, stop) as item:
        row = emitter.build.sdiv(item, given.blocks_per_row)
        block = emitter.build.srem(item, given.blocks_per_row)
        start = emitter.add(given.inputs, emitter.times(row, given.input_row_bytes))
        source = emitter.add(start, emitter.times(block, BLOCK * dtype.itemsize))
        target = emitter.add(given.blocks, emitter.times(item, INPUT_BLOCK_BYTES))
        halves = [emitter.add(target, emitter.number(CODES_OFFSET + start)) for start in (0, BLOCK // 2)]
        pieces = _octets_of_pairs(emitter, given, row, halves[0]) if pairs_rows else halves
        _quantise_block(emitter, dtype, source, target, pieces)
    emitter.finish()


def _octets_of_pairs(emitter: Emitter, given: QuantiseArguments, row: Value, codes: Value) -> list[Value]:
    """The places of the octets of a row whose codes would begin at `codes` if there were no pairs."""
    build, row_bytes = emitter.build, emitter.times(given.blocks_per_row, INPUT_BLOCK_BYTES)
    is_second = build.and_(row, emitter.number(1))
    has_other = build.icmp_signed("<", build.or_(row, emitter.number(1)), given.rows)
    to_next = build.select(has_other, emitter.number(16), emitter.number(8))
    to_upper = build.select(has_other, row_bytes, emitter.number(16))
    # From a second row back to the first one.
    first = emitter.add(build.sub(codes, emitter.times(is_second, row_bytes)), emitter.times(is_second, 8))
    upper = emitter.add(first, to_upper)
    return [first, emitter.add(first, to_next), upper, emitter.add(upper, to_next)]


def _quantise_block(
    emitter: Emitter, dtype: torch.dtype, source: Value, target: Value, pieces: Sequence[Value]
) -> None:
    """`pieces` are the places of equal parts of the codes."""
    build, half = emitter.build, BLOCK // 2
    parts = [load_floats(emitter, source, dtype, half, offset=i * half * dtype.itemsize) for i in range(2)]
    floats = vector(F32, half)
    sizes = [emitter.call(f"llvm.fabs.v{half}f32", floats, [part]) for part in parts]
    # The maximum that is NaN if any number is.
    larger = emitter.call(f"llvm.maximum.v{half}f32", floats, sizes)
    largest = emitter.call(f"llvm.vector.reduce.fmaximum.v{half}f32", F32, [larger])
    scale = build.fdiv(largest, emitter.constant(F32, _LARGEST))
    is_tiny = build.fcmp_ordered("<", largest, emitter.constant(F32, _TINY))
    inverse = build.fdiv(emitter.constant(F32, _LARGEST), largest)
    inverse = build.select(is_tiny, emitter.constant(F32, 0.0), inverse)
    rounder, total = emitter.constant(floats, _ROUNDER), emitter.constant(I32, 0)
    for index, part in enumerate(parts):
        scaled = build.fmul(part, emitter.splat(inverse, half))
        rounded = build.fsub(build.fadd(scaled, rounder), rounder)
        # NaN becomes 0 instead of an undefined number.
        codes = emitter.call(f"llvm.fptosi.sat.v{half}i32.v{half}f32", vector(I32, half), [rounded])
        narrow, size = build.trunc(codes, vector(I8, half)), BLOCK // len(pieces)
        for start in range(0, half, size):
            piece = emitter.shuffle(narrow, range(start, start + size))
            emitter.store(piece, pieces[(index * half + start) // size], align=size)
        partial = emitter.call(f"llvm.vector.reduce.add.v{half}i32", I32, [codes])
        emitter.store(partial, target, SUM_OFFSETS[index], align=4)
        total = build.add(total, partial)
    emitter.store(scale, target, SCALE_OFFSET, align=4)
    emitter.store(build.fmul(scale, build.sitofp(total, F32)), target, SCALED_SUM_OFFSET, align=4)
