"""The non-linearities of feed-forwards and gates, as data. Operations compute them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Activation(Enum):
    """A non-linearity of single numbers."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate), with the gate at most `limit` and up within ±`limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class ClampedSilu:
    """SiLU(gate) * up, with the gate at most `limit` and up within ±`limit`."""

    limit: float


Gate = Activation | ClampedSwiglu | ClampedSilu
"""How gate and up are combined. An `Activation` is applied to the gate, and the result multiplied by up."""
