"""Capability rows of the compiled CPU kernels. Imports no kernel library."""

from __future__ import annotations

from dataclasses import replace

import torch

from sightline.attention.capability import ANY, Capability, GraphLevel, HostLengths, Ranks
from sightline.attention.kinds import (
    CONVOLUTION_FEATURES,
    LATENT_ONLY,
    RECURRENT_FEATURES,
    SOFTMAX_ONLY,
    Feature,
    SpecKind,
)
from sightline.core.device import DeviceKind

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CACHE_DTYPES = frozenset({*_DTYPES, torch.float8_e4m3fn})
# Not batch-invariant: how often a context is split depends on the number of tokens of a step.
_FEATURES = frozenset(
    {
        Feature.WINDOW,
        Feature.SOFTCAP,
        Feature.SINKS,
        Feature.NON_CAUSAL,
        Feature.TREE_MASK,
        Feature.LSE,
        Feature.SHARED_CACHE,
        Feature.DETERMINISTIC,
        Feature.SEVERAL_PLANS,
    }
)


def _row(dtype: torch.dtype, kind: SpecKind, features: frozenset[Feature], prefill: int) -> Capability:
    return Capability(
        spec_kinds=frozenset({kind}),
        devices=frozenset({DeviceKind.CPU}),
        compute_capabilities=ANY,
        dtypes=frozenset({dtype}),
        cache_dtypes=_CACHE_DTYPES,
        head_dims=ANY,
        group_sizes=ANY,
        page_sizes=ANY,
        features=features,
        # Lengths are read from memory; launches depend on numbers of tokens only.
        host_lengths=HostLengths.BOUND,
        graph=GraphLevel.FULL,
        package="numba",
        ranks=Ranks(prefill=prefill, decode=10, few=10),
    )


ROWS: tuple[Capability, ...] = tuple(_row(dtype, SpecKind.SOFTMAX, _FEATURES, 10) for dtype in _DTYPES)
# Every new token reads all its latents again: for prompts torch's products are faster.
_LATENT_ROWS = tuple(_row(dtype, SpecKind.LATENT, _FEATURES - SOFTMAX_ONLY, -10) for dtype in _DTYPES)
LATENT_ROWS: tuple[Capability, ...] = (
    *_LATENT_ROWS,
    # Torch finds the slots of chosen entries, which no program records.
    *(replace(row, features=row.features | LATENT_ONLY, graph=GraphLevel.NONE) for row in _LATENT_ROWS),
)
RECURRENT_ROWS: tuple[Capability, ...] = tuple(
    _row(dtype, SpecKind.RECURRENT, RECURRENT_FEATURES, 10) for dtype in _DTYPES
)
CONVOLUTION_ROWS: tuple[Capability, ...] = tuple(
    _row(dtype, SpecKind.CONVOLUTION, CONVOLUTION_FEATURES, 10) for dtype in _DTYPES
)
