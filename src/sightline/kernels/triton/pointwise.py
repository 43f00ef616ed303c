"""Operations on single elements, and on rows of tables: gates, activations, the softcap of logits, embeddings.

Computed in fp32. Features are contiguous in every tensor; rows may be strided. NaN stays NaN.
"""

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.gates import GateKind, GateRule, activated, gated
from sightline.kernels.triton.norms import row_stride
from sightline.kernels.triton.overlap import overlap_settings, wait_for_previous

_BLOCK = 1024


def gate(rule: GateRule, gate: Tensor, up: Tensor, out: Tensor, *, overlaps: bool = False) -> None:
    """Writes gate and up, [num_rows, size] each, combined as the rule says."""
    num_rows, size = out.shape
    if num_rows == 0:
        return
    strides = (row_stride(each) for each in (gate, up, out))
    _gate_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
        gate,
        up,
        out,
        rule.alpha,
        rule.limit,
        *strides,
        KIND=int(rule.kind),
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
        **overlap_settings(overlaps),
    )


def activate(kind: GateKind, x: Tensor) -> None:
    """Applies the activation of a kind that has one to x [num_rows, size] in place."""
    num_rows, size = x.shape
    if num_rows == 0:
        return
    _activate_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
        x, row_stride(x), KIND=int(kind), SIZE=size, BLOCK=_BLOCK, num_warps=4
    )


def scale(logits: Tensor, factor: float) -> None:
    """Multiplies logits [num_rows, vocab_size] by the factor."""
    num_rows, size = logits.shape
    if num_rows == 0:
        return
    _scale_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
        logits, factor, row_stride(logits), SIZE=size, BLOCK=_BLOCK, num_warps=4
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
def _tanh(x):
    """(1 - exp(-2x)) / (1 + exp(-2x)), without an exponential that could overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _gate_kernel(
    gate, up, out, alpha, limit, gate_stride, up_stride, out_stride,
    KIND: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes a block of a row."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < SIZE
    opening = tl.load(gate + row * gate_stride + feature, mask=inside, other=0.0).to(tl.float32)
    passing = tl.load(up + row * up_stride + feature, mask=inside, other=0.0).to(tl.float32)
    result = gated(opening, passing, alpha, limit, KIND)
    tl.store(out + row * out_stride + feature, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _activate_kernel(x, x_stride, KIND: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program computes a block of a row."""
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = x + tl.program_id(0).to(tl.int64) * x_stride + feature
    value = tl.load(places, mask=feature < SIZE, other=0.0).to(tl.float32)
    tl.store(places, activated(value, KIND).to(x.dtype.element_ty), mask=feature < SIZE)


@triton.jit
def _scale_kernel(logits, factor, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program computes a block of a row."""
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = logits + tl.program_id(0).to(tl.int64) * stride + feature
    tl.store(places, tl.load(places, mask=feature < SIZE, other=0.0) * factor, mask=feature < SIZE)


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
