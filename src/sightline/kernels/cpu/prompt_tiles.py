"""The inner loops of attention of many queries: products of a tile of queries with packed keys, and with packed values.

    keys       turned, [dim, block] fp32: a vector holds one dimension of consecutive keys
    values     [block, dim] fp32: a vector holds consecutive dimensions of one key

A tile has four queries, whose sums stay in registers. Nothing is added across lanes. Does not know softmax or masks.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sightline.kernels.cpu.instructions import FLOAT, INT32, INT64, IS_ARM

LANES = 4 if IS_ARM else 8
QUERIES = 4
"""Queries of a tile."""
VECTORS = 4 if IS_ARM else 2
"""Vectors of keys, or of a value's dimensions, that a tile takes at once: with four queries, as many sums as fit in
registers."""
KEYS = VECTORS * LANES
"""Keys of a tile."""
STEP = 4
"""Dimensions, or keys, of a query that are loaded at once."""


@intrinsic(prefer_literal=True)
def score_tile(typing_context, queries, keys, count, scores, dim, block):
    """Writes scores [QUERIES, block] of queries [QUERIES, dim] with `count` keys, a multiple of `KEYS`.

    All are addresses of fp32 numbers but `count`. `dim`, a multiple of `STEP`, and `block` are literals.
    """
    sizes = (dim.literal_value, block.literal_value)

    def generate(context, builder, signature, arguments):
        _write_scores(builder, arguments, *sizes)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, dim, block), generate


@intrinsic(prefer_literal=True)
def value_tile(typing_context, weights, values, count, sums, dim, block):
    """Adds `count` values, a multiple of `STEP`, with weights [QUERIES, block], to sums [QUERIES, dim].

    All are addresses of fp32 numbers but `count`. `dim`, a multiple of `LANES`, and `block` are literals.
    """
    sizes = (dim.literal_value, block.literal_value)

    def generate(context, builder, signature, arguments):
        _write_sums(builder, arguments, *sizes)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, dim, block), generate


def _write_scores(builder, arguments, dim, block):
    queries, keys, count, scores = arguments[:4]
    vector = ir.VectorType(FLOAT, LANES)
    with cgutils.for_range_slice(builder, _long(0), count, _long(KEYS)) as (first, _):
        place = builder.add(keys, builder.mul(first, _long(4)))
        sums = [[ir.Constant(vector, [0.0] * LANES)] * VECTORS for _ in range(QUERIES)]
        for start in range(0, dim, STEP):
            taken = [_load(builder, queries, query * dim + start, STEP) for query in range(QUERIES)]
            for lane in range(STEP):
                row = (start + lane) * block
                loaded = [_load(builder, place, row + LANES * each, LANES) for each in range(VECTORS)]
                _add_products(builder, sums, [_repeated(builder, each, lane) for each in taken], loaded)
        target = builder.add(scores, builder.mul(first, _long(4)))
        _store_all(builder, sums, target, block)


def _write_sums(builder, arguments, dim, block):
    weights, values, count, results = arguments[:4]
    for first in range(0, dim, VECTORS * LANES):
        width = min(VECTORS, (dim - first) // LANES)
        target = builder.add(results, _long(4 * first))
        rooms = [
            [
                cgutils.alloca_once_value(builder, _load(builder, target, query * dim + LANES * each, LANES))
                for each in range(width)
            ]
            for query in range(QUERIES)
        ]
        with cgutils.for_range_slice(builder, _long(0), count, _long(STEP)) as (key, _):
            own = builder.add(weights, builder.mul(key, _long(4)))
            taken = [_load(builder, own, query * block, STEP) for query in range(QUERIES)]
            row = builder.add(values, builder.mul(key, _long(4 * dim)))
            sums = [[builder.load(room) for room in line] for line in rooms]
            for lane in range(STEP):
                start = lane * dim + first
                loaded = [_load(builder, row, start + LANES * each, LANES) for each in range(width)]
                _add_products(builder, sums, [_repeated(builder, each, lane) for each in taken], loaded)
            for line, found in zip(rooms, sums, strict=True):
                for room, value in zip(line, found, strict=True):
                    builder.store(value, room)
        _store_all(builder, [[builder.load(room) for room in line] for line in rooms], target, dim)


def _add_products(builder, sums, factors, vectors):
    """Adds the product of each query's factor with each vector to its sum."""
    kind = ir.FunctionType(vectors[0].type, [vectors[0].type] * 3)
    multiply_add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
    for query, factor in enumerate(factors):
        sums[query] = [
            builder.call(multiply_add, [vector, factor, total])
            for vector, total in zip(vectors, sums[query], strict=True)
        ]


def _store_all(builder, sums, address, row_size):
    for query, line in enumerate(sums):
        for each, value in enumerate(line):
            place = builder.add(address, _long(4 * (query * row_size + LANES * each)))
            builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=4)


def _repeated(builder, vector, lane):
    """A vector of one of the elements, which instructions take from its place."""
    order = ir.Constant(ir.VectorType(INT32, LANES), [lane] * LANES)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order)


def _load(builder, address, first, lanes):
    """Generates the load of fp32 numbers from number `first` on."""
    kind = ir.VectorType(FLOAT, lanes)
    return builder.load(builder.inttoptr(builder.add(address, _long(4 * first)), kind.as_pointer()), align=4)


def _long(value):
    return ir.Constant(INT64, value)
