"""Norms of rows in one launch each: RMS norm, also added to a stream, and layer norm. Computed in fp32.

A program holds a whole row. Features are contiguous in every tensor; rows may be strided. Does not know models.
"""

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.overlap import overlap_settings, wait_for_previous

_MOST_WARPS = 16


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, out: Tensor, rows: Tensor | None = None, *, overlaps: bool = False
) -> None:
    """Writes the norm of x [num_rows, features] to `out`, which may be x itself; `weight` is [features].

    With `rows` [num_wanted] int64, only the rows that it names, to an `out` of so many rows, which is not x.
    """
    num_rows, size = out.shape
    if num_rows == 0:
        return
    _rms_norm_kernel[(num_rows,)](
        x,
        weight,
        out,
        rows,
        epsilon,
        row_stride(x),
        row_stride(out),
        CHOOSES=rows is not None,
        **_whole_row(size),
        **overlap_settings(overlaps),
    )


def add_rms_norm(
    result: Tensor,
    weight: Tensor,
    epsilon: float,
    stream: Tensor,
    next_weight: Tensor | None = None,
    next_epsilon: float = 0.0,
    out: Tensor | None = None,
    *,
    overlaps: bool = False,
) -> None:
    """Adds the norm of `result` [num_rows, features] to the stream.

    With `next_weight`, the norm of the new stream is written to `out`. Both have the shape of the result.
    """
    num_rows, size = stream.shape
    if num_rows == 0:
        return
    strides = (row_stride(each) for each in (result, stream, stream if out is None else out))
    _add_rms_norm_kernel[(num_rows,)](
        result,
        weight,
        stream,
        next_weight,
        out,
        epsilon,
        next_epsilon,
        *strides,
        CONTINUES=out is not None,
        **_whole_row(size),
        **overlap_settings(overlaps),
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, out: Tensor) -> None:
    """Writes the layer norm of x [num_rows, features] to `out`, which may be x itself."""
    num_rows, size = x.shape
    if num_rows == 0:
        return
    _layer_norm_kernel[(num_rows,)](x, weight, bias, out, epsilon, row_stride(x), row_stride(out), **_whole_row(size))


def row_stride(x: Tensor) -> int:
    """The distance of two rows, whose elements must be contiguous."""
    require_rows(x)
    return x.stride(0)


def require_rows(*tensors: Tensor) -> None:
    """The elements of each row must be contiguous."""
    for x in tensors:
        assert x.shape[-1] == 1 or x.stride(-1) == 1, f"expected contiguous rows, got strides {x.stride()}"


def _whole_row(size: int) -> dict[str, int]:
    """The settings of a program that holds a row."""
    block = triton.next_power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": min(_MOST_WARPS, max(1, block // 512))}


@triton.jit
def scaled_to_length(x: tl.tensor, weight: tl.tensor, epsilon: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """x / sqrt(mean(x²) + epsilon) * weight of an fp32 vector that is 0 beyond its size."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + epsilon) * weight


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _rms_norm_kernel(
    x, weight, out, rows, epsilon, x_stride, out_stride,
    CHOOSES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes a row of `out`."""
    wait_for_previous(OVERLAPS)
    place = tl.program_id(0).to(tl.int64)
    row = place
    if CHOOSES:
        row = tl.load(rows + place)
    feature = tl.arange(0, BLOCK)
    inside = feature < SIZE
    given = tl.load(x + row * x_stride + feature, mask=inside, other=0.0).to(tl.float32)
    normed = scaled_to_length(given, tl.load(weight + feature, mask=inside, other=0.0), epsilon, SIZE)
    tl.store(out + place * out_stride + feature, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm_kernel(
    result, weight, stream, next_weight, out, epsilon, next_epsilon, result_stride, stream_stride, out_stride,
    CONTINUES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes a row of the stream."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, BLOCK)
    inside = feature < SIZE
    given = tl.load(result + row * result_stride + feature, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(stream + row * stream_stride + feature, mask=inside, other=0.0).to(tl.float32)
    normed = scaled_to_length(given, tl.load(weight + feature, mask=inside, other=0.0), epsilon, SIZE)
    after = (before + normed).to(stream.dtype.element_ty)
    tl.store(stream + row * stream_stride + feature, after, mask=inside)
    if CONTINUES:
        factors = tl.load(next_weight + feature, mask=inside, other=0.0)
        again = scaled_to_length(after.to(tl.float32), factors, next_epsilon, SIZE)
        tl.store(out + row * out_stride + feature, again.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm_kernel(
    x, weight, bias, out, epsilon, x_stride, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program computes a row."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, BLOCK)
    inside = feature < SIZE
    given = tl.load(x + row * x_stride + feature, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, given - tl.sum(given, axis=0) / SIZE, 0.0)
    factors = tl.load(weight + feature, mask=inside, other=0.0)
    normed = scaled_to_length(centred, factors, epsilon, SIZE) + tl.load(bias + feature, mask=inside, other=0.0)
    tl.store(out + row * out_stride + feature, normed.to(out.dtype.element_ty), mask=inside)
