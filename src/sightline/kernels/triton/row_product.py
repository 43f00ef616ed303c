"""Products of a single row with a matrix of weights, such as those of decode for one user.

Reading the weights and starting a launch are all that counts. A program keeps the weights of a few outputs in
registers, and reads as many as fit before it waits for the launch that computes x. It uses no shared memory, so that
the programs of one launch and the next are on the device together:

    launch 1   |weights|wait|x, sums|
    launch 2            |weights    |wait|x, sums|

The norm of x, the gate of a feed-forward and the addition to the residual stream are part of the launch. Does not know
layers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.gates import GateRule, gated
from sightline.kernels.triton.norms import require_rows
from sightline.kernels.triton.numbers import BORDER
from sightline.kernels.triton.overlap import let_next_begin, overlap_settings, wait_for_results


@dataclass(frozen=True)
class RowConfig:
    """How a product is divided."""

    outputs: int
    """The number of outputs of a program."""
    inputs: int
    """The number of inputs that are read at a time."""
    held: int
    """The number of blocks of weights that are read before the wait, and kept in registers."""
    warps: int


_MOST_WEIGHTS = 1 << 24
_MOST_HELD = 128
"""The most weights that a thread keeps: with more, fewer programs fit on the device."""


@dataclass(frozen=True, eq=False)
class InputNorm:
    """The RMS norm that a product applies to its inputs: x / sqrt(mean(x²) + epsilon) * weight."""

    weight: Tensor
    """[in_features] fp32."""
    epsilon: float


def fits_row_product(x: Tensor, weight: Tensor) -> bool:
    """True if the product of x [num_rows, in_features] and weight [out_features, in_features] is one for this module.

    Loads of whole vectors need aligned weights. Larger matrices gain nothing: reading them takes longer than a start.
    """
    return (
        x.shape[0] == 1
        and weight.numel() < _MOST_WEIGHTS
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] % BORDER == 0
        and weight.is_contiguous()
    )


def row_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    adds: bool,
    overlaps: bool,
    norm: InputNorm | None = None,
) -> None:
    """Writes x weight^T + bias to out [1, out_features], or adds it. `fits_row_product` must hold.

    The elements of x and of out are contiguous, and out does not overlap x.
    With `norm`, x is normalised first, and not rounded in between. With `overlaps`, no running launch writes the
    weights, the bias or the norm.
    """
    _launch(x, weight, bias, out, weight.shape[0], None, norm, adds=adds, overlaps=overlaps)


def row_gated_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rule: GateRule,
    out: Tensor,
    *,
    overlaps: bool,
    norm: InputNorm | None = None,
) -> None:
    """Writes gate and up, the halves of x weight^T + bias, combined as the rule says. Otherwise like `row_product`."""
    _launch(x, weight, bias, out, weight.shape[0] // 2, rule, norm, adds=False, overlaps=overlaps)


def choose_rows(num_inputs: int, *, gates: bool) -> RowConfig:
    """The fastest configuration found on an H200, in a chain of a decode layer's launches."""
    if gates:
        outputs, inputs, warps = (4, 2048, 8) if num_inputs >= 2048 else (2, 512, 2)
    else:
        outputs, inputs, warps = (8, 1024, 4) if num_inputs > 8192 else (4, 1024, 4)
    inputs = min(inputs, triton.next_power_of_2(num_inputs))
    most_held = _MOST_HELD * 32 * warps // (outputs * inputs * (2 if gates else 1))
    return RowConfig(outputs, inputs, min(most_held, triton.cdiv(num_inputs, inputs)), warps)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    num_outputs: int,
    rule: GateRule | None,
    norm: InputNorm | None,
    *,
    adds: bool,
    overlaps: bool,
) -> None:
    require_rows(x, out)
    num_inputs = weight.shape[1]
    config = choose_rows(num_inputs, gates=rule is not None)
    _row_kernel[(triton.cdiv(num_outputs, config.outputs),)](
        x,
        weight,
        bias,
        None if norm is None else norm.weight,
        out,
        0.0 if norm is None else norm.epsilon,
        0.0 if rule is None else rule.alpha,
        0.0 if rule is None else rule.limit,
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        OUTPUT_BLOCK=config.outputs,
        INPUT_BLOCK=config.inputs,
        HELD=config.held,
        KIND=None if rule is None else int(rule.kind),
        NORMS=norm is not None,
        ADDS=adds,
        HAS_BIAS=bias is not None,
        num_warps=config.warps,
        **overlap_settings(overlaps),
    )


