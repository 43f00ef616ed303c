"""What Sightline's own Triton kernels serve, as capability rows. Imports no kernel library."""

from __future__ import annotations

from dataclasses import replace

import torch

from sightline.attention.capability import ANY, Capability, GraphLevel, HostLengths, Ranks, Wildcard
from sightline.attention.spec import Feature, SpecKind
from sightline.core.device import DeviceKind

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FEATURES = frozenset(
    {
        Feature.WINDOW,
        Feature.SOFTCAP,
        Feature.SINKS,
        Feature.NON_CAUSAL,
        Feature.TREE_MASK,
        Feature.LSE,
        # How contexts are cut depends on all rows of a step, so that neighbours change the order of a row's sums.
        Feature.DETERMINISTIC,
    }
)


def _row(dtype: torch.dtype) -> Capability:
    return Capability(
        spec_kinds=frozenset({SpecKind.SOFTMAX}),
        devices=frozenset({DeviceKind.CUDA}),
        compute_capabilities=frozenset({(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)}),
        dtypes=frozenset({dtype}),
        cache_dtypes=frozenset({dtype}),
        head_dims=ANY,
        group_sizes=ANY,
        page_sizes=ANY,
        features=_FEATURES,
        # Lengths stay on the device; which rows have one new token at most is all that the host must know.
        host_lengths=HostLengths.BOUND,
        graph=GraphLevel.FULL,
        package="triton",
        ranks=Ranks(prefill=10, decode=40, few=40),
    )


def _latent_row(dtype: torch.dtype, ranks: Ranks, group_sizes: frozenset[int] | Wildcard = ANY) -> Capability:
    return replace(
        _row(dtype),
        spec_kinds=frozenset({SpecKind.LATENT}),
        features=_FEATURES - {Feature.WINDOW, Feature.SOFTCAP, Feature.SINKS},
        # The ways of rows of many new tokens are chosen by their lengths.
        host_lengths=HostLengths.EXACT,
        graph=GraphLevel.DECODE,
        group_sizes=group_sizes,
        ranks=ranks,
    )


def _narrow(row: Capability) -> Capability:
    """With a cache of 8-bit floats, which devices convert from 8.9 on."""
    return replace(
        row,
        cache_dtypes=frozenset({torch.float8_e4m3fn}),
        compute_capabilities=frozenset({(8, 9), (9, 0), (10, 0), (10, 3), (12, 0)}),
    )


ROWS: tuple[Capability, ...] = (
    *(_row(dtype) for dtype in _DTYPES),
    *(_narrow(_row(dtype)) for dtype in _DTYPES),
)
_FEW_HEADS = frozenset(range(1, 17))
"""That fit one unit of decode."""
LATENT_ROWS: tuple[Capability, ...] = (
    # One row is where its kernels are the fastest: measured in bf16 at 512 to 8,192 tokens; at 32,768 no more.
    *(_latent_row(dtype, Ranks(prefill=10, decode=20, few=10, alone=40)) for dtype in _DTYPES),
    # Several rows: only of few heads. Many of them take the device as long as FlashInfer's, or 2 to 3% less, and its
    # planning takes the host fifty times as long.
    _latent_row(torch.bfloat16, Ranks(prefill=10, decode=40, few=40), _FEW_HEADS),
    *(_narrow(_latent_row(dtype, Ranks(prefill=10, decode=20, few=10))) for dtype in _DTYPES),
)
