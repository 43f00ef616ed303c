"""What FlashInfer's kernels serve, as capability rows. Imports no kernel library.

Facts of version 0.7.2. Each pair of dtype and head dimension, with and without window and softcap, is a module that is
compiled on first use, in tens of seconds: what no known model needs is not declared.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sightline.attention.capability import ANY, Capability, GraphLevel, HostLengths, Ranks
from sightline.attention.spec import Feature, SpecKind
from sightline.core.device import DeviceKind

_PLAIN = Capability(
    spec_kinds=frozenset({SpecKind.SOFTMAX}),
    devices=frozenset({DeviceKind.CUDA}),
    # Its Ampere kernels would serve others too; prefill on Hopper's is what is planned here.
    compute_capabilities=frozenset({(9, 0)}),
    dtypes=frozenset({torch.bfloat16}),
    cache_dtypes=frozenset({torch.bfloat16}),
    head_dims=frozenset({64, 128}),
    group_sizes=ANY,
    page_sizes=ANY,
    # Splits of contexts are sized by all rows of a step, so that neighbours change the order of a row's sums. Its
    # log-sum-exp is that of weights in half precision: off by up to 1e-3, which is too much to merge by.
    features=frozenset({Feature.NON_CAUSAL, Feature.DETERMINISTIC}),
    host_lengths=HostLengths.EXACT,
    graph=GraphLevel.DECODE,
    package="flashinfer",
    ranks=Ranks(prefill=30, decode=30, few=20),
)

ROWS: tuple[Capability, ...] = (
    _PLAIN,
    # Its windows reach to the left alone, so that a window and a row that is not causal do not go together.
    replace(
        _PLAIN,
        head_dims=frozenset({128, 256}),
        features=frozenset({Feature.WINDOW, Feature.DETERMINISTIC}),
    ),
    replace(
        _PLAIN,
        head_dims=frozenset({128, 256}),
        features=frozenset({Feature.WINDOW, Feature.SOFTCAP, Feature.DETERMINISTIC}),
    ),
    # Hopper's kernels want queries in fp8 too; these are Ampere's, which widen what they read.
    replace(_PLAIN, cache_dtypes=frozenset({torch.float8_e4m3fn}), head_dims=frozenset({128})),
)

_LATENT = replace(
    _PLAIN,
    spec_kinds=frozenset({SpecKind.LATENT}),
    head_dims=frozenset({576}),
    # Those that fill whole tiles: others lose a key at some lengths, which its planning refuses.
    group_sizes=frozenset({8, 16, 32, 64, 128}),
    expanded_dims=frozenset({(192, 128)}),
    features=frozenset({Feature.LSE, Feature.DETERMINISTIC}),
    ranks=Ranks(prefill=30, decode=30, few=20),
)

LATENT_ROWS: tuple[Capability, ...] = (
    _LATENT,
    replace(_LATENT, cache_dtypes=frozenset({torch.float8_e4m3fn})),
)
