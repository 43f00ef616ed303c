"""Decodes rows of quantised weights in panels: the vectors of tokens.

    w = scale * (code - zero) + minimum, in fp32, times a factor

The same panels serve the product with the matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sightline.kernels.coded_weights import CodeForm
from sightline.kernels.cpu.compiler import ENTRY, CompiledKernel, compile_kernel
from sightline.kernels.cpu.emitter import F32, I16, I32, I64, Emitter, Value, vector
from sightline.kernels.cpu.floats import store_floats
from sightline.kernels.cpu.once import Once
from sightline.kernels.cpu.panels import BLOCK, QUADS, PanelLayout
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.tile import BlockOfWeights, PackedSpan
from sightline.kernels.cpu.vector_unit import UNITS


class LookupArguments(NamedTuple):
    """The numbers that the kernel reads, in their order."""

    weights: int
    """Address of the panels."""
    rows: int
    """Address of the indices of rows, int64."""
    num_rows: int
    out_features: int
    """The rows of the matrix. An index that is not below gives NaN, which fails its sequence alone."""
    out: int
    out_row_bytes: int
    spans: int
    """Spans per row."""
    factor: int
    """The bits of an fp32."""


@Once
def lookup_kernel(form: CodeForm, out_dtype: torch.dtype, processor: Processor) -> CompiledKernel:
    """The kernel for weights of a form; see `LookupArguments`."""
    name = f"lookup-{form.bits}-{form.zero}-{form.group}-{form.span}-{str(out_dtype).removeprefix('torch.')}"
    return compile_kernel(
        name, (form, out_dtype), lambda module: write_lookup(module, form, out_dtype, processor), processor
    )


def write_lookup(module: Any, form: CodeForm, out_dtype: torch.dtype, processor: Processor) -> None:
    """Fills an LLVM module with the kernel."""
    unit = UNITS[processor.instructions]
    layout = PanelLayout(form, unit.panel, unit.quads_together)
    emitter = Emitter(module, ENTRY, 3)
    build = emitter.build
    arguments, thread, num_threads = emitter.arguments
    given = LookupArguments(
        *(emitter.load(arguments, I64, 8 * i, align=8) for i in range(len(LookupArguments._fields)))
    )
    factor = build.bitcast(build.trunc(given.factor, I32), F32)
    first, stop = emitter.share(emitter.times(given.num_rows, given.spans), thread, num_threads)
    with emitter.loop(first, stop) as item:
        number, span = build.sdiv(item, given.spans), build.srem(item, given.spans)
        asked = emitter.load(emitter.add(given.rows, emitter.times(number, 8)), I64, align=8)
        # Unsigned: a negative index is not below either.
        exists = build.icmp_unsigned("<", asked, given.out_features)
        row = build.select(exists, asked, emitter.number(0))
        times = build.select(exists, factor, emitter.constant(F32, float("nan")))
        panel, output = build.sdiv(row, emitter.number(unit.panel)), build.srem(row, emitter.number(unit.panel))
        place = emitter.times(emitter.add(emitter.times(panel, given.spans), span), layout.span_bytes)
        packed = PackedSpan(emitter, layout, unit, emitter.add(given.weights, place), output)
        start = emitter.add(given.out, emitter.times(number, given.out_row_bytes))
        with emitter.loop(0, layout.blocks_per_span) as block:
            index = emitter.add(emitter.times(span, layout.blocks_per_span), block)
            target = emitter.add(start, emitter.times(index, BLOCK * out_dtype.itemsize))
            _write_block(emitter, packed.block(block), times, target, out_dtype)
    emitter.finish()


def _write_block(emitter: Emitter, block: BlockOfWeights, factor: Value, target: Value, dtype: torch.dtype) -> None:
    """Decodes the 32 weights of one output."""
    build, floats, groups = emitter.build, vector(F32, 4), len(block.scales)
    for quad in range(QUADS):
        # 16 bits hold every code with its sign, and minus its zero.
        wide = vector(I16, 4)
        codes = block.codes(quad, 0)
        codes = build.sext(codes, wide) if block.signed else build.zext(codes, wide)
        codes = build.sub(codes, emitter.constant(wide, block.zero))
        scale = emitter.shuffle(block.scales[quad * groups // QUADS][0], [0] * 4)
        values = build.fmul(build.sitofp(codes, floats), scale)
        if block.minima is not None:
            values = build.fadd(values, emitter.shuffle(block.minima[0], [0] * 4))
        values = build.fmul(values, emitter.splat(factor, 4))
        store_floats(emitter, values, target, dtype, offset=4 * quad * dtype.itemsize)
