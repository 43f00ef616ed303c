"""The inner loops of attention: products of queries with keys, and weighted sums of values, in registers.

    scores   4 keys and all queries of their head at a time. Sums are as wide as registers allow, so that no addition
             waits for the one before.
    sums     as many dimensions as fit in registers at a time, for all queries of a head, over the values of a stretch.

Rows are listed in the order in which they are read. While a tile is computed, each line of the next one is brought from
the second cache into the first, and each line that is some KiB away from memory into the second. Without that, the
jumps between pages cost as much time as the reading. A processor drops such requests if it gets many at once, so they
are spread evenly. Does not know softmax.
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
_LINE = 64
"""The bytes of a cache line."""
_PIECE = 8
"""Dimensions of keys that are loaded at once."""


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
    """Keys or values of a head, and where those are that are needed later."""

    addresses: Value
    """Address of a list: the addresses of head 0's rows, in the order in which they are read."""
    offset: Value
    """Bytes from head 0's row to this head's."""
    distance: Value
    """How many rows ahead rows are asked for. So many must follow in the list."""
    first: Value
    """The place of the first row in the list."""
    stop: Value
    """The place behind the last row: there are whole tiles."""

    def tile(self, emitter: Emitter, first: Value) -> list[Value]:
        """The rows of a tile, given the place of the first."""
        return rows_of_tile(emitter, self.addresses, self.offset, first)


def rows_of_tile(emitter: Emitter, addresses: Value, offset: Value, first: Value) -> list[Value]:
    """The addresses of `KEYS` rows of a head. For the arguments, see `HeadRows`; `first` is the place in the list."""
    place = emitter.add(addresses, emitter.times(first, 8))
    return [emitter.add(emitter.load(place, I64, 8 * index, align=8), offset) for index in range(KEYS)]


class _Tile(NamedTuple):
    """Rows that are computed at once, and as many that are asked for meanwhile."""

    place: Value
    """The place of the first row in the list."""
    rows: list[Value]
    near: list[Value]
    """The rows of the next tile."""
    far: list[Value]

    def ask(self, emitter: Emitter, row: int, offset: Value) -> None:
        """Asks for the lines at an offset in the row's successors."""
        emitter.prefetch(emitter.add(self.near[row], offset), 0)
        emitter.prefetch(emitter.add(self.far[row], offset), 0, in_first=False)


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


class _Sums(NamedTuple):
    """Sums of values of some queries in memory."""

    address: Value
    query_bytes: int
    """Bytes from the sums of a query to those of the next."""
    num_queries: int


