"""Products with dense weights, which stay as they are stored: [out_features, in_features], row by row.

    y = x W^T + bias, sums in fp32

A tile multiplies some rows with some outputs, vector by vector along the features, so that a loaded vector of weights
serves all rows of the tile. Nothing is packed: the sums of a tile stay in registers, and a vector of an input or a
weight is used several times.

    few rows    limited by memory: a tile reads few streams of weights, several vectors at once, and asks for them early
    many rows   limited by arithmetic: as many sums as there are registers. A chunk of outputs, whose weights stay in
                the second cache, is multiplied with all rows of the thread before the next chunk
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from sightline.kernels.cpu.compiler import ENTRY, CompiledKernel, compile_kernel
from sightline.kernels.cpu.emitter import F32, I64, Emitter, Value, vector
from sightline.kernels.cpu.floats import load_floats, store_floats
from sightline.kernels.cpu.once import Once
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.vector_unit import UNITS, VectorUnit

_LINE = 64
"""The bytes of a cache line."""
FEW_ROWS = 8
"""The most rows of a product that is limited by memory."""
_CHUNK_BYTES = 384 << 10
"""Weights of a chunk, for many rows: they share the second cache with inputs and outputs."""
_CHUNK_OUTPUTS = 128
"""The most outputs of a chunk, for many rows: enough for each load of a tile's inputs from the second cache."""
_AHEAD = 1024
"""The distance, in bytes, at which weights are prefetched. Rows follow each other, so this may be the next row."""


class _TileShape(NamedTuple):
    """The size of a tile of some rows: as many sums as fit in registers."""

    outputs: int
    """A power of 2. One reads the weights as a single stream, which prefetching follows best; more load inputs less
    often."""
    vectors: int
    """The vectors of each row that are multiplied at once, to hide the latency of additions: a power of 2."""


class _Tiles(NamedTuple):
    """The tiles of a kernel."""

    by_rows: Mapping[int, _TileShape]
    """By the number of rows, from many to 1."""
    asks_early: bool
    """True if weights are asked for before they are needed."""

    @property
    def outputs(self) -> int:
        """The most outputs of a tile."""
        return max(shape.outputs for shape in self.by_rows.values())


def _tiles(unit: VectorUnit, *, many_rows: bool) -> _Tiles:
    if many_rows:
        sizes = (unit.dense_rows, *(size for size in (4, 2, 1) if size < unit.dense_rows))
        return _Tiles({rows: _TileShape(4, 1) for rows in sizes}, asks_early=False)
    return _Tiles({4: _TileShape(2, 2), 2: _TileShape(1, 4), 1: _TileShape(1, 8)}, asks_early=True)


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
    out_features: int
    in_features: int
    bias: int
    """Address of fp32 numbers, 0 if there is none."""
    accumulate: int
    """1 if the result is added to the outputs, 0 if it replaces them."""
    chunk: int
    """Outputs whose weights are multiplied with all rows of a thread before the next ones: a multiple of a tile's."""
    block: int
    """Rows that threads share the work by."""


class Blocking(NamedTuple):
    """The division of a product into units of work."""

    chunk: int
    block: int

    @classmethod
    def of(cls, rows: int, weight_row_bytes: int, processor: Processor) -> Blocking:
        """The division that `dense_kernel` for so many rows takes."""
        unit, many = UNITS[processor.instructions], rows > FEW_ROWS
        outputs = _tiles(unit, many_rows=many).outputs
        if not many:
            return cls(outputs, FEW_ROWS)
        fitting = _CHUNK_BYTES // weight_row_bytes // outputs * outputs
        return cls(max(outputs, min(_CHUNK_OUTPUTS, fitting)), unit.dense_rows)


class DenseTypes(NamedTuple):
    """The dtypes that a kernel is compiled for: fp32, bf16 or fp16 each."""

    weights: torch.dtype
    inputs: torch.dtype
    out: torch.dtype


@Once
def dense_kernel(types: DenseTypes, processor: Processor, *, many_rows: bool) -> CompiledKernel:
    """The kernel for dtypes and more than `FEW_ROWS` rows, or fewer; see `DenseArguments`."""
    kind = "dense-many" if many_rows else "dense"
    name = "-".join((kind, *(str(each).removeprefix("torch.") for each in types)))

    def write(module: Any) -> None:
        write_dense(module, types, processor, many_rows=many_rows)

    return compile_kernel(name, (types, many_rows), write, processor)


def write_dense(module: Any, types: DenseTypes, processor: Processor, *, many_rows: bool) -> None:
    """Fills an LLVM module with the kernel."""
    unit = UNITS[processor.instructions]
    shapes = _tiles(unit, many_rows=many_rows)
    tiles = {
        rows: {
            outputs: _write_tile(module, types, unit, rows, shape._replace(outputs=outputs), shapes.asks_early)
            for outputs in sorted({shape.outputs, 1}, reverse=True)
        }
        for rows, shape in shapes.by_rows.items()
    }
    emitter = Emitter(module, ENTRY, 3)
    arguments, thread, num_threads = emitter.arguments
    given = _read(emitter, arguments)
    # A unit of work is a block of rows and a chunk of outputs. Consecutive units share the chunk.
    blocks = emitter.divided_up(given.rows, given.block)
    chunks = emitter.divided_up(given.out_features, given.chunk)
    done_outputs, done = emitter.variable(I64), emitter.variable(I64)
    with emitter.loop(*emitter.share(emitter.times(blocks, chunks), thread, num_threads)) as unit_number:
        first_output = emitter.times(emitter.build.sdiv(unit_number, blocks), given.chunk)
        first_row = emitter.times(emitter.build.srem(unit_number, blocks), given.block)
        end = emitter.smaller(emitter.add(first_output, given.chunk), given.out_features)
        stop = emitter.smaller(emitter.add(first_row, given.block), given.rows)
        emitter.set(done, first_row)
        for rows, by_outputs in tiles.items():
            with emitter.loop(emitter.get(done), stop, rows) as row:
                emitter.set(done_outputs, first_output)
                for step, tile in by_outputs.items():
                    with emitter.loop(emitter.get(done_outputs), end, step) as output:
                        emitter.call_function(tile, [arguments, row, output])
                        emitter.set(done_outputs, emitter.add(output, emitter.number(step)))
                emitter.set(done, emitter.add(row, emitter.number(rows)))
    emitter.finish()


