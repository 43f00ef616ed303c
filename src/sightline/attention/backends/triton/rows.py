"""Capability rows of Sightline's own Triton kernels. Imports no kernel library."""

from __future__ import annotations

from dataclasses import replace

import torch

from sightline.attention.capability import ANY, Capability, GraphLevel, HostLengths, Ranks, Wildcard
from sightline.attention.kinds import COMPRESSED_FEATURES, LATENT_ONLY, SOFTMAX_ONLY, Feature, SpecKind
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
        Feature.SHARED_CACHE,
        # Not batch-invariant: context splits depend on all rows of a step, which changes the order of a row's sums.
        Feature.DETERMINISTIC,
        Feature.SEVERAL_PLANS,
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
        # Lengths stay on the device; the host only needs to know which rows have at most one new token.
        host_lengths=HostLengths.BOUND,
        graph=GraphLevel.FULL,
        package="triton",
        ranks=Ranks(prefill=10, decode=40, few=40),
    )


def _latent_row(dtype: torch.dtype, ranks: Ranks, group_sizes: frozenset[int] | Wildcard = ANY) -> Capability:
    return replace(
        _row(dtype),
        spec_kinds=frozenset({SpecKind.LATENT}),
        features=_FEATURES - SOFTMAX_ONLY | LATENT_ONLY,
        # Lengths that only the device knows are served too: all rows attend to the entries in place.
        host_lengths=HostLengths.BOUND,
        graph=GraphLevel.DECODE,
        group_sizes=group_sizes,
        hot_entries=True,
        ranks=ranks,
    )


def _narrow(row: Capability) -> Capability:
    """The row with a cache of 8-bit floats, which devices convert from compute capability 8.9 on."""
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
"""Head counts that fit one work unit of decode."""
LATENT_ROWS: tuple[Capability, ...] = (
    # These kernels are the fastest for a single row: measured in bf16 at 512 to 8,192 tokens; no longer at 32,768.
    *(_latent_row(dtype, Ranks(prefill=10, decode=20, few=10, alone=40)) for dtype in _DTYPES),
    # For several rows, only with few heads: device time equals FlashInfer's or is 2 to 3% less, and FlashInfer's
    # planning takes fifty times as long on the host.
    _latent_row(torch.bfloat16, Ranks(prefill=10, decode=40, few=40), _FEW_HEADS),
    *(_narrow(_latent_row(dtype, Ranks(prefill=10, decode=20, few=10))) for dtype in _DTYPES),
)


def _state_row(dtype: torch.dtype, kind: SpecKind, features: frozenset[Feature], ranks: Ranks) -> Capability:
    """Layers that keep states, which are fp32 whatever the cache holds."""
    kept = frozenset({Feature.DETERMINISTIC, Feature.SEVERAL_PLANS})
    return replace(_row(dtype), spec_kinds=frozenset({kind}), cache_dtypes=ANY, features=kept | features, ranks=ranks)


RECURRENT_FEATURES = frozenset({Feature.DELTA_RULE, Feature.CHANNEL_DECAY, Feature.SKIP})
RECURRENT_ROWS: tuple[Capability, ...] = tuple(
    _state_row(dtype, SpecKind.RECURRENT, RECURRENT_FEATURES, Ranks(prefill=10, decode=40, few=40)) for dtype in _DTYPES
)
CONVOLUTION_ROWS: tuple[Capability, ...] = tuple(
    _state_row(dtype, SpecKind.CONVOLUTION, frozenset(), Ranks(prefill=40, decode=40, few=40)) for dtype in _DTYPES
)
_INDEX_FEATURES = frozenset({Feature.SPARSE, Feature.DETERMINISTIC, Feature.SEVERAL_PLANS})
"""Trees and full masks are not served: a query sees the keys up to its own."""


def _index_row(dtype: torch.dtype) -> Capability:
    return replace(
        _row(dtype),
        spec_kinds=frozenset({SpecKind.INDEX}),
        features=_INDEX_FEATURES,
        ranks=Ranks(prefill=40, decode=40, few=40),
    )


INDEX_ROWS: tuple[Capability, ...] = (
    *(_index_row(dtype) for dtype in _DTYPES),
    *(_narrow(_index_row(dtype)) for dtype in _DTYPES),
)


def _compressed_row(dtype: torch.dtype, kind: SpecKind) -> Capability:
    return replace(
        _row(dtype),
        spec_kinds=frozenset({kind}),
        # Not batch-invariant, like `_FEATURES`.
        features=COMPRESSED_FEATURES - {Feature.BATCH_INVARIANT},
        graph=GraphLevel.DECODE,
        ranks=Ranks(prefill=40, decode=40, few=40),
    )


COMPRESSED_ROWS: tuple[Capability, ...] = tuple(
    replace(_compressed_row(dtype, SpecKind.COMPRESSED), hot_entries=True) for dtype in _DTYPES
)
COMPRESSED_INDEX_ROWS: tuple[Capability, ...] = tuple(
    _compressed_row(dtype, SpecKind.COMPRESSED_INDEX) for dtype in _DTYPES
)
