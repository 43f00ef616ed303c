"""Vector units whose special instructions are spelled out in the operations of any processor.

Kernels for processors that this machine is not then run here: with their panels, their tiles and their order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from sightline.kernels.cpu import block_kernel, input_blocks, lookup_kernel
from sightline.kernels.cpu.emitter import I32, Emitter, Value, vector
from sightline.kernels.cpu.processor import Instructions, Processor
from sightline.kernels.cpu.vector_unit import (
    UNITS,
    NeonDotUnit,
    NeonMatrixUnit,
    PortableUnit,
    VectorUnit,
    Vnni512Unit,
    VnniUnit,
)
from sightline.layers import cpu_compute
from sightline.layers.cpu_compute import CpuCompute
from support.cpu_launchers import SerialLauncher


def sum_unsigned(emitter: Emitter, sums: Value, codes: Value, inputs: Value) -> Value:
    """What `vpdpbusd` is documented to compute."""
    build, lanes = emitter.build, sums.type.count
    wide = vector(I32, 4 * lanes)
    products = build.mul(build.zext(codes, wide), build.sext(inputs, wide))
    for place in range(4):
        sums = build.add(sums, emitter.shuffle(products, [4 * lane + place for lane in range(lanes)]))
    return sums


class SpelledVnni(VnniUnit):
    def sum_unsigned(self, emitter: Emitter, sums: Value, codes: Value, inputs: Value) -> Value:
        return sum_unsigned(emitter, sums, codes, inputs)


class SpelledVnni512(Vnni512Unit):
    def sum_unsigned(self, emitter: Emitter, sums: Value, codes: Value, inputs: Value) -> Value:
        return sum_unsigned(emitter, sums, codes, inputs)


class SpelledDot(NeonDotUnit):
    """`sdot` with the operations of any processor."""

    dot = PortableUnit.dot
    float8s = VectorUnit.float8s
    above_lower_half = VectorUnit.above_lower_half
    above_upper_half = VectorUnit.above_upper_half


class SpelledMatrix(NeonMatrixUnit):
    """What `smmla` and `addp` are documented to compute, and `sdot` as above."""

    dot = PortableUnit.dot
    float8s = VectorUnit.float8s
    above_lower_half = VectorUnit.above_lower_half
    above_upper_half = VectorUnit.above_upper_half

    def multiply(self, emitter: Emitter, sums: Value, inputs: Value, codes: Value) -> Value:
        build = emitter.build
        for place in range(8):
            rows = emitter.shuffle(inputs, [place, place, 8 + place, 8 + place])
            outputs = emitter.shuffle(codes, [place, 8 + place] * 2)
            wide = [build.sext(each, vector(I32, 4)) for each in (rows, outputs)]
            sums = build.add(sums, build.mul(*wide))
        return sums

    def add_neighbours(self, emitter: Emitter, left: Value, right: Value) -> Value:
        even, odd = (emitter.shuffle(left, [start, start + 2, start + 4, start + 6], right) for start in (0, 1))
        return emitter.build.add(even, odd)


SPELLED = {
    Instructions.AVX_VNNI: SpelledVnni(),
    Instructions.AVX512_VNNI: SpelledVnni512(),
    Instructions.NEON_DOT: SpelledDot(),
    Instructions.NEON_MATRIX: SpelledMatrix(),
}


@contextmanager
def spelled_out() -> Iterator[Callable[[Instructions], CpuCompute]]:
    """Gives what computes with instructions that are spelled out, on this machine."""
    this = Processor.detect()

    def compute(instructions: Instructions) -> CpuCompute:
        # Another name than the real one, whose kernels may be compiled already.
        return CpuCompute.on(SerialLauncher(3), Processor(this.triple, "generic", this.features, instructions))

    with pytest.MonkeyPatch.context() as patch:
        for module in (block_kernel, input_blocks, lookup_kernel, cpu_compute):
            patch.setattr(module, "UNITS", {**UNITS, **SPELLED})
        yield compute
