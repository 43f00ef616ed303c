"""The inner loop of products: some rows of quantised inputs times the outputs of a panel, block by block.

Weights come as `BlockOfWeights`, from their packed form or from one that was unpacked before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from sightline.kernels.cpu.emitter import F32, I8, I32, Emitter, Value, vector
from sightline.kernels.cpu.input_blocks import SCALE_OFFSET, SCALED_SUM_OFFSET, SUM_OFFSETS
from sightline.kernels.cpu.panels import QUADS, PanelLayout
from sightline.kernels.cpu.vector_unit import VectorUnit


class BlockOfWeights(NamedTuple):
    """The weights of a block of 32 inputs for the outputs of a panel, as an inner loop takes them.

    All vectors are of one part of the panel: as many outputs as a vector has lanes.
    """

    codes: Callable[[int, int], Value]
    """Gives the codes of a plane for a part, as bytes; of a quad, if there is one output."""
    signed: bool
    zero: int
    """The number that is subtracted from every code."""
    scales: Sequence[Sequence[Value]]
    """The scales for each group of the block and each part, fp32."""
    minima: Sequence[Value] | None
    """The minimum for each part, fp32."""


class Tile:
    """The sums of some rows for the outputs of a panel, kept in registers."""

    def __init__(self, emitter: Emitter, unit: VectorUnit, rows: int, results: Value) -> None:
        """Begins with the sums in memory at `results`, fp32 [rows, panel]."""
        self._emitter = emitter
        self._unit = unit
        self._rows = range(rows)
        self._parts = range(unit.panel // unit.lanes)
        """The vectors of a panel."""
        self._floats = vector(F32, unit.lanes)
        self._results = results
        self._totals = [[emitter.variable(self._floats) for _ in self._parts] for _ in self._rows]
        for index, total in enumerate(self._each_total()):
            emitter.set(total, emitter.load(results, self._floats, 4 * unit.lanes * index, align=16))

    def store(self) -> None:
        """Writes the sums back."""
        for index, total in enumerate(self._each_total()):
            self._emitter.store(self._emitter.get(total), self._results, 4 * self._unit.lanes * index, align=16)

    def add(self, weights: BlockOfWeights, inputs: Sequence[Value]) -> None:
        """Adds the products of a block with the rows' blocks at the addresses `inputs`."""
        emitter, unit, groups = self._emitter, self._unit, len(weights.scales)
        for group in range(groups):
            first = [self._first_sum(weights, start, group) for start in inputs]
            planes = range(group * QUADS // groups, (group + 1) * QUADS // groups)
            sums = unit.sums(emitter, weights.codes, planes, inputs, first, signed=weights.signed)
            for row in self._rows:
                scale = self._splat_float(inputs[row], SCALE_OFFSET)
                for part in self._parts:
                    both = emitter.build.fmul(weights.scales[group][part], scale)
                    self._add_product(row, part, emitter.build.sitofp(sums[row][part], self._floats), both)
        if weights.minima is not None:
            for row in self._rows:
                total = self._splat_float(inputs[row], SCALED_SUM_OFFSET)
                for part in self._parts:
                    self._add_product(row, part, weights.minima[part], total)

    def _first_sum(self, weights: BlockOfWeights, inputs: Value, group: int) -> Value:
        """What a sum of products begins with: minus the zero times the sum of the inputs."""
        emitter, lanes = self._emitter, self._unit.lanes
        zero = weights.zero + (self._unit.excess if weights.signed else 0)
        if zero == 0:
            return emitter.constant(vector(I32, lanes), 0)
        total = emitter.load(inputs, I32, SUM_OFFSETS[group], align=4)
        if len(weights.scales) == 1:
            total = emitter.build.add(total, emitter.load(inputs, I32, SUM_OFFSETS[1], align=4))
        return emitter.splat(emitter.build.mul(total, emitter.constant(I32, -zero)), lanes)

    def _splat_float(self, inputs: Value, offset: int) -> Value:
        return self._emitter.splat(self._emitter.load(inputs, F32, offset, align=4), self._unit.lanes)

    def _add_product(self, row: int, part: int, left: Value, right: Value) -> None:
        total = self._totals[row][part]
        self._emitter.set(total, self._unit.multiply_add(self._emitter, left, right, self._emitter.get(total)))

    def _each_total(self) -> Iterator[Value]:
        return (total for row in self._totals for total in row)


class PackedSpan:
    """Reads the blocks of a span as `pack` laid them out."""

    def __init__(
        self, emitter: Emitter, layout: PanelLayout, unit: VectorUnit, address: Value, output: Value | None = None
    ) -> None:
        """Reads all outputs of the panel, or with `output` the one of that index, as vectors of one lane."""
        self._emitter = emitter
        self._layout = layout
        self._unit = unit
        self._address = address
        self._output = output
        self._lanes = unit.lanes if output is None else 1
        self._parts = range(unit.panel // unit.lanes if output is None else 1)
        halves = self._of_output(address, 2)
        self._scales = [unit.halves(emitter, halves, 2 * self._lanes * part, self._lanes) for part in self._parts]
        self._minima: list[Value] | None = None
        if layout.form.has_minima:
            self._minima = [
                unit.halves(emitter, halves, 2 * (layout.panel + self._lanes * part), self._lanes)
                for part in self._parts
            ]

    def block(self, index: Value) -> BlockOfWeights:
        """The block with that index in the span."""
        emitter, layout = self._emitter, self._layout
        place = emitter.add(self._address, emitter.number(layout.head_bytes), emitter.times(index, layout.block_bytes))
        scales, minima = [self._scales], self._minima
        if layout.form.has_steps:
            scales = [self._stepped(self._scales, place, group) for group in range(layout.groups)]
            minima = None if minima is None else self._stepped(minima, place, layout.groups)
        codes = emitter.add(place, emitter.number(layout.step_bytes))
        unpacked = partial(self._unpacked if self._output is None else self._unpacked_quad, codes)
        # Codes of 8 bits are stored without their zero.
        signed = layout.form.bits == 8
        zero = 0 if signed else layout.form.zero
        return BlockOfWeights(unpacked, signed, zero, scales, minima)

    def _of_output(self, address: Value, num_bytes: int) -> Value:
        """The place of the chosen output, where each output takes so many bytes."""
        return (
            address
            if self._output is None
            else self._emitter.add(address, self._emitter.times(self._output, num_bytes))
        )

    def _stepped(self, halves: list[Value], place: Value, number: int) -> list[Value]:
        """The halves times the steps with that number in the block."""
        emitter, lanes, start = self._emitter, self._lanes, self._of_output(place, 1)
        stepped = []
        for part in self._parts:
            steps = emitter.load(start, vector(I8, lanes), self._layout.panel * number + lanes * part)
            stepped.append(emitter.build.fmul(halves[part], emitter.build.sitofp(steps, vector(F32, lanes))))
        return stepped

    def _unpacked(self, codes: Value, plane: int, part: int) -> Value:
        """The codes of a plane for a part of the panel, as bytes."""
        emitter, bits = self._emitter, self._layout.form.bits
        width = 4 * self._lanes
        kind = vector(I8, width)

        def stored(number: int) -> Value:
            return emitter.load(codes, kind, number * self._layout.plane_bytes + part * width)

        def shifted(value: Value, places: int, mask: int) -> Value:
            """The bits of `mask`, after a shift to the left, or to the right if `places` is negative."""
            amount = emitter.constant(kind, abs(places))
            if places:
                value = emitter.build.shl(value, amount) if places > 0 else emitter.build.lshr(value, amount)
            return emitter.build.and_(value, emitter.constant(kind, mask))

        if bits == 8:
            return stored(plane)
        if bits == 4:
            return shifted(stored(plane % 4), 0 if plane < 4 else -4, 0x0F)
        higher_bits = bits - 4
        mask = (1 << higher_bits) - 1
        number, place = (4, plane) if higher_bits == 1 else (4 + plane // 4, 2 * (plane % 4))
        if plane < 4:
            return self._unit.above_lower_half(emitter, stored(plane), shifted(stored(number), -place, mask))
        return self._unit.above_upper_half(emitter, stored(plane % 4), shifted(stored(number), 4 - place, mask << 4))

    def _unpacked_quad(self, codes: Value, quad: int, part: int) -> Value:
        """The codes of a quad for the chosen output, as bytes."""
        del part  # there is one
        emitter, build, layout, bits = self._emitter, self._emitter.build, self._layout, self._layout.form.bits
        together, kind = layout.quads_together, vector(I8, 4)
        # The quad is in this plane, or in the next one if the output is in the second half of the panel.
        plane, offset = quad // together * together, 4 * (quad % together)
        half, output = emitter.number(0), self._output
        if together == 2:
            outputs = emitter.number(layout.panel // 2)
            half, output = build.udiv(self._output, outputs), build.urem(self._output, outputs)
        place = emitter.add(codes, emitter.times(output, 4 * together))

        def stored(number: int, start: Value) -> Value:
            return emitter.load(start, kind, number * layout.plane_bytes + offset)

        def shifted(value: Value, constant: int, per_half: int, mask: int) -> Value:
            """The bits of `mask`, after a shift to the right that depends on the half."""
            places = build.trunc(emitter.add(emitter.number(constant), emitter.times(half, per_half)), I8)
            return build.and_(build.lshr(value, emitter.splat(places, 4)), emitter.constant(kind, mask))

        in_plane = emitter.add(place, emitter.times(half, layout.plane_bytes))
        if bits == 8:
            return stored(plane, in_plane)
        lower = shifted(stored(plane % 4, in_plane), 0 if plane < 4 else 4, 0, 0x0F)
        if bits == 4:
            return lower
        higher_bits = bits - 4
        mask = (1 << higher_bits) - 1
        number, bit = (4, plane) if higher_bits == 1 else (4 + plane // 4, 2 * (plane % 4))
        higher = shifted(stored(number, place), bit, higher_bits, mask)
        return build.or_(lower, build.shl(higher, emitter.constant(kind, 4)))


class UnpackedBlocks:
    """Blocks with a signed byte per code and fp32 scales and minima, to be multiplied with many rows.

    block   scales of each group [groups, panel]; minima [panel], if any; codes of each plane [panel, 4]
    """

    def __init__(self, emitter: Emitter, layout: PanelLayout, unit: VectorUnit) -> None:
        self._emitter = emitter
        self._layout = layout
        self._unit = unit
        self._parts = range(unit.panel // unit.lanes)

    @staticmethod
    def block_bytes(layout: PanelLayout) -> int:
        floats = layout.groups + (1 if layout.form.has_minima else 0)
        return layout.panel * (4 * floats + 4 * QUADS)

    def write(self, weights: BlockOfWeights, address: Value) -> None:
        """Writes a block."""
        emitter, unit = self._emitter, self._unit
        rows = [*weights.scales, *([] if weights.minima is None else [weights.minima])]
        for number, row in enumerate(rows):
            for part in self._parts:
                emitter.store(row[part], address, 4 * (unit.panel * number + unit.lanes * part), align=16)
        kind = vector(I8, 4 * unit.lanes)
        for plane in range(QUADS):
            for part in self._parts:
                codes = weights.codes(plane, part)
                if weights.zero:
                    codes = emitter.build.sub(codes, emitter.constant(kind, weights.zero))
                emitter.store(codes, address, self._codes_offset(plane, part), align=16)

    def read(self, address: Value) -> BlockOfWeights:
        """The block at the address."""
        emitter, unit, layout = self._emitter, self._unit, self._layout
        floats = vector(F32, unit.lanes)

        def row(number: int) -> list[Value]:
            return [
                emitter.load(address, floats, 4 * (unit.panel * number + unit.lanes * part), align=16)
                for part in self._parts
            ]

        def codes(plane: int, part: int) -> Value:
            return emitter.load(address, vector(I8, 4 * unit.lanes), self._codes_offset(plane, part), align=16)

        scales = [row(group) for group in range(layout.groups)]
        minima = row(layout.groups) if layout.form.has_minima else None
        return BlockOfWeights(codes, True, 0, scales, minima)

    def _codes_offset(self, plane: int, part: int) -> int:
        codes = self.block_bytes(self._layout) - QUADS * self._layout.plane_bytes
        return codes + plane * self._layout.plane_bytes + 4 * part * self._unit.lanes
