"""What the kit needs to know about a kind of attention: its specs, inputs, cache entries, and the oracle's answer.

    spec ─▶ random inputs ─▶ entries, as they are cached ─▶ the oracle's answer for a row
                   └─ changes that checks make to inputs: equal weights, climbing scores, equal values

Rigs, steps and checks use only this contract. Knows no backend and no pages.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Generic, TypeAlias

import torch
from torch import Tensor

from sightline.attention.contract import InputsT, SpecT
from sightline.attention.spec import Feature, SpecKind

Entries: TypeAlias = tuple[Tensor, ...]
"""Cache entries of some tokens: one tensor [num_entries, ...] for each plane of the pool, on the host."""
Normal: TypeAlias = Callable[..., Tensor]
"""A function from a shape to normally distributed random numbers, in the dtype of the step."""


def needle_score(num_keys: int, num_places: int) -> float:
    """Returns how much higher the scores of some keys must be for them to weigh as much as all others together.

    The other scores are roughly normal with variance 5, so that the mean of their exponentials is e^2.5.
    """
    return math.log(max(num_keys, 1) / max(num_places, 1)) + 2.5


class Problem(ABC, Generic[SpecT, InputsT]):
    """One kind of attention."""

    kind: ClassVar[SpecKind]
    features: ClassVar[frozenset[Feature]]
    """Features that this kind of attention has."""
    per_token: ClassVar[tuple[str, ...]]
    """Names of the input tensors with one row per token; the others belong to the layer."""
    more_head_dims: ClassVar[tuple[int, ...]]
    """Head dimensions to try besides the usual ones if a row serves any."""
    query_names: ClassVar[tuple[str, ...]]
    """Names of the inputs that are multiplied with keys. If all of them are 0, all keys weigh the same. The last one is
    multiplied with cached entries as they are, with no rounding in between."""
    key_name: ClassVar[str]
    """The input from which the new tokens' scores come, or a part of them."""
    value_name: ClassVar[str]
    """The input from which the new tokens' values come."""
    roundings: ClassVar[int]
    """How often numbers are rounded to the step's dtype before they are an output; all but the last affect scores."""
    half_slack: ClassVar[float]
    """Factor on the tolerance in half precision."""

    @abstractmethod
    def plain(self, head_dims: Sequence[int], group_sizes: Sequence[int]) -> SpecT:
        """Returns the plainest spec for a row that serves these; with several heads if possible."""

    @abstractmethod
    def spec(self, head_dim: int, group_size: int, kv_heads: int) -> SpecT:
        """Returns a spec of that geometry with the usual scale. Latent attention ignores `kv_heads`."""

    @abstractmethod
    def describe(self, spec: SpecT) -> str:
        """Describes a spec in one line."""

    @abstractmethod
    def random_inputs(self, spec: SpecT, num_tokens: int, normal: Normal) -> InputsT:
        """Returns inputs for one layer."""

    @abstractmethod
    def entries(self, inputs: InputsT) -> Entries:
        """Returns the cache entries of the inputs' tokens."""

    @abstractmethod
    def put_entries(self, spec: SpecT, inputs: InputsT, entries: Entries) -> None:
        """Changes the inputs so that their tokens have these cache entries."""

    @abstractmethod
    def answer(
        self, spec: SpecT, inputs: InputsT, tokens: slice | Tensor, entries: Entries, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the oracle's output and LSE for some tokens of a row; `entries` are all entries of the row."""

    def queries(self, inputs: InputsT) -> tuple[Tensor, ...]:
        return tuple(vars(inputs)[name] for name in self.query_names)

    def exact_queries(self, inputs: InputsT) -> Tensor:
        return self.queries(inputs)[-1]

    def new_keys(self, inputs: InputsT) -> Tensor:
        keys: Tensor = vars(inputs)[self.key_name]
        return keys

    def new_values(self, inputs: InputsT) -> Tensor:
        values: Tensor = vars(inputs)[self.value_name]
        return values

    @abstractmethod
    def values(self, spec: SpecT, entries: Entries) -> Tensor:
        """Returns a view of the part of entries from which values come."""

    @abstractmethod
    def make_noticed(self, spec: SpecT, inputs: InputsT, entries: Entries, place: int) -> None:
        """Changes an entry so that the first token's output changes."""

    @abstractmethod
    def look_for(self, spec: SpecT, inputs: InputsT, tokens: slice, entries: Entries, places: Sequence[int]) -> None:
        """Changes a row so that its queries give the keys at `places` together as much weight as all others.

        Otherwise a single key among thousands would have next to no weight. `entries` are those of the context; places
        beyond them are new tokens.
        """

    @abstractmethod
    def climbing(self, spec: SpecT, inputs: InputsT, entries: Entries, scores: Tensor) -> Entries:
        """Returns entries whose scores with the first token are about `scores` [num_entries]."""

    @abstractmethod
    def strided(self, inputs: InputsT, device: torch.device) -> Iterator[tuple[str, InputsT]]:
        """Yields inputs with the same numbers on the device but other strides, each with a description."""
