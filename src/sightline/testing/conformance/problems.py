"""Softmax attention and latent attention as the kit tries them, and the problem of each kind of spec.

For latent attention, a capability row's head dimension is the size of an entry [latent | rope], and its group size is
the number of heads: all of them read the one entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sightline.attention.capability import ANY
from sightline.attention.contract import LatentInputs, SoftmaxInputs
from sightline.attention.kinds import LATENT_ONLY, RECURRENT_ONLY, SOFTMAX_ONLY, Feature, SpecKind
from sightline.attention.oracle.attention import attend_latent_row, attend_row
from sightline.attention.spec import LatentSpec, SoftmaxSpec
from sightline.testing.conformance.compressed_problems import CompressedIndexProblem, CompressedProblem
from sightline.testing.conformance.index_problem import IndexProblem, beside_nan
from sightline.testing.conformance.problem import Entries, EntryProblem, ExpandedDims, Normal, Problem, needle_score
from sightline.testing.conformance.state_problems import ConvolutionProblem, RecurrentProblem

_LARGE = 256
"""Larger entries are divided as in DeepSeek's models: 64 rotated elements, and equal head sizes."""


class SoftmaxProblem(EntryProblem[SoftmaxSpec, SoftmaxInputs]):
    """Softmax attention: query heads share key heads, and keys and values are cached in two planes."""

    kind: ClassVar[SpecKind] = SpecKind.SOFTMAX
    features: ClassVar[frozenset[Feature]] = frozenset(Feature) - RECURRENT_ONLY - LATENT_ONLY
    per_token: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    more_head_dims: ClassVar[tuple[int, ...]] = ()
    query_names: ClassVar[tuple[str, ...]] = ("q",)
    key_name: ClassVar[str] = "k"
    value_name: ClassVar[str] = "v"
    roundings: ClassVar[int] = 1
    half_slack: ClassVar[float] = 1.0

    def plain(
        self, head_dims: Sequence[int], group_sizes: Sequence[int], expanded_dims: ExpandedDims = ANY
    ) -> SoftmaxSpec:
        del expanded_dims
        return self.spec(head_dims[0], group_sizes[0], 2)

    def spec(self, head_dim: int, group_size: int, kv_heads: int, expanded_dims: ExpandedDims = ANY) -> SoftmaxSpec:
        del expanded_dims
        return SoftmaxSpec(group_size * kv_heads, kv_heads, head_dim, head_dim**-0.5)

    def another(self, spec: SoftmaxSpec) -> SoftmaxSpec:
        return replace(spec, scale=spec.scale / 2)

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
        # Each head beside something else, such as a gate.
        q, k, v = (torch.stack([part, torch.full_like(part, torch.nan)], 2).to(device)[:, :, 0] for part in parts[:3])
        yield "heads that lie apart", replace(inputs, q=q, k=k, v=v)


