"""Capability rows of FlashAttention 4 on Hopper. Does not import it: selection reads these rows where it is not
installed.

According to the source of flash-attn-4 4.0.0b36, its kernel for compute capability 9.0

- computes in half precision, with a cache of the same dtype; 8-bit inputs need 10.x;
- cannot split the keys of a row among programs, so that a few rows of one new token leave most of the device idle. Such
  rows are served, but ranked low;
- takes head dimensions in steps of 8 up to 256, and of 16 with paged keys. Only dimensions that models have are listed;
- takes pages of any size. A page as large as a tile of keys would be loaded whole, unwritten slots included; the
  backend splits such pages;
- copies a paged tile of keys in runs that do not divide a tile of 144, which is used for head dimension 96 without a
  mask: 96 is listed for causal rows only;
- approximates the softcap's tanh to about 11 bits: enough for an output in half precision, not for an LSE.

Other compute capabilities have other kernels with other limits; none of them is listed.
"""

from __future__ import annotations

import torch

from sightline.attention.capability import ANY, Capability, GraphLevel, HostLengths, Ranks, Wildcard
from sightline.attention.kinds import Feature, SpecKind
from sightline.core.device import DeviceKind

PACKAGE = "flash_attn.cute"
_HOPPER = frozenset({(9, 0)})
_DTYPES = (torch.bfloat16, torch.float16)
_COMMON = frozenset({Feature.WINDOW, Feature.DETERMINISTIC, Feature.SEVERAL_PLANS})


def _softmax_row(dtype: torch.dtype, head_dims: frozenset[int], features: frozenset[Feature]) -> Capability:
    return Capability(
        spec_kinds=frozenset({SpecKind.SOFTMAX}),
        devices=frozenset({DeviceKind.CUDA}),
        compute_capabilities=_HOPPER,
        dtypes=frozenset({dtype}),
        cache_dtypes=frozenset({dtype}),
        head_dims=head_dims,
        group_sizes=frozenset({1, 2, 3, 4, 5, 6, 7, 8, 16}),
        page_sizes=frozenset({16, 32, 64, 128}),
        features=_COMMON | features,
        host_lengths=HostLengths.EXACT,
        # The grid depends on the numbers of tokens and rows, and prompts without context take a different call.
        graph=GraphLevel.DECODE,
        package=PACKAGE,
        ranks=Ranks(prefill=25, decode=2, few=1),
    )


def _latent_row(dtype: torch.dtype) -> Capability:
    any_size: Wildcard = ANY
    return Capability(
        spec_kinds=frozenset({SpecKind.LATENT}),
        devices=frozenset({DeviceKind.CUDA}),
        compute_capabilities=_HOPPER,
        dtypes=frozenset({dtype}),
        cache_dtypes=frozenset({dtype}),
        head_dims=frozenset({576}),
        group_sizes=any_size,
        page_sizes=any_size,
        features=frozenset({Feature.NON_CAUSAL, Feature.LSE, Feature.DETERMINISTIC, Feature.SEVERAL_PLANS}),
        host_lengths=HostLengths.EXACT,
        graph=GraphLevel.NONE,
        package=PACKAGE,
        # Expands keys and values of the whole context in every step, so it ranks below every backend that absorbs.
        ranks=Ranks(prefill=25, decode=-1, few=-1),
    )


ROWS: tuple[Capability, ...] = tuple(
    row
    for dtype in _DTYPES
    for row in (
        _softmax_row(
            dtype, frozenset({64, 128, 192, 256}), frozenset({Feature.SINKS, Feature.NON_CAUSAL, Feature.LSE})
        ),
        _softmax_row(dtype, frozenset({96}), frozenset({Feature.SINKS, Feature.LSE})),
        _softmax_row(dtype, frozenset({128, 256}), frozenset({Feature.SOFTCAP, Feature.NON_CAUSAL})),
    )
)
LATENT_ROWS: tuple[Capability, ...] = tuple(_latent_row(dtype) for dtype in _DTYPES)
