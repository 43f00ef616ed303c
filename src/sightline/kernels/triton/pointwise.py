"""Operations on single elements, and on rows of tables: gates, activations, the softcap of logits, embeddings.

Computed in fp32. Features are contiguous in every tensor; rows may be strided. NaN stays NaN.
"""

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.norms import row_stride

_BLOCK = 1024


def gate(kind: str, gate: Tensor, up: Tensor, out: Tensor, alpha: float = 0.0, limit: float = 0.0) -> None:
    """Writes activation(gate) * up, [num_rows, size] each. The activation is silu, gelu, gelu_tanh or relu.

    The kind clamped_swiglu, which alone has `alpha` and `limit`, is (up + 1) * gate * sigmoid(alpha * gate), with the
    gate at most `limit` and up within ±`limit`.
    """
    num_rows, size = out.shape
    if num_rows == 0:
        return
    strides = (row_stride(each) for each in (gate, up, out))
    _gate_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
        gate, up, out, alpha, limit, *strides, KIND=kind, SIZE=size, BLOCK=_BLOCK, num_warps=4
    )


def activate(kind: str, x: Tensor) -> None:
    """Applies silu, gelu, gelu_tanh or relu to x [num_rows, size] in place."""
    num_rows, size = x.shape
    if num_rows == 0:
        return
    _activate_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
        x, row_stride(x), KIND=kind, SIZE=size, BLOCK=_BLOCK, num_warps=4
    )


def softcap(logits: Tensor, cap: float) -> None:
    """Replaces x by cap * tanh(x / cap), in logits [num_rows, vocab_size]."""
    num_rows, size = logits.shape
    if num_rows == 0:
        return
    _softcap_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
        logits, cap, row_stride(logits), SIZE=size, BLOCK=_BLOCK, num_warps=4
    )


def take_rows(table: Tensor, rows: Tensor, scale: float, out: Tensor) -> None:
    """Writes table[rows] * scale; the table is [num_entries, size], `rows` [num_rows] int64."""
    _table_rows(table, rows, scale, out, adds=False)


def add_rows(table: Tensor, rows: Tensor, out: Tensor) -> None:
    """Adds table[rows] to `out`."""
    _table_rows(table, rows, 1.0, out, adds=True)


def _table_rows(table: Tensor, rows: Tensor, scale: float, out: Tensor, *, adds: bool) -> None:
    num_rows, size = out.shape
    if num_rows == 0:
        return
    _table_rows_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
        table, rows, out, scale, row_stride(table), row_stride(out), ADDS=adds, SIZE=size, BLOCK=_BLOCK, num_warps=4
    )


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)), without an exponential that could overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def _tanh(x):
    """(1 - exp(-2x)) / (1 + exp(-2x)), without an exponential that could overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _activated(x, KIND: tl.constexpr):
    if KIND == "silu":
        result = x * _sigmoid(x)
    elif KIND == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        result = 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(KIND == "relu")
        result = tl.where(x < 0.0, 0.0, x)
    return result


@triton.jit
def _gate_kernel(
    gate, up, out, alpha, limit, gate_stride, up_stride, out_stride,
    KIND: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program computes a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < SIZE
    opening = tl.load(gate + row * gate_stride + feature, mask=inside, other=0.0).to(tl.float32)
    passing = tl.load(up + row * up_stride + feature, mask=inside, other=0.0).to(tl.float32)
    if KIND == "clamped_swiglu":
        opening = tl.where(opening > limit, limit, opening)
        passing = tl.where(passing > limit, limit, tl.where(passing < -limit, -limit, passing))
        result = (passing + 1.0) * opening * _sigmoid(alpha * opening)
    else:
        result = _activated(opening, KIND) * passing
    tl.store(out + row * out_stride + feature, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _activate_kernel(x, x_stride, KIND: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program computes a block of a row."""
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = x + tl.program_id(0).to(tl.int64) * x_stride + feature
    value = tl.load(places, mask=feature < SIZE, other=0.0).to(tl.float32)
    tl.store(places, _activated(value, KIND).to(x.dtype.element_ty), mask=feature < SIZE)


@triton.jit
def _softcap_kernel(logits, cap, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program computes a block of a row."""
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = logits + tl.program_id(0).to(tl.int64) * stride + feature
    value = tl.load(places, mask=feature < SIZE, other=0.0).to(tl.float32)
    tl.store(places, (cap * _tanh(value / cap)).to(logits.dtype.element_ty), mask=feature < SIZE)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _table_rows_kernel(
    table, rows, out, scale, table_stride, out_stride, ADDS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program computes a block of a row."""
    place = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < SIZE
    taken = tl.load(table + tl.load(rows + place) * table_stride + feature, mask=inside, other=0.0).to(tl.float32)
    to = out + place * out_stride + feature
    result = taken * scale
    if ADDS:
        result += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, result.to(out.dtype.element_ty), mask=inside)
