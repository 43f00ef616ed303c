"""Capability rows of fla-core's recurrent kernels. Imports no kernel library.

According to the source of fla-core 0.6.0, its kernels

- take states as [rows, heads, key_dim, value_dim] in fp32, as we keep them, and decays as natural logarithms;
- return the state behind each row and no other: rows are cut where the step keeps a state;
- have no skip, and no queries that heads share without the delta rule;
- multiply fp32 inputs in TF32, which is not what fp32 promises: only half precision is listed;
- are tuned on the first call for each shape of heads, which takes a minute and more: only that of models is listed.

A step depends on its lengths on the host, and allocates: none can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sightline.attention.capability import ANY, Capability, GraphLevel, HostLengths, Ranks
from sightline.attention.kinds import Feature, SpecKind
from sightline.core.device import DeviceKind

IS_PROVEN = False
"""Set to True where the record of a card on which the whole kit passed is added to `docs/benchmarks.md`: the delta
rules, which take 0.8 to 0.9 of our time for prompts on an H200, then come before our own kernels there."""


def ranks(*, is_faster: bool, is_proven: bool = IS_PROVEN) -> Ranks:
    """The ranks of a row: behind FlashInfer's for prompts, and behind our own unless it is faster and proven."""
    return Ranks(prefill=15 if is_faster and is_proven else 5, decode=-5, few=-5)


_KEPT = frozenset({Feature.DETERMINISTIC, Feature.SEVERAL_PLANS})
_KIMI = frozenset({Feature.DELTA_RULE, Feature.CHANNEL_DECAY})

_DELTA = Capability(
    spec_kinds=frozenset({SpecKind.RECURRENT}),
    devices=frozenset({DeviceKind.CUDA}),
    compute_capabilities=frozenset({(8, 0), (9, 0), (10, 0), (10, 3)}),
    dtypes=frozenset({torch.bfloat16}),
    # States are fp32, whatever the cache holds.
    cache_dtypes=ANY,
    head_dims=frozenset({128}),
    group_sizes=ANY,
    page_sizes=ANY,
    features=_KEPT | {Feature.DELTA_RULE},
    host_lengths=HostLengths.EXACT,
    graph=GraphLevel.NONE,
    package="fla",
    expanded_dims=frozenset({(128, 128)}),
    only_with=frozenset({Feature.DELTA_RULE}),
    ranks=ranks(is_faster=True),
)
RECURRENT_ROWS: tuple[Capability, ...] = (
    _DELTA,
    replace(_DELTA, features=_KEPT | _KIMI, only_with=_KIMI),
    replace(_DELTA, features=_KEPT, only_with=frozenset(), group_sizes=frozenset({1}), ranks=ranks(is_faster=False)),
)
