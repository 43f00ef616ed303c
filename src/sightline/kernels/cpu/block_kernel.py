"""Products of quantised rows with weights in panels.

    for each row and output:   y = bias + sum over blocks b of 32 inputs
                                   sum over groups g of b   scale[g] * input_scale[b] * sum(code * input)
                                 + minimum[b] * input_scale[b] * sum(input)

where code is the form's code minus its zero. Products of codes and inputs are summed exactly, in 32 bits; everything
else is fp32. A thread takes panels of outputs for some rows at a time. The weights of a panel are unpacked once for
every tile of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from sightline.kernels.coded_weights import CodeForm
from sightline.kernels.cpu.compiler import ENTRY, CompiledKernel, compile_kernel
from sightline.kernels.cpu.emitter import F32, I8, I32, I64, Emitter, Value, vector
from sightline.kernels.cpu.floats import load_floats, store_floats
from sightline.kernels.cpu.input_blocks import (
    INPUT_BLOCK_BYTES,
    SCALE_OFFSET,
    SCALED_SUM_OFFSET,
    SUM_OFFSETS,
)
from sightline.kernels.cpu.panels import QUADS, PanelLayout
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.vector_unit import UNITS, VectorUnit


class ProductArguments(NamedTuple):
    """The numbers that the kernel reads, in their order."""

    weights: int
    """Address of the panels."""
    inputs: int
    """Address of the quantised rows."""
    input_row_bytes: int
    out: int
    """Address of the first output."""
    out_row_bytes: int
    rows: int
    out_features: int
    spans: int
    """Spans per row."""
    chunk_rows: int
    """The rows that a thread multiplies with a panel before it takes the next: few enough to stay in its cache."""
    bias: int
    """Address of fp32 numbers, 0 if there is none."""
    accumulate: int
    """1 if the result is added to the outputs, 0 if it replaces them."""


@cache
def product_kernel(form: CodeForm, out_dtype: torch.dtype, processor: Processor) -> CompiledKernel:
    """The kernel for weights of a form; see `ProductArguments`."""
    name = f"product-{form.bits}-{form.zero}-{form.group}-{form.span}-{str(out_dtype).removeprefix('torch.')}"
    return compile_kernel(name, lambda module: write_product(module, form, out_dtype, processor), processor)


def write_product(module: Any, form: CodeForm, out_dtype: torch.dtype, processor: Processor) -> None:
    """Fills an LLVM module with the kernel."""
    unit = UNITS[processor.instructions]
    layout = PanelLayout(form, unit.panel)
    tiles = {rows: _write_tile(module, layout, unit, rows) for rows in unit.tile_rows}
    finish = _write_finish(module, unit.panel, out_dtype)
    emitter = Emitter(module, ENTRY, 3)
    arguments, thread, num_threads = emitter.arguments
    given = ProductArguments(
        *(emitter.load(arguments, I64, 8 * i, align=8) for i in range(len(ProductArguments._fields)))
    )
    panels = emitter.divided_up(given.out_features, unit.panel)
    chunks = emitter.divided_up(given.rows, given.chunk_rows)
    panel_bytes = emitter.times(given.spans, layout.span_bytes)
    first, stop = emitter.share(emitter.times(panels, chunks), thread, num_threads)
    results = emitter.room(4 * unit.panel * unit.tile_rows[0])
    next_row = emitter.variable(I64)
    with emitter.loop(first, stop) as item:
        chunk, panel = emitter.build.sdiv(item, panels), emitter.build.srem(item, panels)
        weights = emitter.add(given.weights, emitter.times(panel, panel_bytes))
        emitter.set(next_row, emitter.times(chunk, given.chunk_rows))
        last_row = emitter.smaller(emitter.add(emitter.get(next_row), given.chunk_rows), given.rows)
        output = emitter.times(panel, unit.panel)
        count = emitter.smaller(emitter.build.sub(given.out_features, output), emitter.number(unit.panel))
        bias = emitter.build.select(
            emitter.build.icmp_signed("==", given.bias, emitter.number(0)),
            emitter.number(0),
            emitter.add(given.bias, emitter.times(output, 4)),
        )
        for tile_rows, tile in tiles.items():
            with emitter.loop(emitter.get(next_row), last_row, tile_rows) as row:
                inputs = emitter.add(given.inputs, emitter.times(row, given.input_row_bytes))
                emitter.call_function(tile, [weights, inputs, given.input_row_bytes, given.spans, results])
                out = emitter.add(
                    given.out, emitter.times(row, given.out_row_bytes), emitter.times(output, out_dtype.itemsize)
                )
                for index in range(tile_rows):
                    target = emitter.add(out, emitter.times(given.out_row_bytes, index))
                    source = emitter.add(results, emitter.number(4 * unit.panel * index))
                    emitter.call_function(finish, [source, target, bias, given.accumulate, count])
                emitter.set(next_row, emitter.add(row, emitter.number(tile_rows)))
    emitter.finish()


def _write_finish(module: Any, panel: int, out_dtype: torch.dtype) -> Value:
    """A function that adds the bias, and the outputs if asked, and writes the first `count` outputs of a panel."""
    emitter = Emitter(module, "finish", 5, internal=True)
    results, target, bias, accumulate, count = emitter.arguments
    build = emitter.build

    def finish(width: int, index: Value) -> None:
        place = emitter.times(index, out_dtype.itemsize)
        four = emitter.times(index, 4)
        values = emitter.variable(vector(F32, width))
        emitter.set(values, load_floats(emitter, emitter.add(results, four), torch.float32, width))
        with emitter.when(build.icmp_signed("!=", bias, emitter.number(0))):
            added = load_floats(emitter, emitter.add(bias, four), torch.float32, width)
            emitter.set(values, build.fadd(emitter.get(values), added))
        with emitter.when(build.icmp_signed("!=", accumulate, emitter.number(0))):
            present = load_floats(emitter, emitter.add(target, place), out_dtype, width)
            emitter.set(values, build.fadd(emitter.get(values), present))
        store_floats(emitter, emitter.get(values), emitter.add(target, place), out_dtype)

    whole = build.icmp_signed("==", count, emitter.number(panel))
    with build.if_else(whole) as (then, otherwise):
        with then:
            finish(panel, emitter.number(0))
        with otherwise, emitter.loop(0, count) as index:
            finish(1, index)
    emitter.finish()
    return emitter.function


def _write_tile(module: Any, layout: PanelLayout, unit: VectorUnit, rows: int) -> Value:
    """A function that multiplies a panel with `rows` rows and writes fp32 results [rows, panel].

    Arguments: address of the panel, of the first row, bytes of a row, spans, address of the results.
    """
    emitter = Emitter(module, f"tile{rows}", 5, internal=True)
    weights, inputs, row_bytes, spans, results = emitter.arguments
    tile = _Tile(emitter, layout, unit, rows)
    with emitter.loop(0, spans) as span:
        span_weights = emitter.add(weights, emitter.times(span, layout.span_bytes))
        span_inputs = emitter.add(inputs, emitter.times(span, layout.blocks_per_span * INPUT_BLOCK_BYTES))
        starts = [emitter.add(span_inputs, emitter.times(row_bytes, row)) for row in range(rows)]
        tile.add_span(span_weights, starts)
    for index, value in enumerate(tile.results()):
        emitter.store(value, results, 4 * unit.lanes * index, align=16)
    emitter.finish()
    return emitter.function


class _Tile:
    """The sums of some rows for the outputs of a panel, while they are computed."""

    def __init__(self, emitter: Emitter, layout: PanelLayout, unit: VectorUnit, rows: int) -> None:
        self._emitter = emitter
        self._layout = layout
        self._unit = unit
        self._rows = range(rows)
        self._parts = range(unit.panel // unit.lanes)
        """The vectors of a panel."""
        self._floats = vector(F32, unit.lanes)
        self._totals = [[emitter.variable(self._floats) for _ in self._parts] for _ in self._rows]
        for total in self._each_total():
            emitter.set(total, emitter.constant(self._floats, 0.0))

    def results(self) -> Iterator[Value]:
        """All sums, row by row."""
        return (self._emitter.get(total) for total in self._each_total())

    def add_span(self, weights: Value, inputs: list[Value]) -> None:
        """Adds the products of a span at the address `weights` with the rows' inputs at the addresses `inputs`."""
        emitter, layout, unit = self._emitter, self._layout, self._unit
        scales = [unit.halves(emitter, weights, 2 * unit.lanes * part) for part in self._parts]
        minima = None
        if layout.form.has_minima:
            minima = [unit.halves(emitter, weights, 2 * (unit.panel + unit.lanes * part)) for part in self._parts]
        if not layout.form.has_steps:
            self._add_block(emitter.add(weights, emitter.number(layout.head_bytes)), inputs, [scales], minima)
            return
        with emitter.loop(0, layout.blocks_per_span) as block:
            place = emitter.add(weights, emitter.number(layout.head_bytes), emitter.times(block, layout.block_bytes))
            starts = [emitter.add(start, emitter.times(block, INPUT_BLOCK_BYTES)) for start in inputs]
            by_group = [self._stepped(scales, place, group) for group in range(layout.groups)]
            low = None if minima is None else self._stepped(minima, place, layout.groups)
            self._add_block(emitter.add(place, emitter.number(layout.step_bytes)), starts, by_group, low)

    def _stepped(self, halves: list[Value], place: Value, number: int) -> list[Value]:
        """The halves times the steps with that number in the block."""
        emitter, unit = self._emitter, self._unit
        stepped = []
        for part in self._parts:
            offset = unit.panel * number + unit.lanes * part
            steps = emitter.load(place, vector(I8, unit.lanes), offset)
            stepped.append(emitter.build.fmul(halves[part], emitter.build.sitofp(steps, self._floats)))
        return stepped

    def _add_block(
        self, codes: Value, inputs: list[Value], scales: list[list[Value]], minima: list[Value] | None
    ) -> None:
        emitter, layout = self._emitter, self._layout
        quads_per_group = QUADS // layout.groups
        for group in range(layout.groups):
            sums = [[self._first_sum(start, group)] * len(self._parts) for start in inputs]
            for quad in range(group * quads_per_group, (group + 1) * quads_per_group):
                for part in self._parts:
                    unpacked = self._unpacked(codes, quad, part)
                    for row in self._rows:
                        taken = self._unit.inputs(emitter, inputs[row], quad)
                        sums[row][part] = self._unit.dot(
                            emitter, sums[row][part], unpacked, taken, signed=layout.form.bits == 8
                        )
            for row in self._rows:
                scale = self._splat_float(inputs[row], SCALE_OFFSET)
                for part in self._parts:
                    both = emitter.build.fmul(scales[group][part], scale)
                    products = emitter.build.sitofp(sums[row][part], self._floats)
                    self._add(row, part, products, both)
        if minima is not None:
            for row in self._rows:
                total = self._splat_float(inputs[row], SCALED_SUM_OFFSET)
                for part in self._parts:
                    self._add(row, part, minima[part], total)

    def _first_sum(self, inputs: Value, group: int) -> Value:
        """What the sum of products begins with: minus the zero times the sum of the inputs."""
        emitter, form, lanes = self._emitter, self._layout.form, self._unit.lanes
        zero = self._unit.excess if form.bits == 8 else form.zero
        if zero == 0:
            return emitter.constant(vector(I32, lanes), 0)
        total = emitter.load(inputs, I32, SUM_OFFSETS[group], align=4)
        if self._layout.groups == 1:
            total = emitter.build.add(total, emitter.load(inputs, I32, SUM_OFFSETS[1], align=4))
        return emitter.splat(emitter.build.mul(total, emitter.constant(I32, -zero)), lanes)

    def _unpacked(self, codes: Value, quad: int, part: int) -> Value:
        """The codes of a quad for the outputs of a part of the panel, as bytes."""
        emitter, bits = self._emitter, self._layout.form.bits
        width = 4 * self._unit.lanes
        quad_bytes, kind = 4 * self._unit.panel, vector(I8, width)

        def stored(number: int) -> Value:
            return emitter.load(codes, kind, number * quad_bytes + part * width)

        def shifted(value: Value, places: int, mask: int) -> Value:
            """The bits of `mask`, after a shift to the left, or to the right if `places` is negative."""
            amount = emitter.constant(kind, abs(places))
            if places:
                value = emitter.build.shl(value, amount) if places > 0 else emitter.build.lshr(value, amount)
            return emitter.build.and_(value, emitter.constant(kind, mask))

        if bits == 8:
            return stored(quad)
        lower = shifted(stored(quad % 4), 0 if quad < 4 else -4, 0x0F)
        if bits == 5:
            return emitter.build.or_(lower, shifted(stored(4), 4 - quad, 0x10))
        if bits == 6:
            return emitter.build.or_(lower, shifted(stored(4 + quad // 4), 4 - 2 * (quad % 4), 0x30))
        return lower

    def _splat_float(self, inputs: Value, offset: int) -> Value:
        return self._emitter.splat(self._emitter.load(inputs, F32, offset, align=4), self._unit.lanes)

    def _add(self, row: int, part: int, left: Value, right: Value) -> None:
        total = self._totals[row][part]
        self._emitter.set(total, self._unit.multiply_add(self._emitter, left, right, self._emitter.get(total)))

    def _each_total(self) -> Iterator[Value]:
        return (total for row in self._totals for total in row)
