"""Projections whose products are CPU kernels of our own, handed to a launcher as records."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sightline.kernels.cpu.block_kernel import MAX_CHUNK_ROWS, ProductArguments, product_kernel
from sightline.kernels.cpu.dense_kernel import FEW_ROWS, Blocking, DenseArguments, DenseTypes, dense_kernel
from sightline.kernels.cpu.input_blocks import QuantiseArguments, input_bytes, quantise_kernel
from sightline.kernels.cpu.panels import BLOCK, PackedMatrix
from sightline.layers.cpu_compute import CpuCompute, record_of
from sightline.layers.linear import Linear, Projection
from sightline.layers.scratch import prefers_feature_major


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
        self._input_row_bytes = input_bytes(self.in_features)
        self._chunk_rows = compute.room.nbytes // self._input_row_bytes
        """The rows whose inputs fit in the room."""
        if self._chunk_rows == 0:
            raise ValueError(
                f"expected room for a row of {self.in_features} inputs, {self._input_row_bytes} bytes, "
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
        rows = x.shape[0]
        if rows <= self._chunk_rows:
            self._launch_rows(x, out, rows, accumulate=accumulate)
            return
        for start in range(0, rows, self._chunk_rows):
            chunk = slice(start, start + self._chunk_rows)
            self._launch_rows(x[chunk], out[chunk], min(self._chunk_rows, rows - start), accumulate=accumulate)

    def _launch_rows(self, x: Tensor, out: Tensor, rows: int, *, accumulate: bool) -> None:
        """Launches the records for rows whose rounded inputs fit in the room."""
        if rows == 0:
            return
        launcher, processor, room = self._compute.launcher, self._compute.processor, self._compute.room
        inputs, out_dtype = room.data_ptr(), out.dtype
        rounding = QuantiseArguments(x.data_ptr(), x.stride(0) * x.itemsize, inputs, rows, self.in_features // BLOCK)
        launcher.launch(record_of(quantise_kernel(x.dtype, processor), rounding, (x, room)))
        target, bias = out.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()
        out_row_bytes = out.stride(0) * out_dtype.itemsize
        for part in self._parts:
            arguments = ProductArguments(
                weights=part.panels.data_ptr(),
                inputs=inputs,
                input_row_bytes=self._input_row_bytes,
                out=target,
                out_row_bytes=out_row_bytes,
                rows=rows,
                out_features=part.out_features,
                spans=part.spans,
                chunk_rows=MAX_CHUNK_ROWS,
                bias=bias,
                accumulate=int(accumulate),
            )
            kernel = product_kernel(part.layout.form, out_dtype, processor)
            launcher.launch(record_of(kernel, arguments, (part.panels, room, out, self._bias)))
            target += part.out_features * out_dtype.itemsize
            bias += 0 if self._bias is None else part.out_features * self._bias.itemsize


class CpuLinear(Linear):
    """A projection with dense weights, for any number of rows.

    torch multiplies a medium number of rows in fp32 faster, by a fifth at 16 to 32. Its products in bf16 are a hundred
    times slower on a processor without instructions for them.
    """

    turns = False

    def __init__(self, weight: Tensor, bias: Tensor | None, compute: CpuCompute) -> None:
        super().__init__(weight, bias)
        if weight.stride(1) != 1:
            raise ValueError(f"expected weights whose features are contiguous, got strides {weight.stride()}")
        self._compute = compute
        self._wide_bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: Tensor, out: Tensor) -> None:
        if self._suits_torch(x):
            out.copy_(self._turned(x))
        else:
            self._launch(x, out, accumulate=False)

    def add(self, x: Tensor, out: Tensor) -> None:
        if self._suits_torch(x):
            out.add_(self._turned(x))
        else:
            self._launch(x, out, accumulate=True)

    def _suits_torch(self, x: Tensor) -> bool:
        rows = len(x)
        return rows > FEW_ROWS and prefers_feature_major(rows) and x.dtype == self.weight.dtype == torch.float32

    def _turned(self, x: Tensor) -> Tensor:
        """The projection of row-major inputs, computed feature-major: 1.1 to 1.3 times as fast at 12 to 32 rows."""
        x = x.t()
        turned = torch.mm(self.weight, x) if self.bias is None else torch.addmm(self.bias[:, None], self.weight, x)
        return turned.t()

    def _launch(self, x: Tensor, out: Tensor, *, accumulate: bool) -> None:
        _check_layout(x, out)
        rows = len(x)
        if rows == 0:
            return
        weight, processor = self.weight, self._compute.processor
        weight_row_bytes = weight.stride(0) * weight.itemsize
        arguments = DenseArguments(
            weights=weight.data_ptr(),
            weight_row_bytes=weight_row_bytes,
            inputs=x.data_ptr(),
            input_row_bytes=x.stride(0) * x.itemsize,
            out=out.data_ptr(),
            out_row_bytes=out.stride(0) * out.itemsize,
            rows=rows,
            out_features=self.out_features,
            in_features=self.in_features,
            bias=0 if self._wide_bias is None else self._wide_bias.data_ptr(),
            accumulate=int(accumulate),
            **Blocking.of(rows, weight_row_bytes, processor)._asdict(),
        )
        types = DenseTypes(weight.dtype, x.dtype, out.dtype)
        kernel = dense_kernel(types, processor, many_rows=rows > FEW_ROWS)
        self._compute.launcher.launch(record_of(kernel, arguments, (weight, x, out, self._wide_bias)))


def _check_layout(x: Tensor, out: Tensor) -> None:
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(
            f"expected inputs and outputs whose features are contiguous, got strides {x.stride()} and {out.stride()}"
        )