class LatentProblem(EntryProblem[LatentSpec, LatentInputs]):
    """Latent attention: one entry [latent | rope] per token, from which every head makes its keys and values.

    Small specs have no two dimensions alike.
    """

    kind: ClassVar[SpecKind] = SpecKind.LATENT
    features: ClassVar[frozenset[Feature]] = frozenset(Feature) - SOFTMAX_ONLY - RECURRENT_ONLY
    per_token: ClassVar[tuple[str, ...]] = ("q_nope", "q_rope", "latent", "k_rope", "chosen")
    more_head_dims: ClassVar[tuple[int, ...]] = (576,)
    query_names: ClassVar[tuple[str, ...]] = ("q_nope", "q_rope")
    key_name: ClassVar[str] = "k_rope"
    value_name: ClassVar[str] = "latent"
    roundings: ClassVar[int] = 2
    """A head's keys and values, or its query in the latent space; then outputs."""
    half_slack: ClassVar[float] = 1.25
    """With few keys, rounding a score is visible in the output: 3 of 400,000 numbers were beyond the tolerance."""

    def plain(
        self, head_dims: Sequence[int], group_sizes: Sequence[int], expanded_dims: ExpandedDims = ANY
    ) -> LatentSpec:
        del expanded_dims
        several = [size for size in group_sizes if size > 1]
        return self.spec(head_dims[0], (several or group_sizes)[0], 1)

    def spec(self, head_dim: int, group_size: int, kv_heads: int, expanded_dims: ExpandedDims = ANY) -> LatentSpec:
        del kv_heads, expanded_dims
        rope_dim = 64 if head_dim > _LARGE else max(1, head_dim // 4)
        latent_dim = head_dim - rope_dim
        nope_dim = max(1, latent_dim // 4)
        value_dim = nope_dim if head_dim > _LARGE else nope_dim + 2
        return LatentSpec(group_size, latent_dim, rope_dim, nope_dim, value_dim, (nope_dim + rope_dim) ** -0.5)

    def another(self, spec: LatentSpec) -> LatentSpec:
        return replace(spec, scale=spec.scale / 2)

    def describe(self, spec: LatentSpec) -> str:
        return (
            f"{spec.num_q_heads} heads of {spec.nope_dim} + {spec.rope_dim} and {spec.value_dim} on entries of "
            f"{spec.latent_dim} + {spec.rope_dim}, scale {spec.scale:.4g}"
            f"{'' if spec.top_k is None else f', {spec.top_k} of them chosen'}"
        )

    def random_inputs(self, spec: LatentSpec, num_tokens: int, normal: Normal) -> LatentInputs:
        heads = spec.num_q_heads
        return LatentInputs(
            q_nope=normal(num_tokens, heads, spec.nope_dim) * 2,
            q_rope=normal(num_tokens, heads, spec.rope_dim) * 2,
            latent=normal(num_tokens, spec.latent_dim),
            k_rope=normal(num_tokens, spec.rope_dim),
            key_up=normal(heads, spec.nope_dim, spec.latent_dim) * spec.latent_dim**-0.5,
            value_up=normal(heads, spec.value_dim, spec.latent_dim) * spec.latent_dim**-0.5,
        )

    def entries(self, inputs: LatentInputs) -> Entries:
        return (torch.cat([inputs.latent, inputs.k_rope], dim=-1),)

    def put_entries(self, spec: LatentSpec, inputs: LatentInputs, entries: Entries) -> None:
        inputs.latent.copy_(entries[0][:, : spec.latent_dim])
        inputs.k_rope.copy_(entries[0][:, spec.latent_dim :])

    def answer(
        self, spec: LatentSpec, inputs: LatentInputs, tokens: slice | Tensor, entries: Entries, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        [entry] = entries
        queries = (inputs.q_nope[tokens], inputs.q_rope[tokens])
        return attend_latent_row(spec, *queries, entry, inputs.key_up, inputs.value_up, visible)

    def values(self, spec: LatentSpec, entries: Entries) -> Tensor:
        return entries[0][:, : spec.latent_dim]

    def make_noticed(self, spec: LatentSpec, inputs: LatentInputs, entries: Entries, place: int) -> None:
        del spec
        entries[0][place] = 3 * _absorbed(inputs)[0].to(entries[0].dtype)

    def look_for(
        self, spec: LatentSpec, inputs: LatentInputs, tokens: slice, entries: Entries, places: Sequence[int]
    ) -> None:
        # The rotated part of an entry is the same for all heads.
        sought = inputs.q_rope[tokens.start, 0].float()
        inputs.q_rope[tokens] = (inputs.q_rope[tokens].float() / 2 + sought).to(inputs.q_rope.dtype)
        [entry], context_len = entries, entries[0].shape[0]
        score = needle_score(context_len + tokens.stop - tokens.start, len(places))
        added = sought * (score / (spec.scale * sought.square().sum()))
        for place in places:
            new = inputs.k_rope[tokens.start + place - context_len] if place >= context_len else None
            line = entry[place, spec.latent_dim :] if new is None else new
            line.copy_(line.float() / 2 + added)

    def climbing(self, spec: LatentSpec, inputs: LatentInputs, entries: Entries, scores: Tensor) -> Entries:
        [entry] = entries
        queries = _absorbed(inputs)
        # The direction in which every head's score grows equally.
        direction = torch.linalg.pinv(queries) @ torch.ones(queries.shape[0])
        return (((scores / spec.scale).view(-1, 1) * direction + 0.3 * entry.float()).to(entry.dtype),)

    def strided(self, inputs: LatentInputs, device: torch.device) -> Iterator[tuple[str, LatentInputs]]:
        q_nope, q_rope = _parts_of_one(device, -1, inputs.q_nope, inputs.q_rope)
        latent, k_rope = _parts_of_one(device, -1, inputs.latent, inputs.k_rope)
        key_up, value_up = _parts_of_one(device, 1, inputs.key_up, inputs.value_up)
        chosen = None if inputs.chosen is None else inputs.chosen.to(device)
        parts = LatentInputs(q_nope, q_rope, latent, k_rope, key_up, value_up, chosen)
        yield "inputs that are parts of one tensor", parts
        whole = torch.cat((inputs.q_nope, inputs.q_rope), dim=-1).to(device)
        q_nope, q_rope = whole.split_with_sizes([inputs.q_nope.shape[-1], inputs.q_rope.shape[-1]], dim=-1)
        yield "queries that are whole heads", replace(parts, q_nope=q_nope, q_rope=q_rope)
        apart = {name: beside_nan(tensor, device) for name, tensor in vars(inputs).items() if name != "chosen"}
        yield "heads that lie apart", replace(inputs, **apart, chosen=chosen)


def _absorbed(inputs: LatentInputs) -> Tensor:
    """The first token's queries [heads, latent + rope] in the space of entries, fp32."""
    taken = torch.einsum("hn,hnl->hl", inputs.q_nope[0].float(), inputs.key_up.float())
    return torch.cat([taken, inputs.q_rope[0].float()], dim=-1)


def _parts_of_one(device: torch.device, dim: int, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both as slices of one tensor on the device that also holds NaN."""
    wide = torch.cat([one, two, torch.full_like(one, torch.nan)], dim=dim).to(device)
    return wide.narrow(dim, 0, one.shape[dim]), wide.narrow(dim, one.shape[dim], two.shape[dim])


PROBLEMS: Mapping[SpecKind, Problem[Any, Any]] = {
    problem.kind: problem
    for problem in (
        SoftmaxProblem(),
        LatentProblem(),
        RecurrentProblem(),
        ConvolutionProblem(),
        IndexProblem(),
        CompressedProblem(),
        CompressedIndexProblem(),
    )
}
