"""The non-linearities of feed-forwards inside kernels, of fp32 numbers. NaN stays NaN: tl.minimum would drop it."""

from dataclasses import dataclass
from enum import IntEnum

import triton
import triton.language as tl


class GateKind(IntEnum):
    """How gate and up are combined: act(gate) * up, unless stated otherwise."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    CLAMPED_SWIGLU = 4
    """(up + 1) * gate * sigmoid(alpha * gate), with the gate at most `limit` and up within ±`limit`."""
    SIGMOID = 5
    CLAMPED_SILU = 6
    """SiLU(gate) * up, with the gate at most `limit` and up within ±`limit`."""


@dataclass(frozen=True)
class GateRule:
    """A kind, and the numbers of the clamped kinds, which others ignore. `alpha` is that of `CLAMPED_SWIGLU` alone."""

    kind: GateKind
    alpha: float = 1.0
    limit: float = float("inf")


@triton.jit
def gated(gate, up, alpha, limit, KIND: tl.constexpr):
    """Gate and up, combined as the `GateKind` says."""
    if KIND == 4 or KIND == 6:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        added = 1.0 if KIND == 4 else 0.0
        steeper = alpha * gate if KIND == 4 else gate
        result = (up + added) * gate * sigmoid(steeper)
    else:
        result = activated(gate, KIND) * up
    return result


@triton.jit
def activated(x, KIND: tl.constexpr):
    """The activation of a kind that has one."""
    if KIND == 0:
        result = x * sigmoid(x)
    elif KIND == 1:
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        # tanh(y) = 2 * sigmoid(2 * y) - 1, so half of 1 + tanh(y) is sigmoid(2 * y).
        result = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == 3:
        result = tl.where(x < 0.0, 0.0, x)
    else:
        tl.static_assert(KIND == 5)
        result = sigmoid(x)
    return result


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without an exponential that could overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)
