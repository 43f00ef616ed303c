"""The products of a mixture of experts over tiles that `expert_groups` made, and the weighted sum for each token.

    x [token] ──gate_up, gate──▶ inner [place] ──down──▶ parts [choice] ──weights──▶ target [token]

A place is a choice's index in the order by expert. Sums are in fp32, each in a fixed order. The rows of a product do
not affect each other, so a token that is not finite reaches no other token. Weights may be quantised in blocks; they
are decoded as they are read. Does not know how experts are chosen.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.packed_weights import FP8_BLOCK, WeightForm
from sightline.kernels.triton.gates import GateRule, gated
from sightline.kernels.triton.numbers import e4m3_bits, product, warps_for
from sightline.kernels.triton.overlap import overlap_settings, wait_for_previous


@dataclass(frozen=True)
class ExpertTiles:
    """How a product is divided: a program computes some places and outputs of one expert."""

    rows: int
    """The number of places of a tile."""
    outputs: int
    inputs: int
    """The number of inputs per iteration."""
    num_warps: int
    num_stages: int


_FP8_BLOCK = tl.constexpr(FP8_BLOCK)


@dataclass(frozen=True, eq=False)
class StackedWeights:
    """The weights of one projection of all experts, in any memory layout."""

    weight: Tensor
    """[num_experts, outputs, inputs], in its form."""
    bias: Tensor | None = None
    """[num_experts, outputs], its last dimension contiguous."""
    form: WeightForm = WeightForm.PLAIN
    scales: Tensor | None = None
    """The scales of each expert, or None if the form has none. Gates and ups have blocks of their own."""


def choose_tiles(num_choices: int, weights: StackedWeights, dtype: torch.dtype) -> ExpertTiles:
    """Tiles for the choices that an expert gets on average.

    With few, all of an expert's choices are one tile, so that its weights are read once, by many small programs.
    """
    num_experts = weights.weight.shape[0]
    if dtype is torch.float32:  # no tensor cores: the operands are in registers
        return ExpertTiles(16, 32, 32, num_warps=4, num_stages=2)
    average = triton.next_power_of_2(max(1, num_choices // num_experts))
    if average <= 16:
        return ExpertTiles(16, 32, 128, num_warps=4, num_stages=4)
    if average <= 32:
        return ExpertTiles(32, 64, 128, num_warps=4, num_stages=3)
    if weights.form is WeightForm.FP8_PRODUCTS:
        return ExpertTiles(64, 128, FP8_BLOCK, num_warps=4, num_stages=3)
    if weights.form is not WeightForm.PLAIN:
        # Decoded weights come from registers, and two warps are no warp group: see `warps_for`.
        return ExpertTiles(64, 64, 64, num_warps=2, num_stages=3)
    if average <= 64:
        return ExpertTiles(64, 128, 64, num_warps=4, num_stages=4)
    return ExpertTiles(128, 128, 64, num_warps=8, num_stages=4)


@dataclass(frozen=True, eq=False)
class GroupedChoices:
    """What `group_choices` filled."""

    order: Tensor
    """[num_choices] int32."""
    tiles: Tensor
    """[bound_tiles, 3] int32."""
    per_token: int


def gate_up_product(
    x: Tensor,
    weights: StackedWeights,
    gate: GateRule,
    choices: GroupedChoices,
    out: Tensor,
    config: ExpertTiles,
    *,
    gates_itself: bool = False,
    overlaps: bool = False,
) -> None:
    """Writes the gated products out [num_choices, size], by place, of x [num_tokens, hidden] with any strides.

    The outputs of `weights` are all gates, then all ups; with `gates_itself` they are ups that are the gates too.
    """
    _launch_product(x, weights, choices, out, config, gate, paired=not gates_itself, overlaps=overlaps)


def down_product(
    inner: Tensor,
    weights: StackedWeights,
    choices: GroupedChoices,
    out: Tensor,
    config: ExpertTiles,
    *,
    overlaps: bool = False,
) -> None:
    """Writes the products out [num_choices, hidden], by choice, of inner [num_choices, size], by place."""
    _launch_product(inner, weights, choices, out, config, None, paired=False, overlaps=overlaps)


def combine_parts(
    parts: Tensor, weights: Tensor, target: Tensor, *, adds: bool, skips: bool = False, overlaps: bool = False
) -> None:
    """Writes the weighted sum of the parts [num_tokens * per_token, hidden] of each token to target, or adds it.

    With `skips`, parts with a weight of 0 are not there, and their memory may hold anything.

    Weights are [num_tokens, per_token] fp32 and contiguous, as the parts are. The target is [num_tokens, hidden], with
    any strides. A sum is rounded once.
    """
    num_tokens, hidden = target.shape
    if num_tokens == 0:
        return
    block = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(num_tokens, triton.cdiv(hidden, block))](
        parts,
        weights,
        target,
        *target.stride(),
        HIDDEN=hidden,
        PER_TOKEN=weights.shape[1],
        ADDS=adds,
        SKIPS=skips,
        BLOCK=block,
        num_warps=4,
        **overlap_settings(overlaps),
    )


def _launch_product(
    x: Tensor,
    weights: StackedWeights,
    choices: GroupedChoices,
    out: Tensor,
    config: ExpertTiles,
    gate: GateRule | None,
    *,
    paired: bool,
    overlaps: bool,
) -> None:
    num_outputs, num_inputs = weights.weight.shape[1], x.shape[1]
    blocks = triton.cdiv(num_outputs, config.outputs)
    if choices.order.numel() == 0:
        return
    _product_kernel[(choices.tiles.shape[0] * blocks,)](
        x,
        weights.weight,
        weights.scales,
        weights.bias,
        choices.order,
        choices.tiles,
        out,
        1.0 if gate is None else gate.alpha,
        0.0 if gate is None else gate.limit,
        *(*x.stride(), *weights.weight.stride(), *((0, 0, 0) if weights.scales is None else weights.scales.stride())),
        *(0 if weights.bias is None else weights.bias.stride(0), out.stride(0)),
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        PER_TOKEN=choices.per_token,
        GATE=-1 if gate is None else int(gate.kind),
        PAIRED=paired,
        FORM=int(weights.form),
        BLOCKS=blocks,
        ROWS=config.rows,
        OUTPUT_BLOCK=config.outputs,
        INPUT_BLOCK=min(config.inputs, max(32, triton.next_power_of_2(num_inputs))),
        INTERPRETED=x.device.type == "cpu",
        num_warps=warps_for(config.num_warps, config.rows, x, weights.weight, weights.weight.mT),
        num_stages=config.num_stages,
        **overlap_settings(overlaps),
    )


@triton.jit(do_not_specialize=["alpha", "limit"])
def _product_kernel(
    x, weight, scales, bias, order, tiles, out, alpha, limit,
    x_row, x_input, weight_expert, weight_output, weight_input, scales_expert, scales_output, scales_input,
    bias_expert, out_row,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, PER_TOKEN: tl.constexpr, GATE: tl.constexpr, PAIRED: tl.constexpr,
    FORM: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, OUTPUT_BLOCK: tl.constexpr, INPUT_BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes one tile and a block of outputs. Neighbours share the tile, whose expert the cache then holds.

    With a gate, rows are read by token and written by place; without, read by place and written by choice. PAIRED:
    outputs are gates and ups; otherwise a gate's up is the same number.
    """
    wait_for_previous(OVERLAPS)
    record = tiles + tl.program_id(0) // BLOCKS * 3
    block = tl.program_id(0) % BLOCKS
    first = tl.load(record + 1)
    end = tl.load(record + 2)
    if first < end:
        expert = tl.load(record).to(tl.int64)
        place = first + tl.arange(0, ROWS)
        is_row = place < end
        choice = tl.load(order + place, mask=is_row, other=0)
        source = choice // PER_TOKEN if GATE >= 0 else place
        output = block * OUTPUT_BLOCK + tl.arange(0, OUTPUT_BLOCK)
        is_output = output < OUTPUTS
        dim = tl.arange(0, INPUT_BLOCK)
        rows = x + source.to(tl.int64)[:, None] * x_row
        # A program has both of each pair, side by side: the split below then moves nothing between threads.
        column = output // 2 + (output % 2) * (OUTPUTS // 2) if PAIRED else output
        columns = weight + expert * weight_expert + column.to(tl.int64) * weight_output
        if FORM == 1:
            column_scales = scales + expert * scales_expert + column.to(tl.int64) * scales_output
        elif FORM >= 2:
            if PAIRED:
                row = output // 2 // _FP8_BLOCK + (output % 2) * tl.cdiv(OUTPUTS // 2, _FP8_BLOCK)
            else:
                row = output // _FP8_BLOCK
            column_scales = scales + expert * scales_expert + row.to(tl.int64) * scales_output
        gathered = tl.zeros([ROWS, OUTPUT_BLOCK], tl.float32)
        for start in range(0, INPUTS, INPUT_BLOCK):
            at = start + dim
            inside = at < INPUTS
            a = tl.load(rows + at[None, :] * x_input, mask=is_row[:, None] & inside[None, :], other=0.0)
            if FORM == 1:
                b = _unpacked(columns, column_scales, is_output, start, weight_input, scales_input, INPUTS, INPUT_BLOCK)
                gathered = product(a, tl.trans(b).to(a.dtype), gathered, INTERPRETED)
            else:
                b = tl.load(
                    columns[None, :] + at[:, None] * weight_input, mask=inside[:, None] & is_output[None, :], other=0.0
                )
                if FORM >= 2:
                    # A block of inputs lies in one block of the scales.
                    scale = tl.load(column_scales + start // _FP8_BLOCK * scales_input, mask=is_output, other=0.0)
                    part = tl.zeros([ROWS, OUTPUT_BLOCK], tl.float32)
                    if FORM == 3:
                        codes, row_scale = _rounded(a, INTERPRETED)
                        gathered += product(codes, b, part, INTERPRETED) * row_scale * scale[None, :]
                    else:
                        gathered += product(a, b.to(a.dtype), part, INTERPRETED) * scale[None, :]
                else:
                    gathered = product(a, b, gathered, INTERPRETED)
        if bias is not None:
            gathered += tl.load(bias + expert * bias_expert + column, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if PAIRED:
            gate, up = tl.split(tl.reshape(gathered, [ROWS, OUTPUT_BLOCK // 2, 2]))
            inner = block * (OUTPUT_BLOCK // 2) + tl.arange(0, OUTPUT_BLOCK // 2)
            kept = is_row[:, None] & (inner < OUTPUTS // 2)[None, :]
            at = out + place.to(tl.int64)[:, None] * out_row + inner[None, :]
            tl.store(at, gated(gate, up, alpha, limit, GATE).to(out.dtype.element_ty), mask=kept)
        else:
            target = place if GATE >= 0 else choice
            if GATE >= 0:
                gathered = gated(gathered, gathered, alpha, limit, GATE)
            at = out + target.to(tl.int64)[:, None] * out_row + output[None, :]
            tl.store(at, gathered.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _rounded(a: tl.tensor, INTERPRETED: tl.constexpr):
    """The rows of a block as e4m3, each divided by its scale [rows, 1] fp32, so that its largest number is 448.

    A row with NaN has the scale NaN.
    """
    values = a.to(tl.float32)
    is_number = values == values
    largest = tl.max(tl.where(is_number, tl.abs(values), 0.0), axis=1)
    all_numbers = tl.min(is_number.to(tl.int32), axis=1) == 1
    scale = tl.where(all_numbers, tl.where(largest > 0.0, largest / 448.0, 1.0), float("nan"))[:, None]
    if INTERPRETED:  # which rounds floats differently
        return e4m3_bits(values / scale).to(tl.float8e4nv, bitcast=True), scale
    return (values / scale).to(tl.float8e4nv), scale


@triton.jit
def _unpacked(
    columns, column_scales, is_output, start, weight_input, scales_input,
    INPUTS: tl.constexpr, INPUT_BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of MXFP4 weights [outputs, inputs] in fp32."""
    pair = start // 2 + tl.arange(0, INPUT_BLOCK // 2)
    inside = is_output[:, None] & (pair < INPUTS // 2)[None, :]
    codes = tl.load(columns[:, None] + pair[None, :] * weight_input, mask=inside, other=0).to(tl.int32)
    group = start // 32 + tl.arange(0, INPUT_BLOCK // 32)
    inside = is_output[:, None] & (group < INPUTS // 32)[None, :]
    exponents = tl.load(column_scales[:, None] + group[None, :] * scales_input, mask=inside, other=0).to(tl.int32)
    values = tl.interleave(_e2m1(codes & 15), _e2m1(codes >> 4))
    powers = (exponents << 23).to(tl.float32, bitcast=True)
    grouped = tl.reshape(values, [is_output.shape[0], INPUT_BLOCK // 32, 32]) * powers[:, :, None]
    return tl.reshape(grouped, [is_output.shape[0], INPUT_BLOCK])


@triton.jit
def _e2m1(code: tl.tensor) -> tl.tensor:
    """The value of a 4-bit float in fp32: its exponent and mantissa at their places of fp32, and the bias corrected."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def _combine_kernel(
    parts, weights, target, target_token, target_dim,
    HIDDEN: tl.constexpr, PER_TOKEN: tl.constexpr, ADDS: tl.constexpr, SKIPS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program sums some dimensions of one token, in the order of its choices."""
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dim < HIDDEN
    at = target + token * target_token + dim.to(tl.int64) * target_dim
    gathered = tl.zeros([BLOCK], tl.float32)
    for number in range(PER_TOKEN):
        choice = token * PER_TOKEN + number
        weight = tl.load(weights + choice)
        stop = HIDDEN
        if SKIPS:
            stop = tl.where(weight == 0.0, 0, HIDDEN)
        part = tl.load(parts + choice * HIDDEN + dim, mask=dim < stop, other=0.0).to(tl.float32)
        gathered += weight * part
    if ADDS:
        gathered += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, gathered.to(target.dtype.element_ty), mask=inside)
