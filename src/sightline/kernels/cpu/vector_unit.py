"""How each set of instructions sums products of small integers, and what vectors it has.

    codes    a vector of 4 * lanes bytes: 4 consecutive inputs of one output, then those of the next output
    inputs   the 4 inputs that these multiply, the same for every lane
    sums     one 32-bit sum per output

With products of matrices, a vector of codes has 8 consecutive inputs of one output, then those of the next one.

Does not know formats of weights, nor the loops around.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from sightline.kernels.cpu.emitter import F16, F32, I1, I8, I16, I32, I64, Emitter, Value, vector
from sightline.kernels.cpu.processor import Instructions

FLOAT8_FACTOR = 256.0
"""What `float8s` leaves to be multiplied: the difference of the exponents of fp8 and fp16."""


class VectorUnit(ABC):
    """Emits the instructions that differ between processors."""

    lanes: ClassVar[int]
    """The 32-bit lanes of a vector."""
    registers: ClassVar[int] = 16
    """The vectors that fit in registers."""
    panel: ClassVar[int]
    """The number of outputs whose weights are stored interleaved: a multiple of `lanes`."""
    tile_rows: ClassVar[tuple[int, ...]] = (4, 2, 1)
    """The numbers of input rows that are multiplied at once, from many to 1. Limited by the registers."""
    few_rows: ClassVar[tuple[int, ...]] = (4, 3, 2, 1)
    """The numbers of rows for which codes are unpacked in registers. More rows share unpacked codes."""
    dense_rows: ClassVar[int]
    """Rows of a tile of dense products: with 4 outputs, as many sums as there are registers, less those of a row and of
    the weights."""
    quads_together: ClassVar[int] = 1
    """The consecutive quads of one output that a vector of codes has side by side."""
    pairs_rows: ClassVar[bool] = False
    """True if the inputs of two rows are stored with their octets in turns."""
    excess: ClassVar[int] = 0
    """What `sums` adds to each signed code, because the instruction takes unsigned ones only."""

    def sums(
        self,
        emitter: Emitter,
        codes: Callable[[int, int], Value],
        planes: range,
        rows: Sequence[Value],
        first: Sequence[Value],
        *,
        signed: bool,
    ) -> list[list[Value]]:
        """The sums of products with some planes of a block, for each row and each part of a panel.

        `codes` gives the codes of a plane for a part. `rows` are the addresses of the rows' inputs of the block, and
        `first` has the vector that each row's sums begin with.
        """
        parts = range(self.panel // self.lanes)
        sums = [[start for _ in parts] for start in first]
        for plane in planes:
            for part in parts:
                loaded = codes(plane, part)
                for row, address in zip(sums, rows, strict=True):
                    row[part] = self.dot(
                        emitter, row[part], loaded, self.inputs(emitter, address, plane), signed=signed
                    )
        return sums

    def inputs(self, emitter: Emitter, address: Value, quad: int) -> Value:
        """The inputs 4 * quad to 4 * quad + 3 of the row at the address, repeated for all lanes, as bytes."""
        word = emitter.load(address, I32, offset=4 * quad, align=4)
        return emitter.build.bitcast(emitter.splat(word, self.lanes), vector(I8, 4 * self.lanes))

    @abstractmethod
    def dot(self, emitter: Emitter, sums: Value, codes: Value, inputs: Value, *, signed: bool) -> Value:
        """Adds the 4 products of each lane to its sum. Unsigned codes are below 64."""

    def above_lower_half(self, emitter: Emitter, packed: Value, higher: Value) -> Value:
        """Bytes whose lower 4 bits are those of `packed`, and the rest those of `higher`, which is below 16."""
        build, kind = emitter.build, packed.type
        lower = build.and_(packed, emitter.constant(kind, 0x0F))
        return build.or_(lower, build.shl(higher, emitter.constant(kind, 4)))

    def above_upper_half(self, emitter: Emitter, packed: Value, higher: Value) -> Value:
        """Bytes whose lower 4 bits are the upper ones of `packed`. `higher` has the rest, in place."""
        return emitter.build.or_(emitter.build.lshr(packed, emitter.constant(packed.type, 4)), higher)

    def halves(self, emitter: Emitter, address: Value, offset: int, count: int) -> Value:
        """`count` fp16 numbers from memory, as fp32."""
        loaded = emitter.load(address, vector(F16, count), offset=offset, align=2)
        return emitter.build.fpext(loaded, vector(F32, count))

    def float8s(self, emitter: Emitter, codes: Value) -> Value:
        """fp8 numbers (4 bits of exponent, 3 of mantissa) as fp32, divided by `FLOAT8_FACTOR`. NaN stays NaN."""
        build, words = emitter.build, vector(I32, codes.type.count)
        bits, floats = build.zext(codes, words), vector(F32, codes.type.count)
        sign = build.shl(build.and_(bits, emitter.constant(words, 0x80)), emitter.constant(words, 24))
        rest = build.and_(bits, emitter.constant(words, 0x7F))
        # The exponent of fp32 has another origin. Multiplication corrects it, for subnormal numbers too.
        size = build.bitcast(build.shl(rest, emitter.constant(words, 20)), floats)
        size = build.bitcast(build.fmul(size, emitter.constant(floats, 2.0**120 / FLOAT8_FACTOR)), words)
        is_nan = build.icmp_unsigned("==", rest, emitter.constant(words, 0x7F))
        size = build.select(is_nan, emitter.constant(words, 0x7FC00000), size)
        return build.bitcast(build.or_(size, sign), floats)

    def multiply_add(self, emitter: Emitter, left: Value, right: Value, addend: Value) -> Value:
        """left * right + addend in fp32, rounded once."""
        return emitter.call(f"llvm.fma.v{self.lanes}f32", vector(F32, self.lanes), [left, right, addend])


class NeonDotUnit(VectorUnit):
    """aarch64 with `sdot`."""

    lanes = 4
    registers = 32
    panel = 8
    dense_rows = 6

    def inputs(self, emitter: Emitter, address: Value, quad: int) -> Value:
        # The instruction repeats one of the four words of a register by itself.
        words = emitter.load(address, vector(I32, 4), offset=16 * (quad // 4), align=16)
        return emitter.build.bitcast(emitter.shuffle(words, [quad % 4] * 4), vector(I8, 16))

    def dot(self, emitter: Emitter, sums: Value, codes: Value, inputs: Value, *, signed: bool) -> Value:
        del signed  # codes below 128 are the same either way
        return emitter.call("llvm.aarch64.neon.sdot.v4i32.v16i8", vector(I32, 4), [sums, codes, inputs])

    def float8s(self, emitter: Emitter, codes: Value) -> Value:
        build, kind, count = emitter.build, codes.type, codes.type.count
        if count < 2 * self.lanes:
            return super().float8s(emitter, codes)
        # As fp16 numbers, whose exponent has one bit more and another origin: the bits are those of the byte, moved.
        higher = build.ashr(codes, emitter.constant(kind, 1))
        higher = build.and_(higher, emitter.constant(kind, 0xBF))
        is_nan = build.icmp_unsigned("==", build.or_(codes, emitter.constant(kind, 0x80)), emitter.constant(kind, 0xFF))
        higher = build.or_(higher, build.sext(is_nan, kind))
        lower = build.shl(codes, emitter.constant(kind, 7))
        order = [place for index in range(count) for place in (index, count + index)]
        halves = build.bitcast(emitter.shuffle(lower, order, higher), vector(F16, count))
        return build.fpext(halves, vector(F32, count))

    def above_lower_half(self, emitter: Emitter, packed: Value, higher: Value) -> Value:
        if packed.type.count != 16:
            return super().above_lower_half(emitter, packed, higher)
        # One instruction shifts and inserts.
        return emitter.call("llvm.aarch64.neon.vsli.v16i8", packed.type, [packed, higher, emitter.constant(I32, 4)])

    def above_upper_half(self, emitter: Emitter, packed: Value, higher: Value) -> Value:
        if packed.type.count != 16:
            return super().above_upper_half(emitter, packed, higher)
        return emitter.call("llvm.aarch64.neon.vsri.v16i8", packed.type, [higher, packed, emitter.constant(I32, 4)])


class NeonMatrixUnit(NeonDotUnit):
    """aarch64 with `smmla`, which multiplies 2 rows of 8 inputs with 2 outputs. A row without another takes `sdot`."""

    quads_together = 2
    pairs_rows = True

    def sums(
        self,
        emitter: Emitter,
        codes: Callable[[int, int], Value],
        planes: range,
        rows: Sequence[Value],
        first: Sequence[Value],
        *,
        signed: bool,
    ) -> list[list[Value]]:
        numbers, pairs = range(self.panel // 2), range(0, len(rows) - 1, 2)
        is_odd = len(rows) % 2 == 1
        tiles = [[self._of_two_rows(emitter, first[row], first[row + 1])] * len(numbers) for row in pairs]
        # A sum of a single row has two halves, which are added in the end.
        zeros = emitter.constant(vector(I32, 4), 0)
        halves = [emitter.shuffle(first[-1], [0, 4, 1, 5], zeros)] * len(numbers)
        for octet in range(planes.start // 2, planes.stop // 2):
            inputs = [self._octet_of_two(emitter, rows[row + octet // 2], octet) for row in pairs]
            for number in numbers:
                loaded = codes(*divmod(octet * len(numbers) + number, len(numbers) // 2))
                for tile, taken in zip(tiles, inputs, strict=True):
                    tile[number] = self.multiply(emitter, tile[number], taken, loaded)
                if is_odd:
                    taken = self._octet_twice(emitter, rows[-1], octet)
                    halves[number] = self.dot(emitter, halves[number], loaded, taken, signed=signed)
        sums = [row for tile in tiles for row in self._rows_of(emitter, tile)]
        return [*sums, self._joined(emitter, halves)] if is_odd else sums

    def multiply(self, emitter: Emitter, sums: Value, inputs: Value, codes: Value) -> Value:
        """The instruction itself: adds [2 rows, 8] inputs times [2 outputs, 8] codes to [2 rows, 2 outputs] sums."""
        return emitter.call("llvm.aarch64.neon.smmla.v4i32.v16i8", vector(I32, 4), [sums, inputs, codes])

    def add_neighbours(self, emitter: Emitter, left: Value, right: Value) -> Value:
        """The sums of neighbours in `left`, then those in `right`."""
        return emitter.call("llvm.aarch64.neon.addp.v4i32", vector(I32, 4), [left, right])

    def _octet_of_two(self, emitter: Emitter, address: Value, octet: int) -> Value:
        """8 inputs of a row, then those of the next row; the address is that of the row whose block has them."""
        return emitter.load(address, vector(I8, 16), offset=16 * (octet % 2), align=16)

    def _octet_twice(self, emitter: Emitter, row: Value, octet: int) -> Value:
        """8 inputs of a row without another, twice."""
        loaded = emitter.load(row, vector(I64, 2), offset=16 * (octet // 2), align=16)
        return emitter.build.bitcast(emitter.shuffle(loaded, [octet % 2] * 2), vector(I8, 16))

    def _of_two_rows(self, emitter: Emitter, row: Value, next_row: Value) -> Value:
        """The first two sums of a row, then those of the next row."""
        return emitter.shuffle(row, [0, 1, 4, 5], next_row)

    def _rows_of(self, emitter: Emitter, tile: Sequence[Value]) -> list[list[Value]]:
        """The sums of each of two rows, for each part."""
        orders = ([0, 1, 4, 5], [2, 3, 6, 7])
        pairs = list(zip(tile[::2], tile[1::2], strict=True))
        return [[emitter.shuffle(left, order, right) for left, right in pairs] for order in orders]

    def _joined(self, emitter: Emitter, halves: Sequence[Value]) -> list[Value]:
        """The sums of a single row, for each part."""
        pairs = zip(halves[::2], halves[1::2], strict=True)
        return [self.add_neighbours(emitter, left, right) for left, right in pairs]


class PortableUnit(VectorUnit):
    """Any processor: products in 16 bits, sums in 32."""

    lanes = 4
    panel = 8
    dense_rows = 2
    tile_rows = (2, 1)
    few_rows = (2, 1)

    def dot(self, emitter: Emitter, sums: Value, codes: Value, inputs: Value, *, signed: bool) -> Value:
        build, wide = emitter.build, vector(I16, 4 * self.lanes)
        # Both factors have at most 8 bits, so that a product of signed bytes fits in 16.
        widened = build.sext(codes, wide) if signed else build.zext(codes, wide)
        products = build.mul(widened, build.sext(inputs, wide))
        for place in range(4):
            order = [4 * lane + place for lane in range(self.lanes)]
            sums = build.add(sums, build.sext(emitter.shuffle(products, order), vector(I32, self.lanes)))
        return sums

    def halves(self, emitter: Emitter, address: Value, offset: int, count: int) -> Value:
        build, words = emitter.build, vector(I32, count)
        bits = build.zext(emitter.load(address, vector(I16, count), offset=offset, align=2), words)
        sign = build.shl(build.and_(bits, emitter.constant(words, 0x8000)), emitter.constant(words, 16))
        rest = build.shl(build.and_(bits, emitter.constant(words, 0x7FFF)), emitter.constant(words, 13))
        # The exponent of fp32 has another origin. Multiplication corrects it, for subnormal numbers too.
        floats = vector(F32, count)
        size = build.fmul(build.bitcast(rest, floats), emitter.constant(floats, 2.0**112))
        # The largest exponent is that of infinity and NaN, in both.
        infinite = emitter.constant(words, 0x7F800000)
        is_infinite = build.icmp_unsigned(">=", rest, emitter.constant(words, 0x7C00 << 13))
        bits = build.select(is_infinite, build.or_(rest, infinite), build.bitcast(size, words))
        return build.bitcast(build.or_(bits, sign), floats)

    def multiply_add(self, emitter: Emitter, left: Value, right: Value, addend: Value) -> Value:
        # Rounded twice: a fused operation is a call of a function on processors without it.
        return emitter.build.fadd(emitter.build.fmul(left, right), addend)


class Avx2Unit(VectorUnit):
    """x86_64 with `vpmaddubsw`, which multiplies unsigned with signed bytes and adds pairs in 16 bits."""

    lanes = 8
    panel = 8
    dense_rows = 3

    def dot(self, emitter: Emitter, sums: Value, codes: Value, inputs: Value, *, signed: bool) -> Value:
        count = 4 * self.lanes
        if signed:
            # The sign moves to the inputs. Pairs of 128 * 127 still fit in 16 bits, those of 255 * 127 would not.
            inputs = emitter.call("llvm.x86.avx2.psign.b", vector(I8, count), [inputs, codes])
            codes = emitter.call(f"llvm.abs.v{count}i8", vector(I8, count), [codes, emitter.constant(I1, 0)])
        pairs = emitter.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, count // 2), [codes, inputs])
        ones = emitter.constant(vector(I16, count // 2), 1)
        quads = emitter.call("llvm.x86.avx2.pmadd.wd", vector(I32, self.lanes), [pairs, ones])
        return emitter.build.add(sums, quads)


class VnniUnit(VectorUnit):
    """x86_64 with `vpdpbusd` of 256 bits, which multiplies unsigned with signed bytes."""

    lanes = 8
    panel = 8
    dense_rows = 3
    excess = 128

    def dot(self, emitter: Emitter, sums: Value, codes: Value, inputs: Value, *, signed: bool) -> Value:
        count = 4 * self.lanes
        if signed:
            # Flipping the sign bit of a signed byte adds 128 to it.
            codes = emitter.build.xor(codes, emitter.constant(vector(I8, count), -128))
        return self.sum_unsigned(emitter, sums, codes, inputs)

    def sum_unsigned(self, emitter: Emitter, sums: Value, codes: Value, inputs: Value) -> Value:
        """The instruction itself: unsigned codes times signed inputs."""
        name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
        return emitter.call(name, vector(I32, self.lanes), [sums, codes, inputs])


class Vnni512Unit(VnniUnit):
    """x86_64 with `vpdpbusd` of 512 bits."""

    lanes = 16
    registers = 32
    panel = 16
    dense_rows = 6
    tile_rows = (8, 4, 2, 1)


UNITS: Mapping[Instructions, VectorUnit] = MappingProxyType(
    {
        Instructions.PORTABLE: PortableUnit(),
        Instructions.NEON_MATRIX: NeonMatrixUnit(),
        Instructions.NEON_DOT: NeonDotUnit(),
        Instructions.AVX2: Avx2Unit(),
        Instructions.AVX_VNNI: VnniUnit(),
        Instructions.AVX512_VNNI: Vnni512Unit(),
    }
)
