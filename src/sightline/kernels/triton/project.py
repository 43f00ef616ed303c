"""A product per head, for real tokens only: outputs of padding tokens are not written.

    queries ──▶ absorbed queries         weighted latents ──▶ values

Only the device needs to know how many tokens are real.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.numbers import product, warps_for
from sightline.kernels.triton.overlap import let_next_begin, overlap_settings, wait_for_previous, wait_for_results

_BLOCK = 64
"""The number of inputs per iteration of the product."""
_HELD = 32768
"""The largest number of weights that a program holds at once."""


def project_real(
    given: Tensor,
    up: Tensor,
    num_real: Tensor,
    out: Tensor,
    *,
    beside: Tensor | None = None,
    overlaps: bool = False,
    early: bool = False,
) -> None:
    """Writes the products out [num_tokens, heads, n] of given [num_tokens, heads, k] and up [heads, n, k].

    Only the first `num_real` [1] int64 tokens are written, and other tokens do not affect them. `beside` [num_tokens,
    heads, m], if given, is copied after the product in `out`. The last dimension of all tensors but `up` is contiguous.
    `overlaps` is as in `DecodeConfig`. `early` promises that a launch of ours computes `given` and that no running
    launch writes `up`: for few tokens the weights are then loaded while that launch runs.
    """
    num_tokens, num_heads, num_inputs = given.shape
    if num_tokens == 0:
        return
    num_outputs = up.shape[1]
    is_wide = given.dtype is torch.float32
    # No tensor cores for fp32: the operands of the product are in registers.
    tokens = 16 if is_wide else min(64, max(16, triton.next_power_of_2(num_tokens)))
    whole = max(16, triton.next_power_of_2(num_inputs))
    outputs = min(max(16, triton.next_power_of_2(num_outputs)), 16 if is_wide else 64)
    holds = early and num_tokens <= 16 and not is_wide and outputs * whole <= _HELD
    beside_dim = 0 if beside is None else beside.shape[2]
    _project_kernel[(num_heads, triton.cdiv(num_tokens, tokens), triton.cdiv(num_outputs, outputs))](
        given,
        up,
        num_real,
        out,
        beside,
        num_tokens,
        *(*given.stride()[:2], *up.stride(), *out.stride()[:2], *(given if beside is None else beside).stride()[:2]),
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        BESIDE=beside_dim,
        TOKENS=tokens,
        OUTPUT_BLOCK=outputs,
        INPUT_BLOCK=whole if holds else min(_BLOCK, whole),
        HOLDS=holds,
        FEW=num_tokens <= tokens,
        BESIDE_BLOCK=triton.next_power_of_2(max(beside_dim, 1)),
        INTERPRETED=given.device.type == "cpu",
        num_warps=warps_for(4, tokens, given, up, up.mT),
        num_stages=1 if is_wide else 4,
        **overlap_settings(overlaps),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _project_kernel(
    given, up, num_real, out, beside, num_tokens,
    given_token, given_head, up_head, up_output, up_input, out_token, out_head, beside_token, beside_head,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BESIDE: tl.constexpr,
    TOKENS: tl.constexpr, OUTPUT_BLOCK: tl.constexpr, INPUT_BLOCK: tl.constexpr, BESIDE_BLOCK: tl.constexpr,
    HOLDS: tl.constexpr, FEW: tl.constexpr, OVERLAPS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A program computes some tokens and outputs of one head."""
    head = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TOKENS
    output = tl.program_id(2) * OUTPUT_BLOCK + tl.arange(0, OUTPUT_BLOCK)
    dim = tl.arange(0, INPUT_BLOCK)
    is_output = output < OUTPUTS
    columns = up + head * up_head + output[None, :] * up_output
    if HOLDS:
        let_next_begin(OVERLAPS)
        held = tl.load(columns + dim[:, None] * up_input, mask=(dim < INPUTS)[:, None] & is_output[None, :], other=0.0)
        wait_for_results(OVERLAPS)
    else:
        wait_for_previous(OVERLAPS)
    # Padding tokens may be read: the rows of a product do not affect each other.
    real = tl.load(num_real)
    read = real if INTERPRETED else num_tokens  # numpy would warn of overflows in padding rows
    if FEW or first < real:
        token = (first + tl.arange(0, TOKENS)).to(tl.int64)
        is_real, is_read = token < real, token < read
        rows = given + head * given_head + token[:, None] * given_token
        gathered = tl.zeros([TOKENS, OUTPUT_BLOCK], tl.float32)
        if HOLDS:
            a = tl.load(rows + dim[None, :], mask=is_read[:, None] & (dim < INPUTS)[None, :], other=0.0)
            # Makes the weights depend on `real`: otherwise the compiler would wait for their loads first, one by one.
            held = tl.where(real > 0, held, 0.0)
            gathered = product(a, held, gathered, INTERPRETED)
        else:
            for start in range(0, INPUTS, INPUT_BLOCK):
                inside = start + dim < INPUTS
                a = tl.load(rows + start + dim[None, :], mask=is_read[:, None] & inside[None, :], other=0.0)
                b = tl.load(
                    columns + (start + dim)[:, None] * up_input, mask=inside[:, None] & is_output[None, :], other=0.0
                )
                gathered = product(a, b, gathered, INTERPRETED)
        place = out + head * out_head + token[:, None] * out_token
        tl.store(place + output[None, :], gathered.to(out.dtype.element_ty), mask=is_real[:, None] & is_output[None, :])
        if BESIDE > 0:  # noqa: SIM102 - the outer condition is known at compile time
            if tl.program_id(2) == 0:
                other = tl.arange(0, BESIDE_BLOCK)
                copied = is_real[:, None] & (other < BESIDE)[None, :]
                taken = beside + head * beside_head + token[:, None] * beside_token + other[None, :]
                tl.store(place + OUTPUTS + other[None, :], tl.load(taken, mask=copied, other=0.0), mask=copied)