def _read(emitter: Emitter, arguments: Value) -> DenseArguments:
    return DenseArguments(*(emitter.argument(arguments, index) for index in range(len(DenseArguments._fields))))


def _write_tile(
    module: Any, types: DenseTypes, unit: VectorUnit, rows: int, shape: _TileShape, asks_early: bool
) -> Value:
    """A function that computes [rows, outputs]. Arguments: address of the arguments, first row, first output."""
    emitter = Emitter(module, f"tile{rows}x{shape.outputs}", 3, internal=True)
    arguments, row, output = emitter.arguments
    given = _read(emitter, arguments)
    inputs = [
        emitter.add(given.inputs, emitter.times(given.input_row_bytes, emitter.add(row, emitter.number(index))))
        for index in range(rows)
    ]
    weights = [
        emitter.add(given.weights, emitter.times(given.weight_row_bytes, emitter.add(output, emitter.number(index))))
        for index in range(shape.outputs)
    ]
    sums = _Sums(emitter, types, inputs, weights, asks_early=asks_early)
    wide = shape.vectors * unit.lanes
    totals = sums.over(emitter.number(0), given.in_features, wide)
    whole = emitter.times(emitter.build.sdiv(given.in_features, emitter.number(wide)), wide)
    rest = sums.over(whole, given.in_features, 1)
    for i in range(rows):
        value = emitter.build.fadd(totals[i], rest[i])
        _finish(emitter, types.out, given, value, emitter.add(row, emitter.number(i)), output)
    emitter.finish()
    return emitter.function


class _Sums:
    """Sums of products of all pairs of some rows and outputs."""

    def __init__(
        self, emitter: Emitter, types: DenseTypes, inputs: list[Value], weights: list[Value], *, asks_early: bool
    ) -> None:
        self._emitter = emitter
        self._types = types
        self._inputs = inputs
        self._weights = weights
        self._asks_early = asks_early

    def over(self, start: Value, stop: Value, width: int) -> list[Value]:
        """For each row a vector of all outputs: the sums over whole vectors of `width` features from start to stop."""
        emitter, types, kind = self._emitter, self._types, vector(F32, width)
        sums = [[emitter.variable(kind) for _ in self._weights] for _ in self._inputs]
        for each in (each for row in sums for each in row):
            emitter.set(each, emitter.constant(kind, 0.0))
        with emitter.loop(start, stop, width) as feature:
            at = emitter.times(feature, types.weights.itemsize)
            weights = [self._weight(emitter.add(base, at), width) for base in self._weights]
            at = emitter.times(feature, types.inputs.itemsize)
            for base, row in zip(self._inputs, sums, strict=True):
                x = load_floats(emitter, emitter.add(base, at), types.inputs, width)
                for weight, total in zip(weights, row, strict=True):
                    product = emitter.call(f"llvm.fmuladd.v{width}f32", kind, [weight, x, emitter.get(total)])
                    emitter.set(total, product)
        return [self._totals([emitter.get(each) for each in row]) for row in sums]

    def _weight(self, address: Value, width: int) -> Value:
        dtype = self._types.weights
        if self._asks_early and width > 1:
            for line in range(0, width * dtype.itemsize, _LINE):
                self._emitter.prefetch(address, _AHEAD + line)
        return load_floats(self._emitter, address, dtype, width)

    def _totals(self, sums: list[Value]) -> Value:
        """The sum of each of some vectors, as a vector. Neighbours are added until one number of each is left."""
        build, count = self._emitter.build, len(sums)
        while len(sums) > 1:
            both = list(range(2 * sums[0].type.count))
            sums = [self._emitter.shuffle(left, both, right) for left, right in zip(sums[::2], sums[1::2], strict=True)]
        [values] = sums
        while values.type.count > count:
            even = list(range(0, values.type.count, 2))
            odd = [place + 1 for place in even]
            values = build.fadd(self._emitter.shuffle(values, even), self._emitter.shuffle(values, odd))
        return values


def _finish(
    emitter: Emitter, dtype: torch.dtype, given: DenseArguments, values: Value, row: Value, output: Value
) -> None:
    """Adds the bias, and the outputs if asked, to the vector of a row's outputs from `output` on, and writes it."""
    build, count = emitter.build, values.type.count
    address = emitter.add(given.out, emitter.times(row, given.out_row_bytes), emitter.times(output, dtype.itemsize))
    result = emitter.variable(values.type)
    emitter.set(result, values)
    with emitter.when(build.icmp_signed("!=", given.bias, emitter.number(0))):
        bias = load_floats(emitter, emitter.add(given.bias, emitter.times(output, 4)), torch.float32, count)
        emitter.set(result, build.fadd(emitter.get(result), bias))
    with emitter.when(build.icmp_signed("!=", given.accumulate, emitter.number(0))):
        emitter.set(result, build.fadd(emitter.get(result), load_floats(emitter, address, dtype, count)))
    store_floats(emitter, emitter.get(result), address, dtype)
