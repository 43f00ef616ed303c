"""What layers with recurrent states compute beside the recurrence, in one launch each: gates, decays, time steps.

Computed in fp32. The features of a head are contiguous; tokens and heads may be strided. NaN stays NaN.
"""

import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.gates import GateKind, activated, sigmoid
from sightline.kernels.triton.norms import require_rows, row_stride, scaled_to_length
from sightline.kernels.triton.overlap import overlap_settings, wait_for_previous

_BLOCK = 1024


def delta_gates(
    x: Tensor,
    shares: Tensor,
    log_rates: Tensor,
    bias: Tensor,
    bound: float | None,
    decay: Tensor,
    beta: Tensor,
    *,
    overlaps: bool = False,
) -> None:
    """Writes -exp(log_rates) * softplus(x + bias), or bound * sigmoid(exp(log_rates) * (x + bias)) with a bound, to
    `decay`, and the sigmoid of shares to `beta`.

    x and `decay` fp32 are [num_tokens, heads] or [num_tokens, heads, size], contiguous but for the tokens; shares and
    `beta` fp32 are [num_tokens, heads], `bias` is that of one token and `log_rates` [heads].
    """
    num_tokens, num_heads = shares.shape
    if num_tokens == 0:
        return
    given, to = x.flatten(1), decay.view(num_tokens, -1)
    size = to.shape[1]
    _delta_gates[(num_tokens, triton.cdiv(size, _BLOCK))](
        given,
        shares,
        log_rates,
        bias,
        to,
        beta,
        0.0 if bound is None else bound,
        *(row_stride(each) for each in (given, shares, to, beta)),
        BOUNDED=bound is not None,
        NUM_HEADS=num_heads,
        SIZE=size,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK=min(_BLOCK, triton.next_power_of_2(size)),
        num_warps=4,
        **overlap_settings(overlaps),
    )


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, kind: GateKind, out: Tensor, *, overlaps: bool = False
) -> None:
    """Writes the RMS norm of each head of x, times the activation of the gate; `out` may be x itself.

    x, gate and out are [num_tokens, heads, size], `weight` [size].
    """
    num_tokens, num_heads, size = x.shape
    if num_tokens == 0:
        return
    require_rows(x, gate, out)
    block = triton.next_power_of_2(size)
    heads = min(triton.next_power_of_2(num_heads), max(1, _BLOCK // block))
    _gated_norm[(num_tokens, triton.cdiv(num_heads, heads))](
        x,
        gate,
        weight,
        out,
        epsilon,
        *(stride for each in (x, gate, out) for stride in each.stride()[:2]),
        KIND=int(kind),
        NUM_HEADS=num_heads,
        SIZE=size,
        BLOCK_HEADS=heads,
        BLOCK=block,
        num_warps=max(1, min(8, heads * block // 256)),
        **overlap_settings(overlaps),
    )


def time_steps(
    x: Tensor,
    bias: Tensor,
    log_rates: Tensor,
    limits: tuple[float, float],
    times: Tensor,
    decays: Tensor,
    *,
    overlaps: bool = False,
) -> None:
    """Writes softplus(x + bias), within the limits, to `times`, and -exp(log_rates) * times to `decays`.

    x, times and decays are [num_tokens, heads], the last two fp32; bias and log_rates are [heads].
    """
    num_tokens, num_heads = x.shape
    if num_tokens == 0:
        return
    _time_steps[(num_tokens,)](
        x,
        bias,
        log_rates,
        times,
        decays,
        *limits,
        *(row_stride(each) for each in (x, times, decays)),
        SIZE=num_heads,
        BLOCK=triton.next_power_of_2(num_heads),
        num_warps=1,
        **overlap_settings(overlaps),
    )


def norm_gated(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, out: Tensor, *, overlaps: bool = False) -> None:
    """Writes the RMS norm of x * SiLU(gate), group by group; `out` may be x itself.

    x, gate and out are [num_tokens, groups * size], `weight` [groups, size] contiguous.
    """
    num_tokens, (num_groups, size) = x.shape[0], weight.shape
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(size)
    _norm_gated[(num_tokens, num_groups)](
        x,
        gate,
        weight,
        out,
        epsilon,
        *(row_stride(each) for each in (x, gate, out)),
        SIZE=size,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **overlap_settings(overlaps),
    )


def gate_heads(gate: Tensor, x: Tensor, *, overlaps: bool = False) -> None:
    """Multiplies each head of x [num_tokens, heads, size] by the sigmoid of its gate [num_tokens, heads], in place."""
    num_tokens, num_heads, size = x.shape
    if num_tokens == 0:
        return
    require_rows(x)
    _gate_heads[(num_tokens, num_heads)](
        gate,
        x,
        row_stride(gate),
        *x.stride()[:2],
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=1,
        **overlap_settings(overlaps),
    )


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), without an exponential that could overflow. tl.maximum would drop NaN."""
    return tl.where(x < 0.0, 0.0, x) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _time_steps(
    x, bias, log_rates, times, decays, least, most, x_stride, times_stride, decays_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes a token."""
    token, head = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = head < SIZE
    shift = tl.load(bias + head, mask=inside, other=0.0)
    rate = tl.exp(tl.load(log_rates + head, mask=inside, other=0.0))
    wait_for_previous(OVERLAPS)
    time = _softplus(tl.load(x + token * x_stride + head, mask=inside, other=0.0).to(tl.float32) + shift)
    time = tl.where(time < least, least, tl.where(time > most, most, time))
    tl.store(times + token * times_stride + head, time, mask=inside)
    tl.store(decays + token * decays_stride + head, -rate * time, mask=inside)


@triton.jit
def _norm_gated(
    x, gate, weight, out, epsilon, x_stride, gate_stride, out_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes a group of a token."""
    token, feature = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = feature < SIZE
    place = tl.program_id(1) * SIZE + feature
    factors = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    given = tl.load(x + token * x_stride + place, mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + token * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    result = scaled_to_length(given * activated(opening, 0), factors, epsilon, SIZE)
    tl.store(out + token * out_stride + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_heads(
    gate, x, gate_stride, x_stride, head_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    """A program computes a head of a token."""
    wait_for_previous(OVERLAPS)
    token, head, feature = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    opened = sigmoid(tl.load(gate + token * gate_stride + head).to(tl.float32))
    places = x + token * x_stride + head * head_stride + feature
    given = tl.load(places, mask=feature < SIZE, other=0.0).to(tl.float32)
    tl.store(places, (given * opened).to(x.dtype.element_ty), mask=feature < SIZE)


@triton.jit
def _delta_gates(
    x, shares, log_rates, bias, decay, beta, bound, x_stride, share_stride, decay_stride, beta_stride,
    BOUNDED: tl.constexpr, NUM_HEADS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes a block of a token's decays; the first one, the shares of all heads too."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    feature = part * BLOCK + tl.arange(0, BLOCK)
    inside = feature < SIZE
    rate = tl.exp(tl.load(log_rates + feature // (SIZE // NUM_HEADS), mask=inside, other=0.0).to(tl.float32))
    shift = tl.load(bias + feature, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    given = tl.load(x + token * x_stride + feature, mask=inside, other=0.0).to(tl.float32) + shift
    result = bound * sigmoid(rate * given) if BOUNDED else -rate * _softplus(given)
    tl.store(decay + token * decay_stride + feature, result, mask=inside)
    if part == 0:
        head = tl.arange(0, BLOCK_HEADS)
        share = tl.load(shares + token * share_stride + head, mask=head < NUM_HEADS, other=0.0).to(tl.float32)
        tl.store(beta + token * beta_stride + head, sigmoid(share), mask=head < NUM_HEADS)


@triton.jit
def _gated_norm(
    x, gate, weight, out, epsilon, x_stride, x_head_stride, gate_stride, gate_head_stride, out_stride, out_head_stride,
    KIND: tl.constexpr, NUM_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes some heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    feature = tl.arange(0, BLOCK)[None, :]
    inside = (head < NUM_HEADS) & (feature < SIZE)
    factors = tl.load(weight + feature, mask=feature < SIZE, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    given = tl.load(x + token * x_stride + head * x_head_stride + feature, mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + token * gate_stride + head * gate_head_stride + feature, mask=inside, other=0.0)
    length = tl.rsqrt(tl.sum(given * given, axis=1) / SIZE + epsilon)
    result = given * length[:, None] * factors * activated(opening.to(tl.float32), KIND)
    to = out + token * out_stride + head * out_head_stride + feature
    tl.store(to, result.to(out.dtype.element_ty), mask=inside)
