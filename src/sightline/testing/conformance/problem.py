"""What the kit has to know about a kind of attention: its specs, its inputs, what it caches, and what the oracle says.

    spec ─▶ random inputs ─▶ entries, as they are cached ─▶ the oracle's answer for a row
                   └─ what checks do to inputs: no weight on any key, scores that climb, values that are alike

Benches, steps and checks speak of these alone. Knows no backend and no pages.
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
"""What is cached of some tokens, one tensor [num_entries, ...] for each plane of the pool, on the host."""
Normal: TypeAlias = Callable[..., Tensor]
"""Random numbers of a shape, in the dtype of the step."""


def needle_score(num_keys: int, num_places: int) -> float:
    """How much higher the scores of some keys must be, so that they weigh as much as all others together.

    Scores of the others are about normal with a variance of 5, and the mean of their exponentials is e^2.5.
    """
    return math.log(max(num_keys, 1) / max(num_places, 1)) + 2.5


class Problem(ABC, Generic[SpecT, InputsT]):
    """One kind of attention."""

    kind: ClassVar[SpecKind]
    features: ClassVar[frozenset[Feature]]
    """What a spec of this kind, or a step over it, can ask for."""
    per_token: ClassVar[tuple[str, ...]]
    """The inputs' tensors that have a line for each token; others are the layer's."""
    more_head_dims: ClassVar[tuple[int, ...]]
    """Head dimensions that are tried beside the usual ones where a row serves any."""
    kv_heads: ClassVar[tuple[int, ...]]
    """Numbers of key heads that are tried together with everything else."""

    roundings: ClassVar[int]
    """How often numbers on the way to an output are rounded to the step's dtype; all but the last reach the scores."""
    half_slack: ClassVar[float]
    """How much more the rarest outputs in half precision may be off."""

    @abstractmethod
    def plain(self, head_dims: Sequence[int], group_sizes: Sequence[int]) -> SpecT:
        """The plainest spec for a row that serves these; more than one head where it can be."""

    @abstractmethod
    def spec(self, head_dim: int, group_size: int, kv_heads: int) -> SpecT:
        """A spec of that geometry, with the usual scale; `kv_heads` is of no matter where all heads share a key."""

    @abstractmethod
    def describe(self, spec: SpecT) -> str:
        """As a person would write it down."""

    @abstractmethod
    def random_inputs(self, spec: SpecT, num_tokens: int, normal: Normal) -> InputsT:
        """One layer's inputs."""

    @abstractmethod
    def entries(self, inputs: InputsT) -> Entries:
        """What is cached of the inputs' tokens."""

    @abstractmethod
    def put_entries(self, spec: SpecT, inputs: InputsT, entries: Entries) -> None:
        """Changes the inputs so that these are cached of their tokens."""

    @abstractmethod
    def answer(
        self, spec: SpecT, inputs: InputsT, tokens: slice | Tensor, entries: Entries, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The oracle's output and LSE for those tokens of a row; `entries` are all of the row's."""

    @abstractmethod
    def queries(self, inputs: InputsT) -> tuple[Tensor, ...]:
        """What is multiplied with keys: where all of it is 0, all keys weigh the same."""

    @abstractmethod
    def exact_queries(self, inputs: InputsT) -> Tensor:
        """The part of queries that meets what is cached as it stands, with nothing rounded between."""

    @abstractmethod
    def new_keys(self, inputs: InputsT) -> Tensor:
        """[num_tokens, ...]: what the new tokens' scores come from, or a part of it."""

    @abstractmethod
    def new_values(self, inputs: InputsT) -> Tensor:
        """[num_tokens, ...]: what the new tokens' values come from."""

    @abstractmethod
    def values(self, spec: SpecT, entries: Entries) -> Tensor:
        """The part of entries that values come from, to be changed in place."""

    @abstractmethod
    def make_noticed(self, spec: SpecT, inputs: InputsT, entries: Entries, place: int) -> None:
        """Changes an entry so that the first token's output becomes another."""

    @abstractmethod
    def look_for(self, spec: SpecT, inputs: InputsT, tokens: slice, entries: Entries, places: Sequence[int]) -> None:
        """Changes a row so that its queries give the keys at `places` together as much weight as all others.

        Of thousands of keys one alone weighs next to nothing, and could be missed unseen. `entries` are those of the
        context; places from there on are new tokens.
        """

    @abstractmethod
    def climbing(self, spec: SpecT, inputs: InputsT, entries: Entries, scores: Tensor) -> Entries:
        """Entries whose scores with the first token are about `scores` [num_entries]."""

    @abstractmethod
    def strided(self, inputs: InputsT, device: torch.device) -> Iterator[tuple[str, InputsT]]:
        """The same numbers on the device, lying in memory otherwise, and how."""
