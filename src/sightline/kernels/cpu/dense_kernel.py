"""Products of few rows with dense weights, which read each weight once.

    y = x W^T + bias, sums in fp32

Weights [out_features, in_features] stay as they are stored, row by row. A thread takes consecutive outputs. Each tile
of rows multiplies some outputs at once, so that a loaded vector of weights serves all of its rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from sightline.kernels.cpu.compiler import ENTRY, CompiledKernel, compile_kernel
from sightline.kernels.cpu.emitter import F32, I64, Emitter, Value, vector
from sightline.kernels.cpu.floats import load_floats, store_floats
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.vector_unit import UNITS, VectorUnit

_LINE = 64
"""The bytes of a cache line."""
MAX_ROWS = 8
"""The most rows of a product. More rows are limited by arithmetic, for which torch has a better order of loops."""


_AHEAD = 1024
"""How many bytes before they are needed weights are asked for. Rows follow each other, so this may be the next row."""


class _TileShape(NamedTuple):
    """What a tile of some rows computes at once: as many sums as fit in registers."""

    outputs: int
    """One reads the weights as a single stream, which prefetching follows best; more load inputs less often."""
    vectors: int
    """The vectors of each row that are multiplied at once, to hide the latency of additions: a power of 2."""


_TILES = {4: _TileShape(2, 2), 2: _TileShape(1, 4), 1: _TileShape(1, 8)}
"""Tile shapes by the number of rows."""


class DenseArguments(NamedTuple):
    """The numbers that the kernel reads, in their order."""

    weights: int
    """Address of the weights."""
    weight_row_bytes: int
    inputs: int
    input_row_bytes: int
    out: int
    out_row_bytes: int
    rows: int
    """The number of rows, at most `MAX_ROWS`."""
    out_features: int
    in_features: int
    bias: int
    """Address of fp32 numbers, 0 if there is none."""
    accumulate: int
    """1 if the result is added to the outputs, 0 if it replaces them."""


class DenseTypes(NamedTuple):
    """The dtypes that a kernel is compiled for: fp32, bf16 or fp16 each."""

    weights: torch.dtype
    inputs: torch.dtype
    out: torch.dtype


@cache
def dense_kernel(types: DenseTypes, processor: Processor) -> CompiledKernel:
    """The kernel for dtypes; see `DenseArguments`."""
    name = "-".join(("dense", *(str(each).removeprefix("torch.") for each in types)))
    return compile_kernel(name, lambda module: write_dense(module, types, processor), processor)


def write_dense(module: Any, types: DenseTypes, processor: Processor) -> None:
    """Fills an LLVM module with the kernel."""
    unit = UNITS[processor.instructions]
    tiles = {
        rows: {
            outputs: _write_tile(module, types, unit, rows, shape._replace(outputs=outputs))
            for outputs in sorted({shape.outputs, 1}, reverse=True)
        }
        for rows, shape in _TILES.items()
    }
    emitter = Emitter(module, ENTRY, 3)
    arguments, thread, num_threads = emitter.arguments
    given = DenseArguments(*(emitter.load(arguments, I64, 8 * i, align=8) for i in range(len(DenseArguments._fields))))
    first, stop = emitter.share(given.out_features, thread, num_threads)
    # Few outputs at a time, so that their weights are still in the cache for the next tile of rows.
    chunk = max(shape.outputs for shape in _TILES.values())
    done_outputs, done = emitter.variable(I64), emitter.variable(I64)
    with emitter.loop(0, emitter.divided_up(emitter.build.sub(stop, first), chunk)) as number:
        start = emitter.add(first, emitter.times(number, chunk))
        end = emitter.smaller(emitter.add(start, emitter.number(chunk)), stop)
        emitter.set(done, emitter.number(0))
        for rows, by_outputs in tiles.items():
            with emitter.loop(emitter.get(done), given.rows, rows) as row:
                emitter.set(done_outputs, start)
                for step, tile in by_outputs.items():
                    with emitter.loop(emitter.get(done_outputs), end, step) as output:
                        emitter.call_function(tile, [arguments, row, output])
                        emitter.set(done_outputs, emitter.add(output, emitter.number(step)))
                emitter.set(done, emitter.add(row, emitter.number(rows)))
    emitter.finish()


def _write_tile(module: Any, types: DenseTypes, unit: VectorUnit, rows: int, shape: _TileShape) -> Value:
    """A function that computes [rows, outputs]. Arguments: address of the arguments, first row, first output."""
    emitter = Emitter(module, f"tile{rows}x{shape.outputs}", 3, internal=True)
    arguments, row, output = emitter.arguments
    given = DenseArguments(*(emitter.load(arguments, I64, 8 * i, align=8) for i in range(len(DenseArguments._fields))))
    inputs = [
        emitter.add(given.inputs, emitter.times(given.input_row_bytes, emitter.add(row, emitter.number(index))))
        for index in range(rows)
    ]
    weights = [
        emitter.add(given.weights, emitter.times(given.weight_row_bytes, emitter.add(output, emitter.number(index))))
        for index in range(shape.outputs)
    ]
    sums = _Sums(emitter, types, inputs, weights)
    wide = shape.vectors * unit.lanes
    totals = sums.over(emitter.number(0), given.in_features, wide)
    whole = emitter.times(emitter.build.sdiv(given.in_features, emitter.number(wide)), wide)
    rest = sums.over(whole, given.in_features, 1)
    for i in range(rows):
        for j in range(shape.outputs):
            value = emitter.build.fadd(totals[i][j], rest[i][j])
            _finish(
                emitter,
                types.out,
                given,
                value,
                emitter.add(row, emitter.number(i)),
                emitter.add(output, emitter.number(j)),
            )
    emitter.finish()
    return emitter.function


class _Sums:
    """Sums of products of all pairs of some rows and outputs."""

    def __init__(self, emitter: Emitter, types: DenseTypes, inputs: list[Value], weights: list[Value]) -> None:
        self._emitter = emitter
        self._types = types
        self._inputs = inputs
        self._weights = weights

    def over(self, start: Value, stop: Value, width: int) -> list[list[Value]]:
        """The sums [rows][outputs] in fp32 over whole vectors of `width` features between `start` and `stop`."""
        emitter, types, kind = self._emitter, self._types, vector(F32, width)
        sums = [[emitter.variable(kind) for _ in self._weights] for _ in self._inputs]
        for each in (each for row in sums for each in row):
            emitter.set(each, emitter.constant(kind, 0.0))
        with emitter.loop(start, stop, width) as feature:
            at = emitter.times(feature, types.inputs.itemsize)
            loaded = [load_floats(emitter, emitter.add(base, at), types.inputs, width) for base in self._inputs]
            at = emitter.times(feature, types.weights.itemsize)
            for j, base in enumerate(self._weights):
                if width > 1:
                    for line in range(0, width * types.weights.itemsize, _LINE):
                        emitter.prefetch(emitter.add(base, at), _AHEAD + line)
                weights = load_floats(emitter, emitter.add(base, at), types.weights, width)
                for i, x in enumerate(loaded):
                    product = emitter.call(f"llvm.fmuladd.v{width}f32", kind, [weights, x, emitter.get(sums[i][j])])
                    emitter.set(sums[i][j], product)
        return [[self._total(emitter.get(each), width) for each in row] for row in sums]

    def _total(self, values: Value, width: int) -> Value:
        """The sum of a vector, by halves: the order does not depend on the processor."""
        build = self._emitter.build
        while width > 1:
            width //= 2
            lower = self._emitter.shuffle(values, list(range(width)))
            values = build.fadd(lower, self._emitter.shuffle(values, list(range(width, 2 * width))))
        return values


def _finish(
    emitter: Emitter, dtype: torch.dtype, given: DenseArguments, value: Value, row: Value, output: Value
) -> None:
    """Adds the bias, and the output if asked, to a vector of one number, and writes it."""
    build = emitter.build
    address = emitter.add(given.out, emitter.times(row, given.out_row_bytes), emitter.times(output, dtype.itemsize))
    result = emitter.variable(vector(F32, 1))
    emitter.set(result, value)
    with emitter.when(build.icmp_signed("!=", given.bias, emitter.number(0))):
        bias = load_floats(emitter, emitter.add(given.bias, emitter.times(output, 4)), torch.float32, 1)
        emitter.set(result, build.fadd(emitter.get(result), bias))
    with emitter.when(build.icmp_signed("!=", given.accumulate, emitter.number(0))):
        emitter.set(result, build.fadd(emitter.get(result), load_floats(emitter, address, dtype, 1)))
    store_floats(emitter, emitter.get(result), address, dtype)
