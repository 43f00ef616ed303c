"""Capability rows of FlashInfer's kernels. Imports no kernel library.

Valid for version 0.7.2. Each pair of dtype and head dimension, with and without window and softcap, is a module that is
compiled on first use, which takes tens of seconds; only those that known models need are declared.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sightline.attention.capability import ANY, Capability, GraphLevel, HostLengths, Ranks
from sightline.attention.kinds import Feature, SpecKind
from sightline.core.device import DeviceKind

_PLAIN = Capability(
    spec_kinds=frozenset({SpecKind.SOFTMAX}),
    devices=frozenset({DeviceKind.CUDA}),
    # Its Ampere kernels would serve other devices too, but prefill is planned for the Hopper ones.
    compute_capabilities=frozenset({(9, 0)}),
    dtypes=frozenset({torch.bfloat16}),
    cache_dtypes=frozenset({torch.bfloat16}),
    head_dims=frozenset({64, 128}),
    group_sizes=ANY,
    page_sizes=ANY,
    # Not batch-invariant: context splits depend on all rows of a step, which changes the order of a row's sums. No LSE:
    # it is computed from weights in half precision and off by up to 1e-3, too much to merge by.
    features=frozenset({Feature.NON_CAUSAL, Feature.DETERMINISTIC}),
    host_lengths=HostLengths.EXACT,
    graph=GraphLevel.DECODE,
    package="flashinfer",
    ranks=Ranks(prefill=30, decode=30, few=20),
)

ROWS: tuple[Capability, ...] = (
    _PLAIN,
    # Its windows extend to the left only, so a window cannot be combined with a non-causal row.
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
    # The Hopper kernels require fp8 queries too; these are Ampere's, which widen the cache entries.
    replace(_PLAIN, cache_dtypes=frozenset({torch.float8_e4m3fn}), head_dims=frozenset({128})),
)

_LATENT = replace(
    _PLAIN,
    spec_kinds=frozenset({SpecKind.LATENT}),
    head_dims=frozenset({576}),
    # Group sizes that fill whole tiles. Others lose a key at some lengths; FlashInfer's planning rejects them.
    group_sizes=frozenset({8, 16, 32, 64, 128}),
    expanded_dims=frozenset({(192, 128)}),
    features=frozenset({Feature.LSE, Feature.DETERMINISTIC}),
    ranks=Ranks(prefill=30, decode=30, few=20),
)

LATENT_ROWS: tuple[Capability, ...] = (
    # Sparse steps, which need pages of one token, are declared for entries in half precision alone.
    replace(_LATENT, features=_LATENT.features | {Feature.SPARSE}),
    replace(_LATENT, cache_dtypes=frozenset({torch.float8_e4m3fn})),
)

RECURRENT_ROWS: tuple[Capability, ...] = (
    # Of its recurrent kernels, only that for prompts of the gated delta rule takes what a layer gives. Those for decode
    # take gates before their activation in half precision, those of Kimi delta attention keep states in half precision
    # or need compute capability 10, and `selective_state_update` takes one number per token for decay and beta.
    replace(
        _PLAIN,
        spec_kinds=frozenset({SpecKind.RECURRENT}),
        # States are fp32, whatever the cache holds.
        cache_dtypes=ANY,
        head_dims=frozenset({128}),
        expanded_dims=frozenset({(128, 128)}),
        features=frozenset({Feature.DELTA_RULE, Feature.DETERMINISTIC, Feature.SEVERAL_PLANS}),
        only_with=frozenset({Feature.DELTA_RULE}),
        graph=GraphLevel.NONE,
        # Its kernel takes 0.4 of our time for prompts on an H200.
        ranks=Ranks(prefill=20, decode=-7, few=-7),
    ),
)
RECURRENT_IS_PROVEN = False
"""Set to True where the record of a card on which the whole kit passed is added to `docs/benchmarks.md`: the recurrent
rows then serve prompts without being named."""
