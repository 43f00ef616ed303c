"""Capability rows of the torch backends: every device, head dimension and page size, one dtype a row."""

from __future__ import annotations

import torch

from sightline.attention.capability import ANY, Capability, HostLengths
from sightline.attention.kinds import (
    COMPRESSED_FEATURES,
    COMPRESSED_INDEX_FEATURES,
    CONVOLUTION_FEATURES,
    INDEX_FEATURES,
    LATENT_ONLY,
    RECURRENT_FEATURES,
    RECURRENT_ONLY,
    Feature,
    SpecKind,
)
from sightline.cache.spec import SCALED_DTYPES
from sightline.core.device import DeviceKind


def _rows(
    kind: SpecKind,
    features: frozenset[Feature],
    *,
    keeps_states: bool = False,
    hot_entries: bool = False,
    scaled: bool = True,
) -> tuple[Capability, ...]:
    """The rows of a kind. States of recurrent layers are fp32, whatever dtype a cache has. `scaled` says that a cache
    may have 8-bit floats."""
    return tuple(
        Capability(
            spec_kinds=frozenset({kind}),
            devices=frozenset({DeviceKind.CPU, DeviceKind.CUDA}),
            compute_capabilities=ANY,
            dtypes=frozenset({dtype}),
            cache_dtypes=ANY if keeps_states else (SCALED_DTYPES if scaled else frozenset()) | {dtype},
            head_dims=ANY,
            group_sizes=ANY,
            page_sizes=ANY,
            features=features,
            host_lengths=HostLengths.EXACT,
            hot_entries=hot_entries,
        )
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


# Other rows change the shapes of the products, and with them the order of summation.
ROWS = _rows(SpecKind.SOFTMAX, frozenset(Feature) - RECURRENT_ONLY - LATENT_ONLY - {Feature.BATCH_INVARIANT})
LATENT_ROWS = _rows(
    SpecKind.LATENT,
    frozenset(
        {
            Feature.NON_CAUSAL,
            Feature.TREE_MASK,
            Feature.LSE,
            Feature.SPARSE,
            Feature.DETERMINISTIC,
            Feature.SEVERAL_PLANS,
        }
    ),
    hot_entries=True,
)
INDEX_ROWS = _rows(SpecKind.INDEX, INDEX_FEATURES - {Feature.BATCH_INVARIANT})
RECURRENT_ROWS = _rows(SpecKind.RECURRENT, RECURRENT_FEATURES - {Feature.BATCH_INVARIANT}, keeps_states=True)
CONVOLUTION_ROWS = _rows(SpecKind.CONVOLUTION, CONVOLUTION_FEATURES - {Feature.BATCH_INVARIANT}, keeps_states=True)
COMPRESSED_ROWS = _rows(
    SpecKind.COMPRESSED, COMPRESSED_FEATURES - {Feature.BATCH_INVARIANT}, hot_entries=True, scaled=False
)
COMPRESSED_INDEX_ROWS = _rows(
    SpecKind.COMPRESSED_INDEX, COMPRESSED_INDEX_FEATURES - {Feature.BATCH_INVARIANT}, scaled=False
)
