"""CPU products with block-quantised weights, by ops of torch.

Owns the choice of the op and the packing that it needs. Does not know layers or files.

Both ops multiply 4-bit codes, c - 8 for c in 0 to 15, with one scale per block. 8-bit weights become two planes of 4
bits side by side along the inputs, and the inputs are repeated:

    4 bits    w =                           scale * (code - 8) + offset     offset = minimum +   8 * scale
    8 bits    w = 16 * scale * (high - 8) + scale * (low  - 8) + offset     offset = minimum + 136 * scale
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sightline.kernels.block_weights import BLOCK_SIZE, BlockWeights, CodeBits


@dataclass(frozen=True)
class CpuFeatures:
    """The properties of a CPU that decide if torch has fast code for an op."""

    vectors: str
    """`torch.backends.cpu.get_cpu_capability()`: "AVX2", "AVX512", "DEFAULT", "SVE256" and others."""
    kleidiai: bool
    """True if torch packs 4-bit blocks for KleidiAI: an aarch64 build on a CPU with dot products."""
    windows: bool = False
    """True on Windows, where torch's 4-bit kernels are not vectorised."""

    @classmethod
    def detect(cls) -> CpuFeatures:
        """The features of this machine and build of torch."""
        return cls(
            vectors=torch.backends.cpu.get_cpu_capability(),
            kleidiai=_packs_for_kleidiai(),
            windows=sys.platform == "win32",
        )


@dataclass(frozen=True)
class ProductShape:
    """The shape of a projection, known before its weights are read."""

    out_features: int
    in_features: int
    bits: CodeBits

    @property
    def plane_features(self) -> int:
        """The inputs of the 4-bit product: `in_features` times the number of planes."""
        return self.in_features * _NUM_PLANES[self.bits]


class BlockProduct(ABC):
    """y = x W^T, with W stored only in its op's packed form."""

    out_features: int
    in_features: int

    @abstractmethod
    def __init__(self, weights: BlockWeights) -> None:
        """Packs `weights`, whose shape `refusal` must accept. Correct on every CPU, fast on those it accepts."""

    @classmethod
    @abstractmethod
    def refusal(cls, shape: ProductShape, cpu: CpuFeatures) -> str | None:
        """The reason why this product does not support the shape on the CPU; None if it does."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The memory of the packed weights."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies x [rows, in_features] in fp32, bf16 or fp16. Returns [rows, out_features] in the op's dtype."""


class Int4PackProduct(BlockProduct):
    """The product for x86: bf16 inputs, scales, offsets and outputs, fp32 sums.

    A row's result does not depend on the other rows. The op unpacks the weights again for every 4 rows, so it is faster
    than a dense fp32 product only for up to about 8 rows.
    """

    _VECTORS: ClassVar = frozenset({"AVX2", "AVX512"})
    _OUT_MULTIPLE: ClassVar = 16

    def __init__(self, weights: BlockWeights) -> None:
        self.out_features, self.in_features = weights.out_features, weights.in_features
        self._num_planes = _NUM_PLANES[weights.bits]
        shape = ProductShape(weights.out_features, weights.in_features, weights.bits)
        self._packed = torch.empty(shape.out_features, shape.plane_features // 2, dtype=torch.uint8)
        self._scales_and_offsets = torch.empty(
            shape.plane_features // BLOCK_SIZE, shape.out_features, 2, dtype=torch.bfloat16
        )
        start = 0
        for piece in weights.row_pieces(_piece_rows(shape.plane_features)):
            stop = start + piece.out_features
            planes = _NibblePlanes.of(piece)
            self._packed[start:stop] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(planes.codes.int(), 2)
            self._scales_and_offsets[:, start:stop, 0] = planes.scales.t()
            self._scales_and_offsets[:, start:stop, 1] = planes.offsets_on_the_last_plane().t()
            start = stop

    @classmethod
    def refusal(cls, shape: ProductShape, cpu: CpuFeatures) -> str | None:
        if cpu.vectors not in cls._VECTORS:
            return f"expected a CPU with {' or '.join(sorted(cls._VECTORS))}, got {cpu.vectors}"
        if cpu.windows:
            return "expected a build of torch with vectorised 4-bit kernels, got one for Windows"
        if shape.out_features % cls._OUT_MULTIPLE:
            return f"expected a multiple of {cls._OUT_MULTIPLE} outputs, got {shape.out_features}"
        return None

    @property
    def num_bytes(self) -> int:
        return self._packed.nbytes + self._scales_and_offsets.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        inputs = _repeated(x.to(torch.bfloat16, memory_format=torch.contiguous_format), self._num_planes)
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            inputs, self._packed, BLOCK_SIZE, self._scales_and_offsets
        )
        return out


