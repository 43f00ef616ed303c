"""8-bit keys of indexers with torch: each key has a scale of its own, a power of two. Does not know pages."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_SCALE = 2.0**-100
"""Scale of a key of zeros."""


def coded_keys(keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [n, head_dim] and scales [n, 1] fp32 of keys [n, head_dim]: the least power of two at which the largest
    number of a key fits the dtype."""
    limit = torch.finfo(dtype).max
    numbers = keys.float()
    least = (numbers.abs().amax(dim=-1, keepdim=True) / limit).clamp_(min=LEAST_SCALE)
    mantissa, exponent = torch.frexp(least)
    # A power of two has the mantissa one half.
    scales = torch.ldexp(torch.ones_like(least), exponent - (mantissa == 0.5).to(exponent.dtype))
    return numbers.div_(scales).clamp_(-limit, limit).to(dtype), scales
