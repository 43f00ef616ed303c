"""How fast the states of a delta rule decay, as data. Operations compute it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DecayRates(NamedTuple):
    """The logarithm of what a token leaves of a state: -exp(log_rate) * softplus(x + bias).

    With a bound, it is bound * sigmoid(exp(log_rate) * (x + bias)) instead.
    """

    log_rates: Tensor
    """[num_heads] fp32."""
    bias: Tensor
    """[num_heads], or [num_heads, key_dim] with a decay per channel, fp32."""
    bound: float | None = None
    """Negative: no decay is stronger."""