class DynamicInt4Product(BlockProduct):
    """The product for aarch64 with KleidiAI: inputs are rounded to 8 bits per row, sums are fp32.

    The op has no offsets. Offsets that are not 0 are multiplied with the input sums of each block, in fp32.
    """

    _OUT_MULTIPLE: ClassVar = 8

    def __init__(self, weights: BlockWeights) -> None:
        self.out_features, self.in_features = weights.out_features, weights.in_features
        planes = _NibblePlanes.of(weights)
        self._shape = ProductShape(weights.out_features, weights.in_features, weights.bits)
        even, odd = planes.codes[:, 0::2], planes.codes[:, 1::2]
        self._packed: Tensor = torch.ops.aten._dyn_quant_pack_4bit_weight(
            odd.bitwise_left_shift(4).bitwise_or_(even),
            planes.scales.to(torch.bfloat16),
            None,
            BLOCK_SIZE,
            self._shape.plane_features,
            self._shape.out_features,
        )
        self._offsets = planes.offsets.t().contiguous() if planes.offsets.any() else None

    @classmethod
    def refusal(cls, shape: ProductShape, cpu: CpuFeatures) -> str | None:
        if not cpu.kleidiai:
            return "expected torch with KleidiAI on an aarch64 CPU with dot products, got none"
        if shape.out_features % cls._OUT_MULTIPLE:
            return f"expected a multiple of {cls._OUT_MULTIPLE} outputs, got {shape.out_features}"
        if shape.plane_features == BLOCK_SIZE:
            return f"expected more than one block of {BLOCK_SIZE} inputs, got one"
        return None

    @property
    def num_bytes(self) -> int:
        return self._packed.nbytes + (0 if self._offsets is None else self._offsets.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        shape, inputs = self._shape, x.float().contiguous()
        out: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(
            _repeated(inputs, _NUM_PLANES[shape.bits]),
            self._packed,
            BLOCK_SIZE,
            shape.plane_features,
            shape.out_features,
        )
        if self._offsets is not None:
            blocks = inputs.reshape(len(inputs), shape.in_features // BLOCK_SIZE, BLOCK_SIZE)
            out.addmm_(blocks.sum(dim=2), self._offsets)
        return out


_PRODUCTS: tuple[type[BlockProduct], ...] = (Int4PackProduct, DynamicInt4Product)
"""In order of preference."""


class ProductChoice(NamedTuple):
    """The chosen product, or the reasons why there is none."""

    product: type[BlockProduct] | None
    refusals: str
    """Empty if there is a product."""


def choose_product(shape: ProductShape, cpu: CpuFeatures) -> ProductChoice:
    """Chooses the first product that supports the shape on the CPU."""
    refusals = []
    for product in _PRODUCTS:
        reason = product.refusal(shape, cpu)
        if reason is None:
            return ProductChoice(product, "")
        refusals.append(f"{product.__name__}: {reason}")
    return ProductChoice(None, "; ".join(refusals))


_NUM_PLANES: Mapping[CodeBits, int] = MappingProxyType({CodeBits.FOUR: 1, CodeBits.EIGHT: 2})

PACKED_BITS: Mapping[CodeBits, int] = MappingProxyType({CodeBits.FOUR: 6, CodeBits.EIGHT: 12})
"""An upper bound of the bits per weight that a product takes, with scales and offsets."""


@dataclass(frozen=True, eq=False)
class _NibblePlanes:
    """w = sum over the planes of scale * (code - 8), plus offset."""

    codes: Tensor
    """[out_features, planes * in_features] uint8, 0 to 15; the plane of the higher bits comes first."""
    scales: Tensor
    """[out_features, planes * in_features / 32] fp32."""
    offsets: Tensor
    """[out_features, in_features / 32] fp32."""

    @classmethod
    def of(cls, weights: BlockWeights) -> _NibblePlanes:
        if weights.bits == CodeBits.FOUR:
            return cls(weights.codes, weights.scales, weights.minima + 8 * weights.scales)
        return cls(
            torch.cat((weights.codes >> 4, weights.codes & 0x0F), dim=1),
            torch.cat((16 * weights.scales, weights.scales), dim=1),
            weights.minima + 136 * weights.scales,
        )

    def offsets_on_the_last_plane(self) -> Tensor:
        """The offsets in the shape of `scales`, 0 but for the last plane: all planes have the same inputs."""
        others = self.scales.shape[1] - self.offsets.shape[1]
        return F.pad(self.offsets, (others, 0))


def _repeated(x: Tensor, num_planes: int) -> Tensor:
    """The inputs, repeated for every plane, contiguous."""
    return x.contiguous() if num_planes == 1 else x.repeat(1, num_planes)


_PIECE_ELEMENTS = 1 << 20
_PIECE_MULTIPLE = 64
"""The op packs runs of 64 outputs independently, so packing whole runs at a time gives the same bytes."""


def _piece_rows(row_elements: int) -> int:
    """The number of rows to pack at a time. The op takes int32 codes, eight times the memory of its result."""
    return max(1, _PIECE_ELEMENTS // row_elements // _PIECE_MULTIPLE) * _PIECE_MULTIPLE


def _packs_for_kleidiai() -> bool:
    """Tests the op: on a CPU without the instructions it packs to fp32 instead of bytes."""
    codes, scales = torch.zeros(8, BLOCK_SIZE, dtype=torch.uint8), torch.ones(8, 2, dtype=torch.bfloat16)
    packed: Tensor = torch.ops.aten._dyn_quant_pack_4bit_weight(codes, scales, None, BLOCK_SIZE, 2 * BLOCK_SIZE, 8)
    return packed.dtype == torch.uint8
