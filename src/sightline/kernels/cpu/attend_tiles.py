"""The inner loops of attention: products of queries with keys, and weighted sums of values, in registers.

    scores   4 keys and all queries of their head at a time. Sums are as wide as registers allow, so that no addition
             waits for the one before.
    sums     4 values and all queries of their head at a time. Sums are in memory, close by: what counts is that values,
             like keys, are read from one end of a page to the other.

Meanwhile the lines that are needed next are asked for, each once: the values of a block while its keys are read, and
the keys of the next block while values are read. Does not know softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from sightline.kernels.cpu.elementary import multiply_add
from sightline.kernels.cpu.emitter import F32, I8, I64, Emitter, Value, vector
from sightline.kernels.cpu.floats import load_floats
from sightline.kernels.cpu.vector_unit import FLOAT8_FACTOR, VectorUnit

BLOCK = 64
"""Keys whose scores are computed before their values are added."""
KEYS = 4
"""Keys of a tile. A block has whole tiles: the last key is repeated."""

STRETCH = 12288
AHEAD = 12288
UNROLL = 64
NEAR = 1
HALF = True
_LINE = 64
"""The bytes of a cache line."""
_PIECE = 8
"""Dimensions that are loaded at once."""


class AttendForm(NamedTuple):
    """What a kernel is compiled for."""

    q: torch.dtype
    """Queries, and sinks."""
    cache: torch.dtype
    """Keys and values: fp32, bf16, fp16 or fp8."""
    out: torch.dtype
    group: int
    """Query heads that share a key head."""
    key_dim: int
    value_dim: int

    @property
    def factor(self) -> float:
        """What keys and values as they are loaded must be multiplied by."""
        return FLOAT8_FACTOR if self.cache.itemsize == 1 else 1.0


class HeadRows(NamedTuple):
    """The keys or values of one head, given a list of the addresses of head 0's."""

    addresses: Value
    """Address of the list."""
    offset: Value
    """Bytes from head 0 to this one."""
    distance: Value
    """How many rows ahead rows are asked for."""

    def tile(self, emitter: Emitter, first: Value) -> list[Value]:
        """The addresses of `KEYS` entries, given the place of the first in the list."""
        place = emitter.add(self.addresses, emitter.times(first, 8))
        return [emitter.add(emitter.load(place, I64, 8 * index, align=8), self.offset) for index in range(KEYS)]


class _Piece(NamedTuple):
    """Some consecutive dimensions."""

    first: int
    size: int
    """A power of 2."""


def pieces(size: int, largest: int) -> list[_Piece]:
    """Divides dimensions into pieces of at most `largest`, a power of 2."""
    found, first = [], 0
    while first < size:
        while largest > size - first:
            largest //= 2
        found.append(_Piece(first, largest))
        first += largest
    return found


