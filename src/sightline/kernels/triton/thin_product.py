"""Products of few rows with a matrix of weights, such as those of decode.

Their time is that of reading the weights. A program multiplies all rows with a block of outputs, so each weight is read
once, by a pipeline of loads. The gate of a feed-forward and the addition to the residual stream are part of the
launch. Products with fp32 weights, such as a router's, are computed in fp32, a program for each row and a few outputs.
Rows of x and `out` may be strided. Does not know layers.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.gates import GateRule, gated
from sightline.kernels.triton.norms import row_stride
from sightline.kernels.triton.numbers import BORDER, product
from sightline.kernels.triton.overlap import overlap_settings, wait_for_previous

MOST_ROWS = 64
"""More rows are faster with products that share their inputs among programs."""

_EXACT_OUTPUTS = 4
_MOST_EXACT_ROWS = 16
_MOST_EXACT_OUTPUTS = 1024


@dataclass(frozen=True)
class ThinConfig:
    """How a product is divided and pipelined."""

    rows: int
    """The number of rows, some of which may be padding: tensor cores multiply at least 16."""
    outputs: int
    """The number of outputs of a program."""
    inputs: int
    """The number of inputs that are read at a time."""
    stages: int
    """The number of blocks on their way."""


def fits_thin_product(x: Tensor, weight: Tensor) -> bool:
    """True if the product of x [num_rows, in_features] and weight [out_features, in_features] is one for this module.

    Tensor cores need a 16-bit dtype, and loads of whole vectors need aligned weights.
    """
    return (
        0 < x.shape[0] <= MOST_ROWS
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] % BORDER == 0
        and weight.is_contiguous()
    )


def thin_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, adds: bool, overlaps: bool) -> None:
    """Writes x weight^T + bias to out [num_rows, out_features], or adds it. `fits_thin_product` must hold.

    With `overlaps`, no running launch writes the weights.
    """
    _launch(x, weight, bias, out, num_outputs=weight.shape[0], adds=adds, overlaps=overlaps)


def thin_gated_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, rule: GateRule, out: Tensor, *, overlaps: bool
) -> None:
    """Writes gate and up, the halves of x weight^T + bias, combined as the rule says. Otherwise like `thin_product`."""
    _launch(x, weight, bias, out, num_outputs=weight.shape[0] // 2, adds=False, overlaps=overlaps, rule=rule)


def fits_exact_product(x: Tensor, weight: Tensor) -> bool:
    """True if `exact_product` is for these. There are few outputs: each row reads all weights."""
    return (
        0 < x.shape[0] <= _MOST_EXACT_ROWS
        and weight.shape[0] <= _MOST_EXACT_OUTPUTS
        and weight.dtype is torch.float32
        and weight.is_contiguous()
    )


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, overlaps: bool) -> None:
    """Writes x weight^T + bias to out [num_rows, out_features], all computed in fp32; x has any dtype.

    `fits_exact_product` must hold. `overlaps` is as in `thin_product`.
    """
    num_outputs, num_inputs = weight.shape
    _exact_kernel[(x.shape[0], triton.cdiv(num_outputs, _EXACT_OUTPUTS))](
        x,
        weight,
        bias,
        out,
        row_stride(x),
        row_stride(out),
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        OUTPUT_BLOCK=_EXACT_OUTPUTS,
        INPUT_BLOCK=min(2048, triton.next_power_of_2(num_inputs)),
        HAS_BIAS=bias is not None,
        num_warps=4,
        **overlap_settings(overlaps),
    )


def choose_thin(num_outputs: int, num_inputs: int, num_rows: int, *, gates: bool) -> ThinConfig:
    """The fastest configuration found on an H200, in a chain of a decode layer's launches."""
    if num_rows > 16:
        chosen = _choose_for_many(num_outputs, num_rows, gates=gates)
    elif gates:
        if num_outputs <= 4096:
            chosen = ThinConfig(16, 32, 256, 4)
        else:
            chosen = ThinConfig(16, 64, 128, 4) if num_outputs <= 8192 else ThinConfig(16, 128, 128, 3)
    elif num_outputs <= 4608:
        chosen = ThinConfig(16, 32, 256, 6)
    else:
        chosen = ThinConfig(16, 64, 256, 4) if num_outputs <= 8192 else ThinConfig(16, 64, 128, 4)
    return replace(chosen, inputs=min(chosen.inputs, triton.next_power_of_2(num_inputs)))


