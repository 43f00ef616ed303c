"""Softmax attention as the kit tries it: heads on key heads, keys and values cached beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.contract import SoftmaxInputs
from sightline.attention.oracle.attention import attend_row
from sightline.attention.spec import Feature, SoftmaxSpec, SpecKind
from sightline.testing.conformance.problem import Entries, Normal, Problem, needle_score


class SoftmaxProblem(Problem[SoftmaxSpec, SoftmaxInputs]):
    """Two key heads where nothing else is asked for."""

    kind: ClassVar[SpecKind] = SpecKind.SOFTMAX
    features: ClassVar[frozenset[Feature]] = frozenset(Feature)
    per_token: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    more_head_dims: ClassVar[tuple[int, ...]] = ()
    kv_heads: ClassVar[tuple[int, ...]] = (1, 2)
    roundings: ClassVar[int] = 1
    half_slack: ClassVar[float] = 1.0

    def plain(self, head_dims: Sequence[int], group_sizes: Sequence[int]) -> SoftmaxSpec:
        return self.spec(head_dims[0], group_sizes[0], 2)

    def spec(self, head_dim: int, group_size: int, kv_heads: int) -> SoftmaxSpec:
        return SoftmaxSpec(group_size * kv_heads, kv_heads, head_dim, head_dim**-0.5)

    def describe(self, spec: SoftmaxSpec) -> str:
        extras = [f"window {spec.window}"] if spec.window is not None else []
        extras += [f"softcap {spec.softcap:g}"] if spec.softcap is not None else []
        extras += ["sinks"] if spec.sinks else []
        heads = f"{spec.num_q_heads} query heads on {spec.num_kv_heads} × {spec.head_dim}, scale {spec.scale:.4g}"
        return ", ".join([heads, *extras])

    def random_inputs(self, spec: SoftmaxSpec, num_tokens: int, normal: Normal) -> SoftmaxInputs:
        entry = (num_tokens, spec.num_kv_heads, spec.head_dim)
        return SoftmaxInputs(
            q=normal(num_tokens, spec.num_q_heads, spec.head_dim) * 2,
            k=normal(*entry),
            v=normal(*entry),
            sinks=normal(spec.num_q_heads) if spec.sinks else None,
        )

    def entries(self, inputs: SoftmaxInputs) -> Entries:
        return inputs.k, inputs.v

    def put_entries(self, spec: SoftmaxSpec, inputs: SoftmaxInputs, entries: Entries) -> None:
        del spec
        inputs.k.copy_(entries[0])
        inputs.v.copy_(entries[1])

    def answer(
        self, spec: SoftmaxSpec, inputs: SoftmaxInputs, tokens: slice | Tensor, entries: Entries, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        keys, values = entries
        return attend_row(spec, inputs.q[tokens], keys, values, visible, inputs.sinks)

    def queries(self, inputs: SoftmaxInputs) -> tuple[Tensor, ...]:
        return (inputs.q,)

    def exact_queries(self, inputs: SoftmaxInputs) -> Tensor:
        return inputs.q

    def new_keys(self, inputs: SoftmaxInputs) -> Tensor:
        return inputs.k

    def new_values(self, inputs: SoftmaxInputs) -> Tensor:
        return inputs.v

    def values(self, spec: SoftmaxSpec, entries: Entries) -> Tensor:
        del spec
        return entries[1]

    def make_noticed(self, spec: SoftmaxSpec, inputs: SoftmaxInputs, entries: Entries, place: int) -> None:
        keys, values = entries
        keys[place] = 3 * inputs.q[0, :: spec.group_size]
        values[place] = 5.0

    def look_for(
        self, spec: SoftmaxSpec, inputs: SoftmaxInputs, tokens: slice, entries: Entries, places: Sequence[int]
    ) -> None:
        sought = inputs.q[tokens.start, :: spec.group_size].float()
        shared = sought.repeat_interleave(spec.group_size, 0)
        inputs.q[tokens] = (inputs.q[tokens].float() / 2 + shared).to(inputs.q.dtype)
        keys, context_len = entries[0], entries[0].shape[0]
        num_keys = context_len + tokens.stop - tokens.start
        score = needle_score(min(num_keys, spec.window or num_keys), len(places))
        added = sought * (score / (spec.scale * sought.square().sum(-1, keepdim=True)))
        for place in places:
            line = keys[place] if place < context_len else inputs.k[tokens.start + place - context_len]
            line.copy_(line.float() / 2 + added)

    def climbing(self, spec: SoftmaxSpec, inputs: SoftmaxInputs, entries: Entries, scores: Tensor) -> Entries:
        keys, values = entries
        direction = inputs.q[0, :: spec.group_size].float()
        direction = direction / direction.square().sum(-1, keepdim=True)
        climbing = (scores / spec.scale).view(-1, 1, 1) * direction + 0.3 * keys.float()
        return climbing.to(keys.dtype), values

    def strided(self, inputs: SoftmaxInputs, device: torch.device) -> Iterator[tuple[str, SoftmaxInputs]]:
        parts = (inputs.q, inputs.k, inputs.v, torch.full_like(inputs.q, torch.nan))
        wide = torch.cat(parts, dim=1).to(device)
        q, k, v, _ = torch.split(wide, [part.shape[1] for part in parts], dim=1)
        yield "inputs that are parts of one tensor", replace(inputs, q=q, k=k, v=v)
        # Each head beside something else, as a gate.
        q, k, v = (torch.stack([part, torch.full_like(part, torch.nan)], 2).to(device)[:, :, 0] for part in parts[:3])
        yield "heads that lie apart", replace(inputs, q=q, k=k, v=v)
