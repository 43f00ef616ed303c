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
from contextlib import AbstractContextManager, nullcontext
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
_LINE = 64
"""The bytes of a cache line."""
_PIECE = 16
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


class Rows(NamedTuple):
    """Keys or values: where slot 0 is, and how far it is from a slot to the next and from a head to the next."""

    base: Value
    slot_bytes: Value
    head_bytes: Value

    def tile(self, emitter: Emitter, slots: Value, tile: Value) -> list[Value]:
        """The addresses of the four entries of a tile, given a list of slots."""
        first = emitter.add(slots, emitter.times(tile, 8 * KEYS))
        found = [emitter.load(first, I64, 8 * index, align=8) for index in range(KEYS)]
        return [emitter.add(self.base, emitter.times(slot, self.slot_bytes)) for slot in found]

    def of_head(self, emitter: Emitter, tile: list[Value], head: Value) -> list[Value]:
        """The entries of a head, given those of head 0."""
        return [emitter.add(row, emitter.times(head, self.head_bytes)) for row in tile]


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


def load_cached(emitter: Emitter, form: AttendForm, unit: VectorUnit, address: Value, count: int) -> Value:
    """Keys or values as fp32, divided by the form's factor."""
    if form.cache.itemsize > 1:
        return load_floats(emitter, address, form.cache, count)
    return unit.float8s(emitter, emitter.load(address, vector(I8, count)))


class TileWriter:
    """Emits tiles for a processor."""

    def __init__(self, emitter: Emitter, form: AttendForm, unit: VectorUnit) -> None:
        self._emitter = emitter
        self._form = form
        self._unit = unit
        self._sums = unit.registers // 2
        """Registers that hold sums."""

    def score(self, keys: list[Value], ahead: list[Value], queries: Value, scores: Value) -> None:
        """Writes the products of four keys with the queries of their head [group, key_dim] to scores [group, BLOCK].

        `ahead` are values that are needed soon.
        """
        for query, count in self._query_tiles(max(1, self._sums // KEYS)):
            with query as first:
                self._score_queries(keys, ahead, queries, scores, first, count)

    def _score_queries(
        self, keys: list[Value], ahead: list[Value], queries: Value, scores: Value, query: Value, count: int
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
            loaded = [self._cached(emitter.add(key, at), size) for key in keys]
            for part in pieces(size, width):
                for i, row in enumerate(sums):
                    offset = 4 * (i * form.key_dim + part.first)
                    q = self._padded(load_floats(emitter, place, torch.float32, part.size, offset), width)
                    for each, key in zip(row, loaded, strict=True):
                        k = self._padded(emitter.shuffle(key, range(part.first, part.first + part.size)), width)
                        emitter.set(each, multiply_add(emitter.build, q, k, emitter.get(each)))

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

    def add_values(self, values: list[Value], ahead: list[Value], scores: Value, sums: Value, sums_bytes: int) -> None:
        """Adds four values, weighted by scores [group, BLOCK], to the sums [value_dim] of each query of their head.

        `ahead` are keys that are needed soon. From the sums of a query to those of the next it is `sums_bytes`.
        """
        for query, count in self._query_tiles(4):
            with query as first:
                self._add_to_queries(values, ahead, scores, sums, sums_bytes, first, count)

    def _add_to_queries(
        self,
        values: list[Value],
        ahead: list[Value],
        scores: Value,
        sums: Value,
        sums_bytes: int,
        query: Value,
        count: int,
    ) -> None:
        emitter, form = self._emitter, self._form
        own_scores = emitter.add(scores, emitter.times(query, 4 * BLOCK))
        own_sums = emitter.add(sums, emitter.times(query, sums_bytes))
        weights = [load_floats(emitter, own_scores, torch.float32, KEYS, 4 * BLOCK * i) for i in range(count)]

        def add(first: Value, size: int) -> None:
            at, place = emitter.times(first, form.cache.itemsize), emitter.add(own_sums, emitter.times(first, 4))
            loaded = [self._cached(emitter.add(row, at), size) for row in values]
            for i, weight in enumerate(weights):
                total = load_floats(emitter, place, torch.float32, size, sums_bytes * i)
                for key, value in enumerate(loaded):
                    total = multiply_add(emitter.build, value, emitter.shuffle(weight, [key] * size), total)
                emitter.store(total, place, sums_bytes * i, align=4)

        self._along(form.value_dim, ahead, add)

    def _query_tiles(self, most: int) -> Iterator[tuple[AbstractContextManager[Value], int]]:
        """Blocks of code for all queries of a group, at most `most` at a time, and how many each is for."""
        emitter, group = self._emitter, self._form.group
        width = min(group, most)
        whole = group - group % width
        yield emitter.loop(0, whole, width), width
        if whole < group:
            yield nullcontext(emitter.number(whole)), group - whole

    def _along(self, dims: int, ahead: list[Value], add: Callable[[Value, int], None]) -> None:
        """Calls `add` for all dimensions, some at a time. Asks for the lines of other rows at the same pace."""
        emitter, line = self._emitter, _LINE // self._form.cache.itemsize
        whole = dims - dims % line
        with emitter.loop(0, whole, line) as first:
            at = emitter.times(first, self._form.cache.itemsize)
            for row in ahead:
                emitter.prefetch(emitter.add(row, at), 0, in_first=False)
            for piece in pieces(line, _PIECE):
                add(emitter.add(first, emitter.number(piece.first)), piece.size)
        if whole < dims:
            for piece in pieces(dims - whole, _PIECE):
                add(emitter.number(whole + piece.first), piece.size)

    def _cached(self, address: Value, count: int) -> Value:
        return load_cached(self._emitter, self._form, self._unit, address, count)

    def _padded(self, values: Value, width: int) -> Value:
        """The values, and zeros behind them."""
        count = values.type.count
        if count == width:
            return values
        zeros = self._emitter.constant(values.type, 0.0)
        return self._emitter.shuffle(values, [min(i, count) for i in range(width)], zeros)
