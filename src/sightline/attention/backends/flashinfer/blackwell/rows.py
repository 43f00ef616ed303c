"""Capability rows of FlashInfer's kernels for Blackwell. Imports no kernel library.

According to the source of flashinfer-python 0.7.2.post1. No such card has run them here, so every row stays declared,
and the backends serve only if they are requested by name. What the source says:

- TRT-LLM's kernels and CuteDSL's MLA kernel exist for compute capabilities 10.0 and 10.3. Not for 12.0, where the
  library takes other kernels under the same names.
- TRT-LLM's MLA reads pages of 32 or 64 entries and has no kernel for 65 to 127 heads. CuteDSL's serves up to 128 heads.
- An 8-bit cache would need 8-bit queries. It is not listed, because queries are never rounded without being asked.
- Keys and values expanded from latents have 192 and 128 dimensions, or 256 and 256.
- Context kernels take window or non-causal rows, not both, and no softcap.

What the source does not say, and a card must show: whether a weight of 0 hides what lies behind the last entry of a
page, and whether the same step gives the same bits. The kit tries the first; the second is not declared.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sightline.attention.capability import Capability, GraphLevel, HostLengths, Ranks
from sightline.attention.kinds import Feature, SpecKind
from sightline.core.device import DeviceKind

BLACKWELL = frozenset({(10, 0), (10, 3)})

_PLAIN = Capability(
    spec_kinds=frozenset({SpecKind.SOFTMAX}),
    devices=frozenset({DeviceKind.CUDA}),
    compute_capabilities=BLACKWELL,
    dtypes=frozenset({torch.bfloat16}),
    cache_dtypes=frozenset({torch.bfloat16}),
    head_dims=frozenset({64, 128}),
    group_sizes=frozenset({1, 2, 4, 8, 16}),
    page_sizes=frozenset({32, 64}),
    features=frozenset({Feature.NON_CAUSAL, Feature.SEVERAL_PLANS}),
    host_lengths=HostLengths.EXACT,
    graph=GraphLevel.DECODE,
    package="flashinfer",
    # Not measured. They only order backends that are requested by name together.
    ranks=Ranks(prefill=30, decode=50, few=50),
)

ROWS: tuple[Capability, ...] = (
    _PLAIN,
    replace(_PLAIN, features=frozenset({Feature.WINDOW, Feature.SEVERAL_PLANS})),
)

_LATENT = replace(
    _PLAIN,
    spec_kinds=frozenset({SpecKind.LATENT}),
    head_dims=frozenset({576}),
    group_sizes=frozenset({8, 16, 32, 64, 128}),
    expanded_dims=frozenset({(192, 128), (256, 256)}),
    features=frozenset({Feature.LSE, Feature.SEVERAL_PLANS}),
)

TRTLLM_LATENT_ROWS: tuple[Capability, ...] = (_LATENT,)
CUTEDSL_LATENT_ROWS: tuple[Capability, ...] = (
    replace(_LATENT, group_sizes=frozenset({8, 16, 32, 64, 96, 128}), ranks=Ranks(prefill=30, decode=45, few=45)),
)
