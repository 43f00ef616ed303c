"""Capability rows of the torch backends: every device, head dimension and page size, one dtype a row."""

from __future__ import annotations

import torch

from sightline.attention.capability import ANY, Capability, HostLengths
from sightline.attention.spec import Feature, SpecKind
from sightline.cache.spec import SCALED_DTYPES
from sightline.core.device import DeviceKind


def _rows(kind: SpecKind, features: frozenset[Feature]) -> tuple[Capability, ...]:
    return tuple(
        Capability(
            spec_kinds=frozenset({kind}),
            devices=frozenset({DeviceKind.CPU, DeviceKind.CUDA}),
            compute_capabilities=ANY,
            dtypes=frozenset({dtype}),
            cache_dtypes=SCALED_DTYPES | {dtype},
            head_dims=ANY,
            group_sizes=ANY,
            page_sizes=ANY,
            features=features,
            host_lengths=HostLengths.EXACT,
        )
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


# Other rows change the shapes of the products, and with them the order of summation.
ROWS = _rows(SpecKind.SOFTMAX, frozenset(Feature) - {Feature.BATCH_INVARIANT})
LATENT_ROWS = _rows(
    SpecKind.LATENT,
    frozenset({Feature.NON_CAUSAL, Feature.TREE_MASK, Feature.LSE, Feature.DETERMINISTIC, Feature.SEVERAL_PLANS}),
)
