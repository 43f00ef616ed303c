"""Capability rows of TokenSpeed MLA. Imports no kernel library.

According to the source of tokenspeed-mla 2.0.4. No such card has run it here, so every row stays declared, and the
backend serves only if it is requested by name. What the source says:

- Its kernels exist for compute capabilities 10.0, 10.3 and 10.7, of which the first two are listed.
- The decode kernel takes pages that divide a tile of 128 entries, up to 128 heads, and entries of 512 + 64.
- The prefill kernel for heads of 192 takes 8-bit inputs only. Queries are never rounded without being asked, so rows
  that are not absorbed run on Sightline's own Triton kernel instead.
"""

from __future__ import annotations

import torch

from sightline.attention.capability import ANY, Capability, GraphLevel, HostLengths, Ranks
from sightline.attention.kinds import Feature, SpecKind
from sightline.core.device import DeviceKind

LATENT_ROWS: tuple[Capability, ...] = (
    Capability(
        spec_kinds=frozenset({SpecKind.LATENT}),
        devices=frozenset({DeviceKind.CUDA}),
        compute_capabilities=frozenset({(10, 0), (10, 3)}),
        dtypes=frozenset({torch.bfloat16}),
        cache_dtypes=frozenset({torch.bfloat16}),
        head_dims=frozenset({576}),
        group_sizes=frozenset({8, 16, 32, 64, 96, 128}),
        page_sizes=frozenset({32, 64}),
        features=frozenset({Feature.LSE, Feature.SEVERAL_PLANS}),
        host_lengths=HostLengths.EXACT,
        graph=GraphLevel.DECODE,
        package="tokenspeed_mla",
        expanded_dims=ANY,
        # Not measured. They only order backends that are requested by name together.
        ranks=Ranks(prefill=5, decode=55, few=55),
    ),
)
