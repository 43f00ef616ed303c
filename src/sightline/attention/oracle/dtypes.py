"""The dtypes that the oracle can be compared in: there is a tolerance for them."""

from __future__ import annotations

import torch

from sightline.attention.capability import ANY, Capability
from sightline.cache.spec import SCALED_DTYPES

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


_CACHE_DTYPES = (*_DTYPES, torch.float8_e4m3fn)


def compute_dtypes(row: Capability) -> tuple[torch.dtype, ...]:
    """The declared compute dtypes that there is a tolerance for, the widest first."""
    return tuple(dtype for dtype in _DTYPES if dtype in row.dtypes)


def cache_dtypes(row: Capability) -> tuple[torch.dtype, ...]:
    """The declared cache dtypes that the oracle knows. What is compared went through the cache on both sides, so that
    the tolerance is the compute dtype's, however narrow the cache is."""
    return tuple(dtype for dtype in _CACHE_DTYPES if row.cache_dtypes is ANY or dtype in row.cache_dtypes)


def scaled_dtypes(row: Capability) -> tuple[torch.dtype, ...]:
    """The declared cache dtypes that have scales."""
    return tuple(dtype for dtype in cache_dtypes(row) if dtype in SCALED_DTYPES)