class TileWriter:
    """Emits tiles for a processor."""

    def __init__(self, emitter: Emitter, form: AttendForm, unit: VectorUnit) -> None:
        self._emitter = emitter
        self._form = form
        self._unit = unit
        self._sums = unit.registers // 2
        self._values_sums = unit.registers * 3 // 4
        """Registers that hold sums."""

    def score(
        self, keys: HeadRows, some: tuple[Value, Value], queries: Value, scores: Value
    ) -> None:
        """Writes the products of some keys with the queries of their head [group, key_dim] to scores [group, BLOCK].

        `some` are the first key and the end, whole tiles. `ahead` are values that are needed soon.
        """
        emitter = self._emitter
        with self._tiles(keys, some) as (key, own_keys, own_ahead):
            place = emitter.add(scores, emitter.times(key, 4))
            for query, count in self._query_tiles(max(1, self._sums // KEYS)):
                with query as first:
                    self._score_queries(own_keys, own_ahead, queries, place, first, count)

    @contextmanager
    def _tiles(self, rows: HeadRows, some: tuple[Value, Value]) -> Iterator[tuple[Value, list[Value], list[tuple[Value, Value]]]]:
        """Repeats what is emitted inside for tiles: yields the place of the first row, and the addresses of all.

        Addresses are loaded a tile ahead, so that nothing waits for them.
        """
        emitter = self._emitter
        following = [emitter.variable(I64) for _ in range(KEYS)]
        for variable, address in zip(following, rows.tile(emitter, some[0]), strict=True):
            emitter.set(variable, address)
        with emitter.loop(*some, KEYS) as first:
            own = [emitter.get(each) for each in following]
            later = rows.tile(emitter, emitter.add(first, emitter.number(KEYS)))
            for variable, address in zip(following, later, strict=True):
                emitter.set(variable, address)
            yield first, own, list(zip(later, rows.tile(emitter, emitter.add(first, rows.distance)), strict=True))

    def _score_queries(
        self, keys: list[Value], ahead: list[tuple[Value, Value]], queries: Value, scores: Value, query: Value, count: int
    ) -> None:
        emitter, form, lanes = self._emitter, self._form, self._unit.lanes
        own = emitter.add(queries, emitter.times(query, 4 * form.key_dim))
        width = lanes
        while 2 * width <= _PIECE and count * KEYS * 2 * width <= self._sums * lanes:
            width *= 2
        kind = vector(F32, width)
        sums = [[emitter.variable(kind) for _ in keys] for _ in range(count)]
        for each in (each for row in sums for each in row):
            emitter.set(each, emitter.constant(kind, 0.0))

        def add(first: Value, size: int) -> None:
            at, place = emitter.times(first, form.cache.itemsize), emitter.add(own, emitter.times(first, 4))
            for part in pieces(size, width):
                queried = [
                    self._padded(load_floats(emitter, place, torch.float32, part.size, 4 * (i * form.key_dim + part.first)), width)
                    for i in range(count)
                ]
                for number, key in enumerate(keys):
                    address = emitter.add(key, at, emitter.number(part.first * form.cache.itemsize))
                    k = self._padded(self._cached(address, part.size), width)
                    for q, row in zip(queried, sums, strict=True):
                        emitter.set(row[number], multiply_add(emitter.build, q, k, emitter.get(row[number])))

        self._along(form.key_dim, ahead, add)
        for i, row in enumerate(sums):
            totals = self._totals([emitter.get(each) for each in row])
            place = emitter.add(scores, emitter.times(query, 4 * BLOCK))
            emitter.store(totals, place, 4 * BLOCK * i, align=4)

    def _totals(self, vectors: list[Value]) -> Value:
        """The sum of each of four vectors: pairs of neighbours are added until one number of each is left."""
        while len(vectors) > 1 or vectors[0].type.count > KEYS:
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True)) if len(vectors) > 1 else [(vectors[0], None)]
            vectors = [self._added_neighbours(*pair) for pair in pairs]
        return vectors[0]

    def _added_neighbours(self, left: Value, right: Value | None) -> Value:
        emitter, count = self._emitter, left.type.count * (1 if right is None else 2)
        even, odd = (emitter.shuffle(left, range(first, count, 2), right) for first in (0, 1))
        return emitter.build.fadd(even, odd)

    def add_values(
        self,
        values: HeadRows,
        some: tuple[Value, Value],
        scores: Value,
        sums: Value,
        sums_bytes: int,
    ) -> None:
        """Adds some values, weighted by scores [group, BLOCK], to the sums [value_dim] of each query of their head.

        `some` are the first value and the end, whole tiles. `ahead` are keys that are needed soon. From the sums of a
        query to those of the next it is `sums_bytes`.
        """
        emitter, form = self._emitter, self._form
        for query, count in self._query_tiles(4):
            with query as first:
                own_scores = emitter.add(scores, emitter.times(first, 4 * BLOCK))
                own_sums = emitter.add(sums, emitter.times(first, sums_bytes))
                width = self._unit.lanes
                while 2 * count * width <= self._values_sums * self._unit.lanes:
                    width *= 2
                whole = form.value_dim - form.value_dim % width
                with emitter.loop(0, whole, width) as dim:
                    self._add_dims(values, some, own_scores, own_sums, sums_bytes, count, dim, width)
                for piece in pieces(form.value_dim - whole, width // 2):
                    dim = emitter.number(whole + piece.first)
                    self._add_dims(values, some, own_scores, own_sums, sums_bytes, count, dim, piece.size)

    def _add_dims(
        self,
        values: HeadRows,
        some: tuple[Value, Value],
        scores: Value,
        sums: Value,
        sums_bytes: int,
        count: int,
        dim: Value,
        width: int,
    ) -> None:
        emitter, form = self._emitter, self._form
        at, place = emitter.times(dim, form.cache.itemsize), emitter.add(sums, emitter.times(dim, 4))
        size = min(width, self._unit.lanes * max(1, 4 // form.cache.itemsize) if HALF else self._unit.lanes)
        parts = range(0, width, size)
        totals = [[emitter.variable(vector(F32, size)) for _ in parts] for _ in range(count)]
        for i, row in enumerate(totals):
            for part, total in zip(parts, row, strict=True):
                emitter.set(total, load_floats(emitter, place, torch.float32, size, sums_bytes * i + 4 * part))
        with self._tiles(values, some) as (key, rows, ahead):
            own_scores = emitter.add(scores, emitter.times(key, 4))
            weights = [load_floats(emitter, own_scores, torch.float32, KEYS, 4 * BLOCK * i) for i in range(count)]
            for number, row in enumerate(rows):
                for offset in range(0, width * form.cache.itemsize, _LINE):
                    self._ask_for(ahead[number], at, offset)
                for index, part in enumerate(parts):
                    value = self._cached(emitter.add(row, at, emitter.number(part * form.cache.itemsize)), size)
                    for weight, own in zip(weights, totals, strict=True):
                        factor = emitter.shuffle(weight, [number] * size)
                        emitter.set(own[index], multiply_add(emitter.build, value, factor, emitter.get(own[index])))
        for i, row in enumerate(totals):
            for part, total in zip(parts, row, strict=True):
                emitter.store(emitter.get(total), place, sums_bytes * i + 4 * part, align=4)

    def _query_tiles(self, most: int) -> Iterator[tuple[AbstractContextManager[Value], int]]:
        """Blocks of code for all queries of a group, at most `most` at a time, and how many each is for."""
        emitter, group = self._emitter, self._form.group
        width = min(group, most)
        whole = group - group % width
        yield emitter.loop(0, whole, width), width
        if whole < group:
            yield nullcontext(emitter.number(whole)), group - whole

    def _along(self, dims: int, ahead: list[tuple[Value, Value]], add: Callable[[Value, int], None]) -> None:
        """Calls `add` for all dimensions, some at a time. Asks for the lines of other rows at the same pace."""
        emitter, line = self._emitter, _LINE // self._form.cache.itemsize
        whole = dims - dims % line

        def add_line(first: Value) -> None:
            at = emitter.times(first, self._form.cache.itemsize)
            for row in ahead:
                self._ask_for(row, at, 0)
            for piece in pieces(line, _PIECE):
                add(emitter.add(first, emitter.number(piece.first)), piece.size)

        if whole <= UNROLL:
            for index in range(0, whole, line):
                add_line(emitter.number(index))
        else:
            with emitter.loop(0, whole, line) as first:
                add_line(first)
        if whole < dims:
            for piece in pieces(dims - whole, _PIECE):
                add(emitter.number(whole + piece.first), piece.size)

    def _ask_for(self, rows: tuple[Value, Value], at: Value, offset: int) -> None:
        near, far = rows
        if NEAR:
            self._emitter.prefetch(self._emitter.add(near, at), offset)
        self._emitter.prefetch(self._emitter.add(far, at), offset, in_first=False)

    def _cached(self, address: Value, count: int) -> Value:
        """Keys or values as fp32, divided by the form's factor."""
        emitter, dtype = self._emitter, self._form.cache
        if dtype.itemsize > 1:
            return load_floats(emitter, address, dtype, count)
        return self._unit.float8s(emitter, emitter.load(address, vector(I8, count)))

    def _padded(self, values: Value, width: int) -> Value:
        """The values, and zeros behind them."""
        count = values.type.count
        if count == width:
            return values
        zeros = self._emitter.constant(values.type, 0.0)
        return self._emitter.shuffle(values, [min(i, count) for i in range(width)], zeros)
