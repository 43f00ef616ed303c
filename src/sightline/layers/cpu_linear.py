"""Projections whose products are CPU kernels of our own, handed to a launcher as records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from sightline.kernels.cpu.block_kernel import MAX_CHUNK_ROWS, ProductArguments, product_kernel
from sightline.kernels.cpu.dense_kernel import MAX_ROWS, DenseArguments, DenseTypes, dense_kernel
from sightline.kernels.cpu.input_blocks import QuantiseArguments, input_bytes, quantise_kernel
from sightline.kernels.cpu.panels import BLOCK, PackedMatrix
from sightline.kernels.cpu.record import Record
from sightline.layers.cpu_compute import CpuCompute, record_of
from sightline.layers.linear import Linear, Projection


class CodedLinear(Projection):
    """A projection with weights that stay quantised. Inputs are rounded to 8 bits in blocks of 32.

    Its parts may have weights of different forms: they share the rounded inputs.
    """

    turns = False

    def __init__(self, parts: Sequence[PackedMatrix], bias: Tensor | None, compute: CpuCompute) -> None:
        """`parts` are the weights for consecutive outputs, packed by `compute`; `bias` is [out_features]."""
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
        self._parts = tuple(parts)

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
        return record_of(quantise_kernel(x.dtype, self._compute.processor), arguments, (x, room))

    def _products(self, x: Tensor, out: Tensor, *, accumulate: bool) -> Iterator[Record]:
        room, row_bytes = self._compute.room, input_bytes(self.in_features)
        first = 0
        for part in self._parts:
            arguments = ProductArguments(
                weights=part.panels.data_ptr(),
                inputs=room.data_ptr(),
                input_row_bytes=row_bytes,
                out=out.data_ptr() + first * out.itemsize,
                out_row_bytes=out.stride(0) * out.itemsize,
                rows=len(x),
                out_features=part.out_features,
                spans=part.spans,
                chunk_rows=MAX_CHUNK_ROWS,
                bias=0 if self._bias is None else self._bias.data_ptr() + 4 * first,
                accumulate=int(accumulate),
            )
            kernel = product_kernel(part.layout.form, out.dtype, self._compute.processor)
            yield record_of(kernel, arguments, (part.panels, room, out, self._bias))
            first += part.out_features


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
        self._compute.launcher.launch(record_of(kernel, arguments, (weight, x, out, self._wide_bias)))


def _check_layout(x: Tensor, out: Tensor) -> None:
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(
            f"expected inputs and outputs whose features are contiguous, got strides {x.stride()} and {out.stride()}"
        )
