"""The inner loops of attention as vector instructions: scores of a block of keys, and sums of a block of values.

A compiler does not find these by itself: several queries share each key or value that is loaded, and all partial sums
stay in registers. Slots are in memory, so keys and values may be anywhere. Does not know softmax.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sightline.kernels.cpu.instructions import FLOAT, INT32, INT64, IS_ARM, load_vector

LANES = 4 if IS_ARM else 8
QUERIES = 4 if IS_ARM else 2
"""Queries of a tile: with four keys or four vectors of values, as many sums as fit in registers."""
KEYS = 4
VECTORS = 4
"""Vectors of values that a tile sums: a cache line or two of each row."""
AHEAD = 8
"""Keys that are brought near before they are needed. As many slots behind the last must be readable."""
_NEAR, _FAR = 3, 2
"""The cache that a prefetch fills: the first, or the second."""
_LINE = 64
"""Bytes that a prefetch brings."""


class _Chunk(NamedTuple):
    """Some dimensions of an entry that fit a vector."""

    first: int
    lanes: int


def _chunks(size: int) -> list[_Chunk]:
    whole = [_Chunk(first, LANES) for first in range(0, size - size % LANES, LANES)]
    return whole + ([_Chunk(size - size % LANES, size % LANES)] if size % LANES else [])


@intrinsic(prefer_literal=True)
def score_keys(typing_context, queries, group, keys, values, slots, strides, count, scores, block, dim, element, ahead):
    """Writes the products of all queries of a group with `count` keys, a multiple of 4.

    queries [group, dim] fp32; keys and values: addresses of slot 0 of a head; slots [count] int64; strides: bytes from
    a slot to the next of keys and of values; scores [group, block] fp32; ahead: slots, keys and values that are needed
    next. They and the values are only brought near. `group`, `block`, `dim` and `element` are literals.
    """
    sizes = (group.literal_value, block.literal_value, dim.literal_value, element.literal_value)

    def generate(context, builder, signature, arguments):
        _write_scores(builder, arguments, *sizes)
        return context.get_dummy_value()

    pair = types.UniTuple(types.int64, 2)
    long = types.int64
    triple = types.UniTuple(types.int64, 3)
    return types.void(long, group, long, long, long, pair, long, long, block, dim, element, triple), generate


@intrinsic(prefer_literal=True)
def sum_values(typing_context, values, slots, stride, count, weights, block, sums, group, dim, element):
    """Adds `count` values, weighted, to the sums of all queries of a group.

    values: address of slot 0 of a head; slots [count] int64; stride: bytes from a slot to the next; weights [group,
    block] fp32; sums [group, dim] fp32. `block`, `group`, `dim` and `element` are literals.
    """
    sizes = (group.literal_value, block.literal_value, dim.literal_value, element.literal_value)

    def generate(context, builder, signature, arguments):
        _write_sums(builder, arguments, *sizes)
        return context.get_dummy_value()

    long = types.int64
    return types.void(long, long, long, long, long, block, long, group, dim, element), generate


def _write_scores(builder, arguments, group, block, dim, element):
    queries, _, keys, values, slots, strides, count, scores = arguments[:8]
    key_stride, value_stride = (builder.extract_value(strides, place) for place in range(2))
    next_slots, next_keys, next_values = (builder.extract_value(arguments[11], place) for place in range(3))
    with cgutils.for_range_slice(builder, _long(0), count, _long(KEYS)) as (j, _):
        found = [_load64(builder, slots, builder.add(j, _long(key))) for key in range(KEYS)]
        rows = [builder.add(keys, builder.mul(slot, key_stride)) for slot in found]
        for key, slot in enumerate(found):
            num_bytes = dim * _BYTES[element]
            _prefetch(builder, builder.add(values, builder.mul(slot, value_stride)), num_bytes, _NEAR)
            soon = _load64(builder, slots, builder.add(j, _long(AHEAD + key)))
            _prefetch(builder, builder.add(keys, builder.mul(soon, key_stride)), num_bytes, _NEAR)
            later = _load64(builder, next_slots, builder.add(j, _long(key)))
            _prefetch(builder, builder.add(next_keys, builder.mul(later, key_stride)), num_bytes, _FAR)
            _prefetch(builder, builder.add(next_values, builder.mul(later, value_stride)), num_bytes, _FAR)
        for first in range(0, group, QUERIES):
            tile = range(first, min(group, first + QUERIES))
            totals = _products(builder, queries, rows, tile, dim, element)
            for query in tile:
                target = builder.add(scores, _long(4 * query * block))
                for key in range(KEYS):
                    _store(builder, target, builder.add(j, _long(key)), totals[query, key])


def _products(builder, queries, rows, tile, dim, element):
    """The products of some queries with some keys, as fp32."""
    sums: dict[tuple[int, int, int], ir.Value] = {}
    for chunk in _chunks(dim):
        loaded = [load_vector(builder, row, chunk.first, chunk.lanes, element) for row in rows]
        for query in tile:
            own = load_vector(builder, queries, query * dim + chunk.first, chunk.lanes, 0)
            for key, vector in enumerate(loaded):
                place = (query, key, chunk.lanes)
                before = sums.get(place, ir.Constant(vector.type, [0.0] * chunk.lanes))
                sums[place] = _multiply_add(builder, own, vector, before)
    totals: dict[tuple[int, int], ir.Value] = {}
    for (query, key, _), vector in sums.items():
        total = _total(builder, vector)
        before = totals.get((query, key))
        totals[query, key] = total if before is None else builder.fadd(before, total)
    return totals


def _write_sums(builder, arguments, group, block, dim, element):
    values, slots, stride, count, weights, _, sums = arguments[:7]
    chunks = _chunks(dim)
    for start in range(0, len(chunks), VECTORS):
        part = chunks[start : start + VECTORS]
        for first in range(0, group, QUERIES):
            tile = range(first, min(group, first + QUERIES))
            places = [(query, chunk) for query in tile for chunk in part]
            rooms = []
            for query, chunk in places:
                vector = load_vector(builder, sums, query * dim + chunk.first, chunk.lanes, 0)
                rooms.append(cgutils.alloca_once_value(builder, vector))
            with cgutils.for_range(builder, count) as loop:
                row = builder.add(values, builder.mul(_load64(builder, slots, loop.index), stride))
                loaded = {chunk: load_vector(builder, row, chunk.first, chunk.lanes, element) for chunk in part}
                for (query, chunk), room in zip(places, rooms, strict=True):
                    weight = _load32(builder, builder.add(weights, _long(4 * query * block)), loop.index)
                    spread = _spread(builder, weight, chunk.lanes)
                    builder.store(_multiply_add(builder, loaded[chunk], spread, builder.load(room)), room)
            for (query, chunk), room in zip(places, rooms, strict=True):
                address = builder.add(sums, _long(4 * (query * dim + chunk.first)))
                vector = builder.load(room)
                builder.store(vector, builder.inttoptr(address, vector.type.as_pointer()), align=4)


_BYTES = (4, 2, 2, 1)
"""The bytes of an element, by its number."""


def _long(value):
    return ir.Constant(INT64, value)


def _load64(builder, address, index):
    return builder.load(builder.gep(builder.inttoptr(address, INT64.as_pointer()), [index]), align=8)


def _load32(builder, address, index):
    return builder.load(builder.gep(builder.inttoptr(address, FLOAT.as_pointer()), [index]), align=4)


def _store(builder, address, index, value):
    builder.store(value, builder.gep(builder.inttoptr(address, FLOAT.as_pointer()), [index]), align=4)


def _prefetch(builder, address, num_bytes, level):
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), INT32, INT32, INT32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    hints = [ir.Constant(INT32, hint) for hint in (0, level, 1)]
    for first in range(0, num_bytes, _LINE):
        pointer = builder.inttoptr(builder.add(address, _long(first)), ir.IntType(8).as_pointer())
        builder.call(prefetch, [pointer, *hints])


def _multiply_add(builder, a, b, c):
    kind = ir.FunctionType(a.type, [a.type] * 3)
    name = f"llvm.fmuladd.v{a.type.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b, c])


def _total(builder, vector):
    """The sum of a vector's lanes."""
    kind = ir.FunctionType(FLOAT, [FLOAT, vector.type])
    name = f"llvm.vector.reduce.fadd.v{vector.type.count}f32"
    reduce = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(reduce, [ir.Constant(FLOAT, 0.0), vector], fastmath=("reassoc", "nsz"))


def _spread(builder, value, lanes):
    vector = ir.VectorType(FLOAT, lanes)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(INT32, 0))
    mask = ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
    return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), mask)
