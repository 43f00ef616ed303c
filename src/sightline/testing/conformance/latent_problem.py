"""Latent attention as the kit tries it: one entry [latent | rope] a token, of which every head makes its own.

A row's head dimension is an entry's size, and its group size the number of heads: all of them read the one entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.contract import LatentInputs
from sightline.attention.oracle.attention import attend_latent_row
from sightline.attention.spec import Feature, LatentSpec, SpecKind
from sightline.testing.conformance.problem import Entries, Normal, Problem, needle_score

_LARGE = 256
"""Entries above this are cut as DeepSeek's models cut them: 64 numbers are rotated, and a head has equal sides."""


class LatentProblem(Problem[LatentSpec, LatentInputs]):
    """Two heads where nothing else is asked for, and no two dimensions alike."""

    kind: ClassVar[SpecKind] = SpecKind.LATENT
    features: ClassVar[frozenset[Feature]] = frozenset(Feature) - {Feature.WINDOW, Feature.SOFTCAP, Feature.SINKS}
    per_token: ClassVar[tuple[str, ...]] = ("q_nope", "q_rope", "latent", "k_rope")
    more_head_dims: ClassVar[tuple[int, ...]] = (576,)
    kv_heads: ClassVar[tuple[int, ...]] = (1,)
    roundings: ClassVar[int] = 2
    """A head's keys and values, or its query in the latent's space; then outputs."""
    half_slack: ClassVar[float] = 1.25
    """With few keys, what rounding them does to a score is seen in the output: of 400,000 numbers 3 were beyond."""

    def plain(self, head_dims: Sequence[int], group_sizes: Sequence[int]) -> LatentSpec:
        several = [size for size in group_sizes if size > 1]
        return self.spec(head_dims[0], (several or group_sizes)[0], 1)

    def spec(self, head_dim: int, group_size: int, kv_heads: int) -> LatentSpec:
        del kv_heads
        rope_dim = 64 if head_dim > _LARGE else max(1, head_dim // 4)
        latent_dim = head_dim - rope_dim
        nope_dim = max(1, latent_dim // 4)
        value_dim = nope_dim if head_dim > _LARGE else nope_dim + 2
        return LatentSpec(group_size, latent_dim, rope_dim, nope_dim, value_dim, (nope_dim + rope_dim) ** -0.5)

    def describe(self, spec: LatentSpec) -> str:
        return (
            f"{spec.num_q_heads} heads of {spec.nope_dim} + {spec.rope_dim} and {spec.value_dim} on entries of "
            f"{spec.latent_dim} + {spec.rope_dim}, scale {spec.scale:.4g}"
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

    def queries(self, inputs: LatentInputs) -> tuple[Tensor, ...]:
        return inputs.q_nope, inputs.q_rope

    def exact_queries(self, inputs: LatentInputs) -> Tensor:
        return inputs.q_rope

    def new_keys(self, inputs: LatentInputs) -> Tensor:
        return inputs.k_rope

    def new_values(self, inputs: LatentInputs) -> Tensor:
        return inputs.latent

    def values(self, spec: LatentSpec, entries: Entries) -> Tensor:
        return entries[0][:, : spec.latent_dim]

    def make_noticed(self, spec: LatentSpec, inputs: LatentInputs, entries: Entries, place: int) -> None:
        del spec
        entries[0][place] = 3 * _absorbed(inputs)[0].to(entries[0].dtype)

    def look_for(
        self, spec: LatentSpec, inputs: LatentInputs, tokens: slice, entries: Entries, places: Sequence[int]
    ) -> None:
        # The rotated part of an entry is the one that all heads meet alike.
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
        # The one direction along which every head's score grows alike.
        direction = torch.linalg.pinv(queries) @ torch.ones(queries.shape[0])
        return (((scores / spec.scale).view(-1, 1) * direction + 0.3 * entry.float()).to(entry.dtype),)

    def strided(self, inputs: LatentInputs, device: torch.device) -> Iterator[tuple[str, LatentInputs]]:
        q_nope, q_rope = _parts_of_one(device, -1, inputs.q_nope, inputs.q_rope)
        latent, k_rope = _parts_of_one(device, -1, inputs.latent, inputs.k_rope)
        key_up, value_up = _parts_of_one(device, 1, inputs.key_up, inputs.value_up)
        yield "inputs that are parts of one tensor", LatentInputs(q_nope, q_rope, latent, k_rope, key_up, value_up)
        whole = torch.cat((inputs.q_nope, inputs.q_rope), dim=-1).to(device)
        q_nope, q_rope = whole.split_with_sizes([inputs.q_nope.shape[-1], inputs.q_rope.shape[-1]], dim=-1)
        yield "queries that are whole heads", LatentInputs(q_nope, q_rope, latent, k_rope, key_up, value_up)
        apart = {name: _beside_nan(tensor, device) for name, tensor in vars(inputs).items()}
        yield "heads that lie apart", replace(inputs, **apart)


def _absorbed(inputs: LatentInputs) -> Tensor:
    """[heads, latent + rope] fp32: the first token's queries as they meet entries."""
    taken = torch.einsum("hn,hnl->hl", inputs.q_nope[0].float(), inputs.key_up.float())
    return torch.cat([taken, inputs.q_rope[0].float()], dim=-1)


def _parts_of_one(device: torch.device, dim: int, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Both on the device, in one tensor with something that is neither."""
    wide = torch.cat([one, two, torch.full_like(one, torch.nan)], dim=dim).to(device)
    return wide.narrow(dim, 0, one.shape[dim]), wide.narrow(dim, one.shape[dim], two.shape[dim])


def _beside_nan(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, each run of numbers beside one that is something else."""
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-2).to(device).select(-2, 0)
