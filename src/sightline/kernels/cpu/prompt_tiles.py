"""The inner loops of attention of many queries: entries are packed once, and multiplied with tiles of queries.

    keys       panels of `panel` keys, [key_dim, panel] fp32 each: a vector holds one dimension of consecutive keys
    values     [BLOCK, value_dim] fp32: a vector holds consecutive dimensions of one key

A tile has four queries, whose sums stay in registers. Nothing is added across lanes. Does not know softmax or masks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sightline.kernels.cpu.attend_tiles import BLOCK, KEYS, AttendForm, load_cached, pieces
from sightline.kernels.cpu.elementary import multiply_add
from sightline.kernels.cpu.emitter import F32, Emitter, Value, vector
from sightline.kernels.cpu.floats import load_floats
from sightline.kernels.cpu.vector_unit import VectorUnit

QUERIES = 4
"""Queries of a tile."""
_STEP = 4
"""Numbers of a query, or of its weights, that are loaded at once."""
_PIECE = 16
"""Dimensions that are packed at once."""


class PromptTiles:
    """Emits tiles for a processor."""

    def __init__(self, emitter: Emitter, form: AttendForm, unit: VectorUnit) -> None:
        self._emitter = emitter
        self._form = form
        self._unit = unit
        self.panel = unit.lanes * max(1, unit.registers // 2 // QUERIES)
        """Keys, or dimensions of a value, that a tile takes at once: their sums take half of the registers."""

    def pack_keys(self, rows: list[Value], keys: Value, first: Value) -> None:
        """Packs four keys, of which the first is number `first` of the block."""
        emitter, panel = self._emitter, self._emitter.number(self.panel)
        number, place = emitter.build.sdiv(first, panel), emitter.build.srem(first, panel)
        panel_bytes = 4 * self.panel * self._form.key_dim
        target = emitter.add(keys, emitter.times(number, panel_bytes), emitter.times(place, 4))

        def pack(dim: Value, size: int) -> None:
            at = emitter.times(dim, self._form.cache.itemsize)
            loaded = [load_cached(emitter, self._form, self._unit, emitter.add(row, at), size) for row in rows]
            halves = [self._interleaved(loaded[i], loaded[i + 1], 1) for i in (0, 2)]
            turned = self._interleaved(halves[0], halves[1], 2)
            own = emitter.add(target, emitter.times(dim, 4 * self.panel))
            for i in range(size):
                four = emitter.shuffle(turned, range(KEYS * i, KEYS * (i + 1)))
                emitter.store(four, own, 4 * self.panel * i, align=4)

        self._along(self._form.key_dim, _PIECE, pack)

    def _interleaved(self, left: Value, right: Value, size: int) -> Value:
        """`size` elements of one vector, then as many of the other, and so on."""
        count = left.type.count
        order = [side + i for first in range(0, count, size) for side in (0, count) for i in range(first, first + size)]
        return self._emitter.shuffle(left, order, right)

    def pack_values(self, rows: list[Value], values: Value, first: Value) -> None:
        """Packs four values, of which the first is number `first` of the block."""
        emitter, row_bytes = self._emitter, 4 * self._form.value_dim
        target = emitter.add(values, emitter.times(first, row_bytes))

        def pack(dim: Value, size: int) -> None:
            at, own = emitter.times(dim, self._form.cache.itemsize), emitter.add(target, emitter.times(dim, 4))
            for i, row in enumerate(rows):
                loaded = load_cached(emitter, self._form, self._unit, emitter.add(row, at), size)
                emitter.store(loaded, own, row_bytes * i, align=4)

        self._along(self._form.value_dim, _PIECE, pack)

    def score(self, queries: Value, keys: Value, scores: Value, first: Value, stop: Value) -> None:
        """Writes scores [QUERIES, BLOCK] of queries [QUERIES, key_dim] with the panels that hold some keys."""
        emitter, kind = self._emitter, vector(F32, self.panel)
        begin = emitter.build.sdiv(first, emitter.number(self.panel))
        with emitter.loop(begin, emitter.divided_up(stop, self.panel)) as panel:
            sums = [emitter.variable(kind) for _ in range(QUERIES)]
            for each in sums:
                emitter.set(each, emitter.constant(kind, 0.0))
            own = emitter.add(keys, emitter.times(panel, 4 * self.panel * self._form.key_dim))

            def add(dim: Value, size: int, own: Value = own, sums: list[Value] = sums) -> None:
                left = emitter.add(queries, emitter.times(dim, 4))
                right = emitter.add(own, emitter.times(dim, 4 * self.panel))
                self._add_products(sums, left, 4 * self._form.key_dim, right, 4 * self.panel, size)

            self._along(self._form.key_dim, _STEP, add)
            target = emitter.add(scores, emitter.times(panel, 4 * self.panel))
            for i, each in enumerate(sums):
                emitter.store(emitter.get(each), target, 4 * BLOCK * i, align=4)

    def add_values(
        self, weights: Value, values: Value, sums: Value, sums_bytes: int, first: Value, stop: Value
    ) -> None:
        """Adds some values, with weights [QUERIES, BLOCK], to the sums [value_dim] of each query.

        From the sums of a query to those of the next it is `sums_bytes`. Keys that complete four have weights too.
        """
        emitter, row_bytes = self._emitter, 4 * self._form.value_dim
        begin = emitter.build.sdiv(first, emitter.number(_STEP))
        end = emitter.divided_up(stop, _STEP)

        def add(dim: Value, size: int) -> None:
            target, source = (emitter.add(each, emitter.times(dim, 4)) for each in (sums, values))
            found = [emitter.variable(vector(F32, size)) for _ in range(QUERIES)]
            for i, each in enumerate(found):
                emitter.set(each, load_floats(emitter, target, torch.float32, size, sums_bytes * i))
            with emitter.loop(begin, end) as step:
                left = emitter.add(weights, emitter.times(step, 4 * _STEP))
                right = emitter.add(source, emitter.times(step, row_bytes * _STEP))
                self._add_products(found, left, 4 * BLOCK, right, row_bytes, _STEP)
            for i, each in enumerate(found):
                emitter.store(emitter.get(each), target, sums_bytes * i, align=4)

        self._along(self._form.value_dim, self.panel, add)

    def _add_products(
        self, sums: list[Value], left: Value, left_bytes: int, right: Value, right_bytes: int, count: int
    ) -> None:
        """Adds `count` numbers of each query, each times a vector, to the query's sum."""
        emitter, size = self._emitter, sums[0].allocated_type.count
        factors = [load_floats(emitter, left, torch.float32, count, left_bytes * i) for i in range(len(sums))]
        for step in range(count):
            loaded = load_floats(emitter, right, torch.float32, size, right_bytes * step)
            for each, factor in zip(sums, factors, strict=True):
                repeated = emitter.shuffle(factor, [step] * size)
                emitter.set(each, multiply_add(emitter.build, loaded, repeated, emitter.get(each)))

    def _along(self, dims: int, step: int, add: Callable[[Value, int], None]) -> None:
        """Calls `add` for all dimensions, at most `step` at a time."""
        whole = dims - dims % step
        with self._emitter.loop(0, whole, step) as first:
            add(first, step)
        for piece in pieces(dims - whole, step):
            add(self._emitter.number(whole + piece.first), piece.size)
