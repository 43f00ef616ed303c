"""How much time a token takes in a Mamba layer, as data. Operations compute it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class TimeSteps:
    """softplus(x + bias) for each head, within limits. A state decays by exp(-exp(log_rate) * time)."""

    bias: Tensor
    """[num_heads] fp32."""
    log_rates: Tensor
    """[num_heads] fp32."""
    least: float
    most: float
    """May be infinite."""
