"""The dtypes that backends can be compared with the oracle in: those with a tolerance."""

from __future__ import annotations

import torch

from sightline.attention.capability import ANY, Capability
from sightline.attention.proof import dtype_name
from sightline.cache.spec import SCALED_DTYPES

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CACHE_DTYPES = (*_DTYPES, torch.float8_e4m3fn)


def dtype_named(name: str) -> torch.dtype:
    """The dtype that `dtype_name` gives this name."""
    return {dtype_name(dtype): dtype for dtype in _CACHE_DTYPES}[name]


def compute_dtypes(row: Capability) -> tuple[torch.dtype, ...]:
    """The declared compute dtypes that have a tolerance, widest first."""
    return tuple(dtype for dtype in _DTYPES if dtype in row.dtypes)


def cache_dtypes(row: Capability) -> tuple[torch.dtype, ...]:
    """The declared cache dtypes that the oracle supports. Both sides go through the cache, so the tolerance is the
    compute dtype's, however narrow the cache is."""
    return tuple(dtype for dtype in _CACHE_DTYPES if row.cache_dtypes is ANY or dtype in row.cache_dtypes)


def scaled_dtypes(row: Capability) -> tuple[torch.dtype, ...]:
    """The declared cache dtypes that have scales."""
    return tuple(dtype for dtype in cache_dtypes(row) if dtype in SCALED_DTYPES)
