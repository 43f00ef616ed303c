"""Projections whose products are CPU kernels of our own, handed to a launcher as records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sightline.kernels.coded_weights import CodedWeights, join
from sightline.kernels.cpu.block_kernel import MAX_CHUNK_ROWS, ProductArguments, product_kernel
from sightline.kernels.cpu.compiler import CompiledKernel
from sightline.kernels.cpu.dense_kernel import MAX_ROWS, DenseArguments, DenseTypes, dense_kernel
from sightline.kernels.cpu.input_blocks import QuantiseArguments, input_bytes, quantise_kernel
from sightline.kernels.cpu.panels import BLOCK, PanelLayout, pack
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.record import Launcher, Record
from sightline.kernels.cpu.vector_unit import UNITS
from sightline.layers.linear import Linear, Projection

_ROOM_BYTES = 4 << 20
_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class CpuCompute:
    """What all projections of a model share: who runs their records, the processor, and memory for rounded inputs.

    One step uses it at a time.
    """

    launcher: Launcher
    processor: Processor
    room: Tensor
    """uint8, aligned. Holds the rounded inputs between two records of a projection."""

    @classmethod
    def on(cls, launcher: Launcher, processor: Processor | None = None, room_bytes: int = _ROOM_BYTES) -> CpuCompute:
        """With kernels for `processor`, by default that of this machine. The room must hold a row of every product."""
        memory = torch.zeros(room_bytes + _ALIGNMENT, dtype=torch.uint8)
        start = -memory.data_ptr() % _ALIGNMENT
        return cls(launcher, processor or Processor.detect(), memory[start : start + room_bytes])


@dataclass(frozen=True, eq=False)
class _PackedPart:
    """Outputs of a projection whose weights have one form."""

    layout: PanelLayout
    panels: Tensor
    first: int
    """The index of the first output."""
    out_features: int


class CodedLinear(Projection):
    """A projection with weights that stay quantised. Inputs are rounded to 8 bits in blocks of 32.

    Its parts may have weights of different forms: they share the rounded inputs.
    """

    turns = False

    def __init__(self, parts: Sequence[CodedWeights], bias: Tensor | None, compute: CpuCompute) -> None:
        """`parts` are the weights for consecutive outputs; `bias` is [out_features]."""
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)
        self._compute = compute
        self._bias = None if bias is None else bias.float().contiguous()
        self._chunk_rows = compute.room.nbytes // input_bytes(self.in_features)
        """The rows whose inputs fit in the room."""
        if self._chunk_rows == 0:
            raise ValueError(
                f"expected room for a row of {self.in_features} inputs, {input_bytes(self.in_features)} bytes, "
                f"got {compute.room.nbytes}"
            )
        panel = UNITS[compute.processor.instructions].panel
        self._parts: list[_PackedPart] = []
        first = 0
        for part in join(parts):
            packed = pack(part, panel)
            self._parts.append(_PackedPart(PanelLayout(part.form, panel), packed, first, part.out_features))
            first += part.out_features

    @property
    def num_bytes(self) -> int:
        """The memory of the packed weights."""
        return sum(part.panels.nbytes for part in self._parts)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        self._launch(x, out, accumulate=False)

    def add(self, x: Tensor, out: Tensor) -> None:
        self._launch(x, out, accumulate=True)

    def _launch(self, x: Tensor, out: Tensor, *, accumulate: bool) -> None:
        _check_layout(x, out)
        for start in range(0, len(x), self._chunk_rows):
            rows = slice(start, start + self._chunk_rows)
            self._compute.launcher.launch(self._quantising(x[rows]))
            for record in self._products(x[rows], out[rows], accumulate=accumulate):
                self._compute.launcher.launch(record)

    def _quantising(self, x: Tensor) -> Record:
        room = self._compute.room
        arguments = QuantiseArguments(
            x.data_ptr(), x.stride(0) * x.itemsize, room.data_ptr(), len(x), self.in_features // BLOCK
        )
        return _record(quantise_kernel(x.dtype, self._compute.processor), arguments, (x, room))

    def _products(self, x: Tensor, out: Tensor, *, accumulate: bool) -> Iterator[Record]:
        room, row_bytes = self._compute.room, input_bytes(self.in_features)
        for part in self._parts:
            form = part.layout.form
            arguments = ProductArguments(
                weights=part.panels.data_ptr(),
                inputs=room.data_ptr(),
                input_row_bytes=row_bytes,
                out=out.data_ptr() + part.first * out.itemsize,
                out_row_bytes=out.stride(0) * out.itemsize,
                rows=len(x),
                out_features=part.out_features,
                spans=self.in_features // BLOCK // part.layout.blocks_per_span,
                chunk_rows=MAX_CHUNK_ROWS,
                bias=0 if self._bias is None else self._bias.data_ptr() + 4 * part.first,
                accumulate=int(accumulate),
            )
            kernel = product_kernel(form, out.dtype, self._compute.processor)
            yield _record(kernel, arguments, (part.panels, room, out, self._bias))


class CpuLinear(Linear):
    """A projection with dense weights that reads them at the rate of memory if it has few rows. Else torch's."""

    def __init__(self, weight: Tensor, bias: Tensor | None, compute: CpuCompute) -> None:
        super().__init__(weight, bias)
        self._compute = compute
        self._wide_bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: Tensor, out: Tensor) -> None:
        if self._fits(x, out):
            self._launch(x, out, accumulate=False)
        else:
            super().__call__(x, out)

    def add(self, x: Tensor, out: Tensor) -> None:
        if self._fits(x, out):
            self._launch(x, out, accumulate=True)
        else:
            super().add(x, out)

    def _fits(self, x: Tensor, out: Tensor) -> bool:
        contiguous = x.stride(1) == out.stride(1) == self.weight.stride(1) == 1
        return 0 < len(x) <= MAX_ROWS and contiguous

    def _launch(self, x: Tensor, out: Tensor, *, accumulate: bool) -> None:
        weight = self.weight
        arguments = DenseArguments(
            weights=weight.data_ptr(),
            weight_row_bytes=weight.stride(0) * weight.itemsize,
            inputs=x.data_ptr(),
            input_row_bytes=x.stride(0) * x.itemsize,
            out=out.data_ptr(),
            out_row_bytes=out.stride(0) * out.itemsize,
            rows=len(x),
            out_features=self.out_features,
            in_features=self.in_features,
            bias=0 if self._wide_bias is None else self._wide_bias.data_ptr(),
            accumulate=int(accumulate),
        )
        kernel = dense_kernel(DenseTypes(weight.dtype, x.dtype, out.dtype), self._compute.processor)
        self._compute.launcher.launch(_record(kernel, arguments, (weight, x, out, self._wide_bias)))


def _record(kernel: CompiledKernel, arguments: tuple[int, ...], keeps: tuple[object, ...]) -> Record:
    return Record(kernel.address, np.array(arguments, dtype=np.int64), (kernel, *keeps), kernel.name)


def _check_layout(x: Tensor, out: Tensor) -> None:
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(
            f"expected inputs and outputs whose features are contiguous, got strides {x.stride()} and {out.stride()}"
        )
