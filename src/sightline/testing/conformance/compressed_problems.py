"""Compressed attention, and indexers over compressed keys, as the kit tries them.

A capability row's group size is the number of heads: all read one key. What is kept of a context is a function of its
tokens, so a context is the inputs of its tokens, from which the oracle makes entries and states.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from sightline.attention.capability import ANY
from sightline.attention.compressed.inputs import CompressedIndexInputs, CompressedInputs, CompressionInputs
from sightline.attention.compressed.spec import CompressedIndexSpec, CompressedSpec, Compression
from sightline.attention.contract import InputsT, SpecT
from sightline.attention.kinds import COMPRESSED_FEATURES, COMPRESSED_INDEX_FEATURES, Feature, SpecKind
from sightline.cache.spec import PlaneSpec
from sightline.core.page_shape import fits
from sightline.testing.conformance.given_inputs import map_inputs, tensor_at
from sightline.testing.conformance.index_problem import beside_nan
from sightline.testing.conformance.problem import ExpandedDims, Normal, Problem

_WINDOW = 9
"""Few tokens: most rows have more, and some have fewer."""
_RATIO = 4
_TOP_K = 3
_NOWHERE = 7.0
"""The rotation of tokens that complete no entry, which nothing may read."""


def rotation_at(compression: Compression, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [num_tokens, rope_dim // 2] of the windows of tokens at some positions."""
    windows = positions.div(compression.ratio, rounding_mode="floor").float()
    angles = windows.unsqueeze(1) * torch.linspace(0.2, 1.7, compression.rope_dim // 2)
    unread = ((positions + 1) % compression.ratio != 0).unsqueeze(1)
    return angles.cos().masked_fill(unread, _NOWHERE), angles.sin().masked_fill(unread, _NOWHERE)


class CompressingProblem(Problem[SpecT, InputsT]):
    """Layers that compress tokens into entries."""

    history: ClassVar[tuple[str, ...]]
    """Names of the inputs from which entries and states come."""
    more_head_dims: ClassVar[tuple[int, ...]] = ()
    more_group_sizes: ClassVar[tuple[int, ...]] = (32, 64)
    half_slack: ClassVar[float] = 2.0
    """An entry that is rounded the other way is as wrong as a rounded weight."""

    def plain(self, head_dims: Sequence[int], group_sizes: Sequence[int], expanded_dims: ExpandedDims = ANY) -> SpecT:
        del expanded_dims
        several = [size for size in group_sizes if size > 1]
        return self.spec(head_dims[0], (several or group_sizes)[0], 1)

    def fits_page(self, page_size: int) -> bool:
        return fits(page_size, _RATIO)

    @abstractmethod
    def planes(self, spec: SpecT) -> tuple[PlaneSpec, ...]:
        """Returns the planes of a state."""

    def of_history(self, inputs: InputsT) -> tuple[Tensor, ...]:
        """Returns the inputs from which entries and states come; nothing for a part that is missing."""
        found = [tensor_at(inputs, name) for name in self.history]
        return tuple(each for each in found if each is not None)

    def at_positions(self, spec: Any, inputs: InputsT, positions: Tensor) -> InputsT:
        """Returns the inputs with the rotations of their windows."""
        if spec.compression is None:
            return inputs
        cos, sin = rotation_at(spec.compression, positions)
        given: Any = inputs
        placed: InputsT = replace(given, entries=replace(given.entries, cos=cos, sin=sin))
        return placed

    def strided(self, inputs: InputsT, device: torch.device) -> Iterator[tuple[str, InputsT]]:
        names, given = tuple(vars(inputs)), cast(Any, inputs)
        there = map_inputs(given, lambda tensor: tensor.to(device), names)
        yield "rows that lie apart", map_inputs(there, lambda tensor: beside_nan(tensor, device), self.per_token)
        yield "rows within wider ones", map_inputs(there, _within_nan, self.per_token)


class CompressedProblem(CompressingProblem[CompressedSpec, CompressedInputs]):
    """Attention to a window and to compressed entries."""

    kind: ClassVar[SpecKind] = SpecKind.COMPRESSED
    features: ClassVar[frozenset[Feature]] = COMPRESSED_FEATURES
    per_token: ClassVar[tuple[str, ...]] = (
        "q", "key", "entries.values", "entries.gates", "entries.cos", "entries.sin", "chosen",
    )  # fmt: skip
    history: ClassVar[tuple[str, ...]] = ("key", "entries.values", "entries.gates")
    roundings: ClassVar[int] = 2
    """Entries and outputs."""

    def spec(self, head_dim: int, group_size: int, kv_heads: int, expanded_dims: ExpandedDims = ANY) -> CompressedSpec:
        del kv_heads, expanded_dims
        return CompressedSpec(group_size, head_dim, head_dim**-0.5, _WINDOW, _compression(head_dim))

    def another(self, spec: CompressedSpec) -> CompressedSpec:
        return replace(spec, scale=spec.scale / 2)

    def describe(self, spec: CompressedSpec) -> str:
        heads = f"{spec.num_q_heads} heads on one of {spec.head_dim}, window {spec.window}, scale {spec.scale:.4g}"
        extras = [] if spec.compression is None else [_told(spec.compression)]
        return ", ".join([heads, *extras, *([] if spec.top_k is None else [f"{spec.top_k} chosen"])])

    def planes(self, spec: CompressedSpec) -> tuple[PlaneSpec, ...]:
        return spec.states(1, torch.float32).planes

    def random_inputs(self, spec: CompressedSpec, num_tokens: int, normal: Normal) -> CompressedInputs:
        return CompressedInputs(
            q=normal(num_tokens, spec.num_q_heads, spec.head_dim) * 2,
            key=normal(num_tokens, spec.head_dim),
            sinks=normal(spec.num_q_heads),
            entries=None if spec.compression is None else _random(spec.compression, spec.head_dim, num_tokens, normal),
        )


class CompressedIndexProblem(CompressingProblem[CompressedIndexSpec, CompressedIndexInputs]):
    """An indexer over compressed keys."""

    kind: ClassVar[SpecKind] = SpecKind.COMPRESSED_INDEX
    features: ClassVar[frozenset[Feature]] = COMPRESSED_INDEX_FEATURES
    per_token: ClassVar[tuple[str, ...]] = (
        "q", "weights", "entries.values", "entries.gates", "entries.cos", "entries.sin",
    )  # fmt: skip
    history: ClassVar[tuple[str, ...]] = ("entries.values", "entries.gates")
    roundings: ClassVar[int] = 1

    def spec(
        self, head_dim: int, group_size: int, kv_heads: int, expanded_dims: ExpandedDims = ANY
    ) -> CompressedIndexSpec:
        del kv_heads, expanded_dims
        return CompressedIndexSpec(group_size, head_dim, _TOP_K, _compression(head_dim))

    def another(self, spec: CompressedIndexSpec) -> CompressedIndexSpec:
        return replace(spec, top_k=spec.top_k + 2)

    def describe(self, spec: CompressedIndexSpec) -> str:
        heads = f"{spec.num_q_heads} heads of {spec.head_dim} that choose {spec.top_k}"
        return f"{heads}, {_told(spec.compression)}"

    def planes(self, spec: CompressedIndexSpec) -> tuple[PlaneSpec, ...]:
        return spec.states(1, torch.float32).planes

    def random_inputs(self, spec: CompressedIndexSpec, num_tokens: int, normal: Normal) -> CompressedIndexInputs:
        return CompressedIndexInputs(
            q=normal(num_tokens, spec.num_q_heads, spec.head_dim),
            weights=normal(num_tokens, spec.num_q_heads) + 0.75,
            entries=_random(spec.compression, spec.head_dim, num_tokens, normal),
        )


def _compression(head_dim: int) -> Compression:
    return Compression(_RATIO, overlap=True, rope_dim=min(64, head_dim // 4 * 2), norm_eps=1e-6)


def _told(compression: Compression) -> str:
    return f"entries of {compression.ratio} tokens{' that overlap' if compression.overlap else ''}"


def _random(compression: Compression, head_dim: int, num_tokens: int, normal: Normal) -> CompressionInputs:
    """Random tokens at no position yet. The weight of the norm is the same for all: entries of contexts have it too."""
    width = compression.width(head_dim)
    values, gates = normal(num_tokens, width), normal(num_tokens, width)
    weights = torch.rand(head_dim, generator=torch.Generator().manual_seed(head_dim)).to(values.dtype)
    turned = torch.zeros(num_tokens, compression.rope_dim // 2)
    return CompressionInputs(values, gates * 2, weights + 0.5, turned, turned)


def _within_nan(tensor: Tensor) -> Tensor:
    """Returns the tensor as a slice of the rows of a wider one, whose rest is NaN or, in a choice, no place."""
    rest = torch.full_like(tensor, torch.nan if tensor.is_floating_point() else -9)
    return torch.cat([rest, tensor, rest], dim=-1).narrow(-1, tensor.shape[-1], tensor.shape[-1])
