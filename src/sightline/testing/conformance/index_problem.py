"""Indexers as the kit tries them. A capability row's group size is the number of heads: all read a token's one key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.capability import ANY
from sightline.attention.contract import IndexInputs
from sightline.attention.kinds import INDEX_FEATURES, Feature, SpecKind
from sightline.attention.spec import IndexSpec
from sightline.testing.conformance.problem import Entries, ExpandedDims, Normal, PagedProblem

_TOP_K = 4
"""Few: in most steps some row has more tokens, and in most of these some row has fewer."""
_FAR = 4.0
"""How far the keys that are looked for are from others."""


class IndexProblem(PagedProblem[IndexSpec, IndexInputs]):
    """An indexer: one key per token, and a choice of tokens for each query."""

    kind: ClassVar[SpecKind] = SpecKind.INDEX
    features: ClassVar[frozenset[Feature]] = INDEX_FEATURES
    per_token: ClassVar[tuple[str, ...]] = ("q", "key", "weights")
    more_head_dims: ClassVar[tuple[int, ...]] = ()
    more_group_sizes: ClassVar[tuple[int, ...]] = (32, 64)
    roundings: ClassVar[int] = 0
    """A choice is exact. `IndexStep` knows how far scores may be apart that count as equal."""
    half_slack: ClassVar[float] = 1.0

    def plain(
        self, head_dims: Sequence[int], group_sizes: Sequence[int], expanded_dims: ExpandedDims = ANY
    ) -> IndexSpec:
        del expanded_dims
        several = [size for size in group_sizes if size > 1]
        return self.spec(head_dims[0], (several or group_sizes)[0], 1)

    def spec(self, head_dim: int, group_size: int, kv_heads: int, expanded_dims: ExpandedDims = ANY) -> IndexSpec:
        del kv_heads, expanded_dims
        return IndexSpec(group_size, head_dim, _TOP_K)

    def another(self, spec: IndexSpec) -> IndexSpec:
        return replace(spec, top_k=spec.top_k + 3)

    def describe(self, spec: IndexSpec) -> str:
        return f"{spec.num_q_heads} heads of {spec.head_dim} that choose {spec.top_k} tokens"

    def random_inputs(self, spec: IndexSpec, num_tokens: int, normal: Normal) -> IndexInputs:
        # Most weights are positive: otherwise most scores would be 0 where there are few heads.
        return IndexInputs(
            q=normal(num_tokens, spec.num_q_heads, spec.head_dim),
            key=normal(num_tokens, spec.head_dim),
            weights=normal(num_tokens, spec.num_q_heads) + 0.75,
        )

    def entries(self, inputs: IndexInputs) -> Entries:
        return (inputs.key,)

    def put_entries(self, spec: IndexSpec, inputs: IndexInputs, entries: Entries) -> None:
        del spec
        inputs.key.copy_(entries[0])

    def of_new_entries(self, inputs: IndexInputs) -> tuple[Tensor, ...]:
        return (inputs.key,)

    def make_noticed(self, spec: IndexSpec, inputs: IndexInputs, entries: Entries, place: int) -> None:
        del spec
        inputs.weights[0].abs_()
        for keys in entries:
            keys[place] = 5 * inputs.q[0, int(inputs.weights[0].argmax())]

    def look_for(
        self, spec: IndexSpec, inputs: IndexInputs, tokens: slice, entries: Entries, places: Sequence[int]
    ) -> None:
        del spec
        sought = inputs.q[tokens.start].float()
        inputs.q[tokens] = (inputs.q[tokens].float() / 4 + sought).to(inputs.q.dtype)
        inputs.weights[tokens] = inputs.weights[tokens].abs()
        # The direction in which the scores of all heads are high.
        high = sought.sum(0) / sought.shape[0] ** 0.5
        context_len = entries[0].shape[0]
        for place in places:
            is_new = place >= context_len
            planes = (inputs.key[tokens],) if is_new else entries
            line = place - context_len if is_new else place
            found = planes[0][line].float() / 4 + _FAR * high
            for keys in planes:
                keys[line] = found.to(keys.dtype)

    def strided(self, inputs: IndexInputs, device: torch.device) -> Iterator[tuple[str, IndexInputs]]:
        num_tokens, heads, size = inputs.q.shape
        parts = (inputs.q.reshape(num_tokens, -1), inputs.key, inputs.weights, torch.full_like(inputs.key, torch.nan))
        wide = torch.cat(parts, dim=1).to(device)
        q, key, weights, _ = wide.split_with_sizes([part.shape[1] for part in parts], dim=1)
        yield "inputs that are parts of one tensor", IndexInputs(torch.unflatten(q, 1, (heads, size)), key, weights)
        yield "rows that lie apart", IndexInputs(*(beside_nan(each, device) for each in vars(inputs).values()))


def beside_nan(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on the device, with NaN between its rows in memory."""
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-2).to(device).select(-2, 0)