class TileWriter:
    """Emits tiles for a processor."""

    def __init__(self, emitter: Emitter, form: AttendForm, unit: VectorUnit) -> None:
        self._emitter = emitter
        self._form = form
        self._unit = unit
        self._score_sums = unit.registers // 2
        """Registers that hold sums of products. The others hold keys and queries."""
        self._value_sums = 3 * unit.registers // 4
        """Registers that hold sums of values. Few others are needed."""

    def score(self, keys: HeadRows, queries: Value, scores: Value) -> None:
        """Writes the products of keys with the queries of their head [group, key_dim] to scores [group, BLOCK].

        A key's place in the list is its place among the scores.
        """
        emitter = self._emitter
        with self._tiles(keys) as tile:
            place = emitter.add(scores, emitter.times(tile.place, 4))
            for query, count in self._query_tiles(max(1, self._score_sums // KEYS)):
                with query as first:
                    self._score_queries(tile, queries, place, first, count)

    @contextmanager
    def _tiles(self, rows: HeadRows) -> Iterator[_Tile]:
        """Repeats what is emitted inside for all tiles.

        Addresses are loaded a tile ahead: nothing waits for them.
        """
        emitter = self._emitter
        following = [emitter.variable(I64) for _ in range(KEYS)]
        for variable, address in zip(following, rows.tile(emitter, rows.first), strict=True):
            emitter.set(variable, address)
        with emitter.loop(rows.first, rows.stop, KEYS) as place:
            own = [emitter.get(each) for each in following]
            near = rows.tile(emitter, emitter.add(place, emitter.number(KEYS)))
            for variable, address in zip(following, near, strict=True):
                emitter.set(variable, address)
            yield _Tile(place, own, near, rows.tile(emitter, emitter.add(place, rows.distance)))

    def _score_queries(self, tile: _Tile, queries: Value, scores: Value, query: Value, count: int) -> None:
        emitter, form, lanes = self._emitter, self._form, self._unit.lanes
        own = emitter.add(queries, emitter.times(query, 4 * form.key_dim))
        width = lanes
        while 2 * width <= 4 * lanes and count * KEYS * 2 * width <= self._score_sums * lanes:
            width *= 2
        kind = vector(F32, width)
        sums = [[emitter.variable(kind) for _ in tile.rows] for _ in range(count)]
        for each in (each for row in sums for each in row):
            emitter.set(each, emitter.constant(kind, 0.0))

        def add(first: Value, size: int) -> None:
            at, place = emitter.times(first, form.cache.itemsize), emitter.add(own, emitter.times(first, 4))
            loaded = [self._cached(emitter.add(key, at), size) for key in tile.rows]
            for part in pieces(size, width):
                for i, row in enumerate(sums):
                    offset = 4 * (i * form.key_dim + part.first)
                    q = self._padded(load_floats(emitter, place, torch.float32, part.size, offset), width)
                    for each, key in zip(row, loaded, strict=True):
                        k = self._padded(emitter.shuffle(key, range(part.first, part.first + part.size)), width)
                        emitter.set(each, multiply_add(emitter.build, q, k, emitter.get(each)))

        self._along_keys(tile, max(width, _PIECE), add)
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

    def add_values(self, values: HeadRows, scores: Value, sums: Value, sums_bytes: int) -> None:
        """Adds values, weighted by scores [group, BLOCK], to the sums [value_dim] of each query of their head.

        A value's place in the list is its place among the scores. From the sums of a query to those of the next it is
        `sums_bytes`.
        """
        emitter, dims, lanes = self._emitter, self._form.value_dim, self._unit.lanes
        for query, count in self._query_tiles(4):
            with query as first:
                own_scores = emitter.add(scores, emitter.times(first, 4 * BLOCK))
                own_sums = _Sums(emitter.add(sums, emitter.times(first, sums_bytes)), sums_bytes, count)
                width = lanes
                while 2 * count * width <= self._value_sums * lanes:
                    width *= 2
                whole = dims - dims % width
                with emitter.loop(0, whole, width) as dim:
                    self._add_dims(values, own_scores, own_sums, dim, width)
                for piece in pieces(dims - whole, width):
                    self._add_dims(values, own_scores, own_sums, emitter.number(whole + piece.first), piece.size)

    def _add_dims(self, values: HeadRows, scores: Value, sums: _Sums, dim: Value, width: int) -> None:
        """Adds `width` dimensions, from `dim` on, of all values."""
        emitter, size = self._emitter, self._form.cache.itemsize
        # One load fills a register with numbers as they are cached.
        parts = pieces(width, max(1, 4 // size) * self._unit.lanes)
        totals = [[emitter.variable(vector(F32, part.size)) for part in parts] for _ in range(sums.num_queries)]
        place = emitter.add(sums.address, emitter.times(dim, 4))
        for i, row in enumerate(totals):
            for part, total in zip(parts, row, strict=True):
                loaded = load_floats(emitter, place, torch.float32, part.size, sums.query_bytes * i + 4 * part.first)
                emitter.set(total, loaded)
        with self._tiles(values) as tile:
            own = emitter.add(scores, emitter.times(tile.place, 4))
            weights = [load_floats(emitter, own, torch.float32, KEYS, 4 * BLOCK * i) for i in range(sums.num_queries)]
            for number, address in enumerate(tile.rows):
                for offset in range(0, width * size, _LINE):
                    tile.ask(emitter, number, emitter.add(emitter.times(dim, size), emitter.number(offset)))
                for index, part in enumerate(parts):
                    at = emitter.times(emitter.add(dim, emitter.number(part.first)), size)
                    value = self._cached(emitter.add(address, at), part.size)
                    for weight, row in zip(weights, totals, strict=True):
                        factor = emitter.shuffle(weight, [number] * part.size)
                        emitter.set(row[index], multiply_add(emitter.build, value, factor, emitter.get(row[index])))
        for i, row in enumerate(totals):
            for part, total in zip(parts, row, strict=True):
                emitter.store(emitter.get(total), place, sums.query_bytes * i + 4 * part.first, align=4)

    def _query_tiles(self, most: int) -> Iterator[tuple[AbstractContextManager[Value], int]]:
        """Blocks of code for all queries of a group, at most `most` at a time, and how many each is for."""
        emitter, group = self._emitter, self._form.group
        width = min(group, most)
        whole = group - group % width
        yield emitter.loop(0, whole, width), width
        if whole < group:
            yield nullcontext(emitter.number(whole)), group - whole

    def _along_keys(self, tile: _Tile, piece: int, add: Callable[[Value, int], None]) -> None:
        """Calls `add` for all dimensions of keys, at most `piece` at a time. Asks for lines at the same pace."""
        emitter, dims, size = self._emitter, self._form.key_dim, self._form.cache.itemsize
        line = _LINE // size
        whole = dims - dims % line
        with emitter.loop(0, whole, line) as first:
            for row in range(KEYS):
                tile.ask(emitter, row, emitter.times(first, size))
            for part in pieces(line, piece):
                add(emitter.add(first, emitter.number(part.first)), part.size)
        if whole < dims:
            for part in pieces(dims - whole, piece):
                add(emitter.number(whole + part.first), part.size)

    def _cached(self, address: Value, count: int) -> Value:
        return load_cached(self._emitter, self._form, self._unit, address, count)

    def _padded(self, values: Value, width: int) -> Value:
        """The values, and zeros behind them."""
        count = values.type.count
        if count == width:
            return values
        zeros = self._emitter.constant(values.type, 0.0)
        return self._emitter.shuffle(values, [min(i, count) for i in range(width)], zeros)
