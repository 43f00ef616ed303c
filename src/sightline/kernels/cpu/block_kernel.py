"""Products of quantised rows with weights in panels.

    for each row and output:   y = bias + sum over blocks b of 32 inputs
                                   sum over groups g of b   scale[g] * input_scale[b] * sum(code * input)
                                 + minimum[b] * input_scale[b] * sum(input)

where code is the form's code minus its zero. Products of codes and inputs are summed exactly, in 32 bits; everything
else is fp32. A thread takes a panel of outputs for a chunk of rows at a time:

    up to 4 rows   the codes are unpacked in registers, for all rows at once
    more           a run of blocks is unpacked to local memory, then multiplied with all rows of the chunk

Codes of 8 bits need no unpacking, so that any number of rows is multiplied in the first way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sightline.kernels.coded_weights import CodeForm
from sightline.kernels.cpu.compiler import ENTRY, CompiledKernel, compile_kernel
from sightline.kernels.cpu.emitter import F32, I64, Emitter, Value, vector
from sightline.kernels.cpu.floats import load_floats, store_floats
from sightline.kernels.cpu.input_blocks import INPUT_BLOCK_BYTES
from sightline.kernels.cpu.once import Once
from sightline.kernels.cpu.panels import PanelLayout
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.tile import PackedSpan, Tile, UnpackedBlocks
from sightline.kernels.cpu.vector_unit import UNITS, VectorUnit

MAX_CHUNK_ROWS = 64
"""The rows that a thread multiplies with a panel before it takes the next: few enough to stay in its cache."""
_RUN_BLOCKS = 64
"""The blocks that are unpacked at a time: about 22 KiB, which stay in the first cache."""


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
    """1 to `MAX_CHUNK_ROWS`; even if it is less than `rows`, so that no pair of rows is divided."""
    bias: int
    """Address of fp32 numbers, 0 if there is none."""
    accumulate: int
    """1 if the result is added to the outputs, 0 if it replaces them."""


@Once
def product_kernel(form: CodeForm, out_dtype: torch.dtype, processor: Processor) -> CompiledKernel:
    """The kernel for weights of a form; see `ProductArguments`."""
    name = f"product-{form.bits}-{form.zero}-{form.group}-{form.span}-{str(out_dtype).removeprefix('torch.')}"
    return compile_kernel(
        name, (form, out_dtype), lambda module: write_product(module, form, out_dtype, processor), processor
    )


def write_product(module: Any, form: CodeForm, out_dtype: torch.dtype, processor: Processor) -> None:
    """Fills an LLVM module with the kernel."""
    unit = UNITS[processor.instructions]
    _ProductWriter(module, PanelLayout(form, unit.panel, unit.quads_together), out_dtype, processor).write()


class _ProductWriter:
    def __init__(self, module: Any, layout: PanelLayout, out_dtype: torch.dtype, processor: Processor) -> None:
        self._module = module
        self._layout = layout
        self._unit = UNITS[processor.instructions]
        self._out_dtype = out_dtype
        self._row_bytes = 4 * layout.panel
        """Bytes of a row of results."""

    def write(self) -> None:
        unit, layout = self._unit, self._layout
        is_unpacked = layout.form.bits == 8
        sizes = sorted({*unit.few_rows, *unit.tile_rows}, reverse=True) if is_unpacked else unit.few_rows
        few = {rows: _write_packed_tile(self._module, layout, unit, rows) for rows in sizes}
        finish = _write_finish(self._module, unit.panel, self._out_dtype)
        emitter = Emitter(self._module, ENTRY, 3)
        arguments, thread, num_threads = emitter.arguments
        given = ProductArguments(
            *(emitter.load(arguments, I64, 8 * i, align=8) for i in range(len(ProductArguments._fields)))
        )
        panels = emitter.divided_up(given.out_features, unit.panel)
        chunks = emitter.divided_up(given.rows, given.chunk_rows)
        panel_bytes = emitter.times(given.spans, layout.span_bytes)
        first, stop = emitter.share(emitter.times(panels, chunks), thread, num_threads)
        results = emitter.room(self._row_bytes * MAX_CHUNK_ROWS)
        with emitter.loop(first, stop) as item:
            chunk, panel = emitter.build.sdiv(item, panels), emitter.build.srem(item, panels)
            weights = emitter.add(given.weights, emitter.times(panel, panel_bytes))
            row = emitter.times(chunk, given.chunk_rows)
            rows = emitter.smaller(emitter.build.sub(given.rows, row), given.chunk_rows)
            inputs = emitter.add(given.inputs, emitter.times(row, given.input_row_bytes))
            self._clear(emitter, results, rows)
            if is_unpacked:
                self._call_tiles(emitter, few, weights, inputs, given.input_row_bytes, given.spans, results, rows)
            else:
                is_few = emitter.build.icmp_signed("<=", rows, emitter.number(unit.few_rows[0]))
                with emitter.build.if_else(is_few) as (then, otherwise):
                    with then:
                        self._call_tiles(
                            emitter, few, weights, inputs, given.input_row_bytes, given.spans, results, rows
                        )
                    with otherwise:
                        self._multiply_runs(emitter, given, weights, inputs, results, rows)
            self._finish_rows(emitter, finish, given, panel, row, rows, results)
        emitter.finish()

    def _clear(self, emitter: Emitter, results: Value, rows: Value) -> None:
        kind = vector(F32, self._layout.panel)
        with emitter.loop(0, rows) as index:
            place = emitter.add(results, emitter.times(index, self._row_bytes))
            emitter.store(emitter.constant(kind, 0.0), place, align=16)

    def _multiply_runs(
        self,
        emitter: Emitter,
        given: ProductArguments,
        weights: Value,
        inputs: Value,
        results: Value,
        rows: Value,
    ) -> None:
        """Unpacks the panel run by run, and multiplies each run with all rows."""
        layout, unit = self._layout, self._unit
        unpack = _write_unpack(self._module, layout, unit)
        tiles = {count: _write_unpacked_tile(self._module, layout, unit, count) for count in unit.tile_rows}
        run = emitter.room(_RUN_BLOCKS * UnpackedBlocks.block_bytes(layout))
        spans_per_run = _RUN_BLOCKS // layout.blocks_per_span
        num_runs = emitter.divided_up(given.spans, spans_per_run)
        with emitter.loop(0, num_runs) as number:
            span = emitter.times(number, spans_per_run)
            spans = emitter.smaller(emitter.build.sub(given.spans, span), emitter.number(spans_per_run))
            source = emitter.add(weights, emitter.times(span, layout.span_bytes))
            emitter.call_function(unpack, [source, spans, run])
            blocks = emitter.times(spans, layout.blocks_per_span)
            start = emitter.add(inputs, emitter.times(span, layout.blocks_per_span * INPUT_BLOCK_BYTES))
            self._call_tiles(emitter, tiles, run, start, given.input_row_bytes, blocks, results, rows)

    def _call_tiles(
        self,
        emitter: Emitter,
        tiles: dict[int, Value],
        weights: Value,
        inputs: Value,
        input_row_bytes: Value,
        length: Value,
        results: Value,
        rows: Value,
    ) -> None:
        """Multiplies all rows, by the largest tiles that fit."""
        done = emitter.variable(I64)
        emitter.set(done, emitter.number(0))
        for tile_rows, tile in tiles.items():
            with emitter.loop(emitter.get(done), rows, tile_rows) as row:
                start = emitter.add(inputs, emitter.times(row, input_row_bytes))
                target = emitter.add(results, emitter.times(row, self._row_bytes))
                emitter.call_function(tile, [weights, start, input_row_bytes, length, target])
                emitter.set(done, emitter.add(row, emitter.number(tile_rows)))

    def _finish_rows(
        self,
        emitter: Emitter,
        finish: Value,
        given: ProductArguments,
        panel: Value,
        row: Value,
        rows: Value,
        results: Value,
    ) -> None:
        output = emitter.times(panel, self._layout.panel)
        count = emitter.smaller(emitter.build.sub(given.out_features, output), emitter.number(self._layout.panel))
        has_none = emitter.build.icmp_signed("==", given.bias, emitter.number(0))
        bias = emitter.build.select(has_none, given.bias, emitter.add(given.bias, emitter.times(output, 4)))
        first = emitter.add(given.out, emitter.times(output, self._out_dtype.itemsize))
        with emitter.loop(0, rows) as index:
            target = emitter.add(first, emitter.times(emitter.add(row, index), given.out_row_bytes))
            source = emitter.add(results, emitter.times(index, self._row_bytes))
            emitter.call_function(finish, [source, target, bias, given.accumulate, count])


def _write_packed_tile(module: Any, layout: PanelLayout, unit: VectorUnit, rows: int) -> Value:
    """A function that multiplies packed spans with `rows` rows and adds to fp32 results [rows, panel].

    Arguments: address of the first span, of the first row, bytes of a row, spans, address of the results.
    """
    emitter = Emitter(module, f"packed{rows}", 5, internal=True)
    weights, inputs, row_bytes, spans, results = emitter.arguments
    tile = Tile(emitter, unit, rows, results)
    with emitter.loop(0, spans) as index:
        span = PackedSpan(emitter, layout, unit, emitter.add(weights, emitter.times(index, layout.span_bytes)))
        start = emitter.add(inputs, emitter.times(index, layout.blocks_per_span * INPUT_BLOCK_BYTES))
        with emitter.loop(0, layout.blocks_per_span) as block:
            place = emitter.add(start, emitter.times(block, INPUT_BLOCK_BYTES))
            tile.add(span.block(block), [emitter.add(place, emitter.times(row_bytes, row)) for row in range(rows)])
    tile.store()
    emitter.finish()
    return emitter.function


def _write_unpacked_tile(module: Any, layout: PanelLayout, unit: VectorUnit, rows: int) -> Value:
    """Like `_write_packed_tile`, for unpacked blocks instead of spans."""
    emitter = Emitter(module, f"unpacked{rows}", 5, internal=True)
    weights, inputs, row_bytes, blocks, results = emitter.arguments
    tile, unpacked = Tile(emitter, unit, rows, results), UnpackedBlocks(emitter, layout, unit)
    with emitter.loop(0, blocks) as index:
        weights_of = emitter.add(weights, emitter.times(index, UnpackedBlocks.block_bytes(layout)))
        place = emitter.add(inputs, emitter.times(index, INPUT_BLOCK_BYTES))
        starts = [emitter.add(place, emitter.times(row_bytes, row)) for row in range(rows)]
        tile.add(unpacked.read(weights_of), starts)
    tile.store()
    emitter.finish()
    return emitter.function


def _write_unpack(module: Any, layout: PanelLayout, unit: VectorUnit) -> Value:
    """A function that unpacks spans. Arguments: address of the first span, spans, address of the unpacked blocks."""
    emitter = Emitter(module, "unpack", 3, internal=True)
    weights, spans, target = emitter.arguments
    unpacked = UnpackedBlocks(emitter, layout, unit)
    with emitter.loop(0, spans) as index:
        span = PackedSpan(emitter, layout, unit, emitter.add(weights, emitter.times(index, layout.span_bytes)))
        first = emitter.times(index, layout.blocks_per_span)
        with emitter.loop(0, layout.blocks_per_span) as block:
            place = emitter.times(emitter.add(first, block), UnpackedBlocks.block_bytes(layout))
            unpacked.write(span.block(block), emitter.add(target, place))
    emitter.finish()
    return emitter.function


def _write_finish(module: Any, panel: int, out_dtype: torch.dtype) -> Value:
    """A function that adds the bias, and the outputs if asked, and writes the first `count` outputs of a panel."""
    emitter = Emitter(module, "finish", 5, internal=True)
    results, target, bias, accumulate, count = emitter.arguments
    build = emitter.build

    def finish(width: int, index: Value) -> None:
        place = emitter.add(target, emitter.times(index, out_dtype.itemsize))
        four = emitter.times(index, 4)
        values = emitter.variable(vector(F32, width))
        emitter.set(values, load_floats(emitter, emitter.add(results, four), torch.float32, width))
        with emitter.when(build.icmp_signed("!=", bias, emitter.number(0))):
            added = load_floats(emitter, emitter.add(bias, four), torch.float32, width)
            emitter.set(values, build.fadd(emitter.get(values), added))
        with emitter.when(build.icmp_signed("!=", accumulate, emitter.number(0))):
            present = load_floats(emitter, place, out_dtype, width)
            emitter.set(values, build.fadd(emitter.get(values), present))
        store_floats(emitter, emitter.get(values), place, out_dtype)

    with build.if_else(build.icmp_signed("==", count, emitter.number(panel))) as (then, otherwise):
        with then:
            finish(panel, emitter.number(0))
        with otherwise, emitter.loop(0, count) as index:
            finish(1, index)
    emitter.finish()
    return emitter.function