@triton.jit
def _weights(places, is_output, inputs_left, INPUT_BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr):
    """A block of weights, 0 outside; masks cost time, so there are none if all blocks are whole."""
    if IS_WHOLE:
        return tl.load(places)
    inside = is_output[:, None] & (tl.arange(0, INPUT_BLOCK) < inputs_left)[None, :]
    return tl.load(places, mask=inside, other=0.0)


@triton.jit
def _inputs(places, inputs_left, INPUT_BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr):
    """A block of x or of the norm's weights in fp32, 0 outside."""
    if IS_WHOLE:
        return tl.load(places).to(tl.float32)
    return tl.load(places, mask=tl.arange(0, INPUT_BLOCK) < inputs_left, other=0.0).to(tl.float32)


@triton.jit
def _nothing():
    """An empty tuple to append to."""
    return ()


@triton.jit
def _row_kernel(
    x, weight, bias, norm_weight, out, epsilon, alpha, limit,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    OUTPUT_BLOCK: tl.constexpr, INPUT_BLOCK: tl.constexpr, HELD: tl.constexpr,
    KIND: tl.constexpr, NORMS: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes a few outputs."""
    output = tl.program_id(0) * OUTPUT_BLOCK + tl.arange(0, OUTPUT_BLOCK)
    column = tl.arange(0, INPUT_BLOCK)
    is_output = output < OUTPUTS
    HAS_ALL: tl.constexpr = OUTPUTS % OUTPUT_BLOCK == 0
    IS_WHOLE: tl.constexpr = HAS_ALL and INPUTS % INPUT_BLOCK == 0
    UP: tl.constexpr = OUTPUTS * INPUTS
    places = weight + output[:, None].to(tl.int64) * INPUTS + column[None, :]
    let_next_begin(OVERLAPS)
    held, held_ups, held_norms = _nothing(), _nothing(), _nothing()
    for block in tl.static_range(HELD):
        start, left = block * INPUT_BLOCK, INPUTS - block * INPUT_BLOCK
        held += (_weights(places + start, is_output, left, INPUT_BLOCK, HAS_ALL and left >= INPUT_BLOCK),)
        if KIND is not None:
            ups = _weights(places + UP + start, is_output, left, INPUT_BLOCK, HAS_ALL and left >= INPUT_BLOCK)
            held_ups += (ups,)
        if NORMS:
            held_norms += (_inputs(norm_weight + start + column, left, INPUT_BLOCK, left >= INPUT_BLOCK),)
    wait_for_results(OVERLAPS)
    sums = tl.zeros([OUTPUT_BLOCK, INPUT_BLOCK], tl.float32)
    up_sums = tl.zeros([OUTPUT_BLOCK, INPUT_BLOCK], tl.float32)
    squares = tl.zeros([INPUT_BLOCK], tl.float32)
    for block in tl.static_range(HELD):
        left = INPUTS - block * INPUT_BLOCK
        given = _inputs(x + block * INPUT_BLOCK + column, left, INPUT_BLOCK, left >= INPUT_BLOCK)
        if NORMS:
            squares += given * given
            given *= held_norms[block]
        sums += held[block].to(tl.float32) * given[None, :]
        if KIND is not None:
            up_sums += held_ups[block].to(tl.float32) * given[None, :]
    for start in range(HELD * INPUT_BLOCK, INPUTS, INPUT_BLOCK):
        given = _inputs(x + start + column, INPUTS - start, INPUT_BLOCK, INPUTS % INPUT_BLOCK == 0)
        if NORMS:
            squares += given * given
            given *= _inputs(norm_weight + start + column, INPUTS - start, INPUT_BLOCK, INPUTS % INPUT_BLOCK == 0)
        factors = _weights(places + start, is_output, INPUTS - start, INPUT_BLOCK, IS_WHOLE)
        sums += factors.to(tl.float32) * given[None, :]
        if KIND is not None:
            ups = _weights(places + UP + start, is_output, INPUTS - start, INPUT_BLOCK, IS_WHOLE)
            up_sums += ups.to(tl.float32) * given[None, :]
    result = tl.sum(sums, axis=1)
    scale = 1.0
    if NORMS:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / INPUTS + epsilon)
    result *= scale
    if HAS_BIAS:
        result += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    if KIND is not None:
        up = tl.sum(up_sums, axis=1) * scale
        if HAS_BIAS:
            up += tl.load(bias + OUTPUTS + output, mask=is_output, other=0.0).to(tl.float32)
        result = gated(result, up, alpha, limit, KIND)
    if ADDS:
        result += tl.load(out + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=is_output)