def _choose_for_many(num_outputs: int, num_rows: int, *, gates: bool) -> ThinConfig:
    """Like `choose_thin`, for 17 to 64 rows: more programs per output, because each has more to do."""
    few = num_rows <= 32
    if gates:
        if num_outputs <= 8192:
            return ThinConfig(64, 32, 128, 4)
        return ThinConfig(32, 128, 128, 3) if few else ThinConfig(64, 64, 128, 4)
    if num_outputs <= 2048:
        return ThinConfig(32, 16, 256, 6) if few else ThinConfig(64, 16, 128, 6)
    if num_outputs <= 4608:
        return ThinConfig(32, 32, 256, 6) if few else ThinConfig(64, 32, 128, 6)
    if num_outputs <= 32768:
        return ThinConfig(32, 64, 256, 4) if few else ThinConfig(64, 64, 128, 6)
    return ThinConfig(32, 128, 128, 3) if few else ThinConfig(64, 128, 128, 4)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    num_outputs: int,
    adds: bool,
    overlaps: bool,
    rule: GateRule | None = None,
) -> None:
    num_inputs = weight.shape[1]
    config = choose_thin(num_outputs, num_inputs, x.shape[0], gates=rule is not None)
    _thin_kernel[(triton.cdiv(num_outputs, config.outputs),)](
        x,
        weight,
        bias,
        out,
        x.shape[0],
        0.0 if rule is None else rule.alpha,
        0.0 if rule is None else rule.limit,
        row_stride(x),
        row_stride(out),
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        ROWS=config.rows,
        OUTPUT_BLOCK=config.outputs,
        INPUT_BLOCK=config.inputs,
        STAGES=config.stages,
        KIND=None if rule is None else int(rule.kind),
        ADDS=adds,
        HAS_BIAS=bias is not None,
        INTERPRETED=x.device.type == "cpu",
        num_warps=4,
        **overlap_settings(overlaps),
    )


@triton.jit
def _block(places, inside, inputs_left, INPUT_BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr):
    """A block of numbers, 0 outside; masks cost time, so there are none for whole blocks."""
    if IS_WHOLE:
        return tl.load(places)
    return tl.load(places, mask=inside & (tl.arange(0, INPUT_BLOCK) < inputs_left)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _thin_kernel(
    x, weight, bias, out, num_rows, alpha, limit, x_stride, out_stride,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUT_BLOCK: tl.constexpr, INPUT_BLOCK: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes a block of outputs of all rows."""
    row = tl.arange(0, ROWS)
    output = tl.program_id(0).to(tl.int64) * OUTPUT_BLOCK + tl.arange(0, OUTPUT_BLOCK)
    column = tl.arange(0, INPUT_BLOCK)
    is_row, is_output = row < num_rows, output < OUTPUTS
    IS_WHOLE: tl.constexpr = INPUTS % INPUT_BLOCK == 0 and OUTPUTS % OUTPUT_BLOCK == 0
    x_places = x + row[:, None] * x_stride + column[None, :]
    weight_places = weight + output[:, None] * INPUTS + column[None, :]
    sums = tl.zeros([ROWS, OUTPUT_BLOCK], tl.float32)
    up_sums = tl.zeros([ROWS, OUTPUT_BLOCK], tl.float32)
    wait_for_previous(OVERLAPS)
    for start in tl.range(0, INPUTS, INPUT_BLOCK, num_stages=STAGES):
        left = INPUTS - start
        given = tl.load(x_places + start, mask=is_row[:, None] & (column < left)[None, :], other=0.0)
        factors = _block(weight_places + start, is_output[:, None], left, INPUT_BLOCK, IS_WHOLE)
        sums = product(given, tl.trans(factors), sums, INTERPRETED)
        if KIND is not None:
            ups = _block(weight_places + (OUTPUTS * INPUTS + start), is_output[:, None], left, INPUT_BLOCK, IS_WHOLE)
            up_sums = product(given, tl.trans(ups), up_sums, INTERPRETED)
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if KIND is not None:
        if HAS_BIAS:
            up_sums += tl.load(bias + OUTPUTS + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
        sums = gated(sums, up_sums, alpha, limit, KIND)
    places = out + row[:, None] * out_stride + output[None, :]
    inside = is_row[:, None] & is_output[None, :]
    if ADDS:
        sums += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _exact_kernel(
    x, weight, bias, out, x_stride, out_stride,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, OUTPUT_BLOCK: tl.constexpr, INPUT_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes a few outputs of one row."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * OUTPUT_BLOCK + tl.arange(0, OUTPUT_BLOCK)
    column = tl.arange(0, INPUT_BLOCK)
    is_output = output < OUTPUTS
    wait_for_previous(OVERLAPS)
    sums = tl.zeros([OUTPUT_BLOCK, INPUT_BLOCK], tl.float32)
    for start in range(0, INPUTS, INPUT_BLOCK):
        inside = start + column < INPUTS
        given = tl.load(x + row * x_stride + start + column, mask=inside, other=0.0).to(tl.float32)
        places = weight + output[:, None] * INPUTS + (start + column)[None, :]
        sums += tl.load(places, mask=is_output[:, None] & inside[None, :], other=0.0) * given[None, :]
    result = tl.sum(sums, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + output, result.to(out.dtype.element_ty), mask=is_output)
