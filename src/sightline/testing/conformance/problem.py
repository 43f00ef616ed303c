"""What the kit needs to know about a kind of attention: its specs, inputs, what is kept, and the oracle's answer.

    spec ─▶ random inputs ─┬▶ entries of tokens, as they are cached ─▶ the oracle's answer, or its choice, for a row
                           ├▶ a state behind a context ─▶ the oracle's answer, and the states behind new tokens
                           └─ changes that checks make to inputs: equal weights, climbing scores, equal values

`Problem` is what all kinds have, `PagedProblem` what layers have that keep entries per token, `EntryProblem` those that
attend to them, and `StateProblem` what layers have that keep a state per sequence. Rigs, steps and checks use only
these contracts. Knows no backend, no pages and no slots.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sightline.attention.capability import ANY, Wildcard
from sightline.attention.contract import InputsT, SpecT
from sightline.attention.kinds import Feature, SpecKind
from sightline.cache.spec import PlaneSpec

Entries: TypeAlias = tuple[Tensor, ...]
"""Cache entries of some tokens: one tensor [num_entries, ...] for each plane of the pool, on the host."""
State: TypeAlias = tuple[Tensor, ...]
"""The state of one sequence in one layer: one tensor for each plane of the state pool, fp32, on the host."""
ExpandedDims: TypeAlias = frozenset[tuple[int, int]] | Wildcard
"""The (key, value) dimensions of a head that a row declares."""
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
    more_group_sizes: ClassVar[tuple[int, ...]] = ()
    """Group sizes to try besides the usual ones if a row serves any."""
    roundings: ClassVar[int]
    """How often numbers are rounded to the step's dtype before they are an output; all but the last affect scores."""
    half_slack: ClassVar[float]
    """Factor on the tolerance in half precision."""

    @abstractmethod
    def plain(self, head_dims: Sequence[int], group_sizes: Sequence[int], expanded_dims: ExpandedDims = ANY) -> SpecT:
        """Returns the plainest spec for a row that serves these; with several heads if possible."""

    @abstractmethod
    def spec(self, head_dim: int, group_size: int, kv_heads: int, expanded_dims: ExpandedDims = ANY) -> SpecT:
        """Returns a spec of that geometry with the usual scale. Kinds with one key head ignore `kv_heads`."""

    def having(self, spec: SpecT, features: frozenset[Feature]) -> SpecT:
        """Returns the spec with the features that a row serves nothing without; only recurrent layers have such."""
        del features
        return spec

    def fits_page(self, page_size: int) -> bool:
        """True if the plainest spec can have pages of that size; all sizes but for entries of several tokens."""
        del page_size
        return True

    @abstractmethod
    def another(self, spec: SpecT) -> SpecT:
        """Returns a spec of the same geometry that computes something else."""

    @abstractmethod
    def describe(self, spec: SpecT) -> str:
        """Describes a spec in one line."""

    @abstractmethod
    def random_inputs(self, spec: SpecT, num_tokens: int, normal: Normal) -> InputsT:
        """Returns inputs for one layer."""

    @abstractmethod
    def strided(self, inputs: InputsT, device: torch.device) -> Iterator[tuple[str, InputsT]]:
        """Yields inputs with the same numbers on the device but other strides, each with a description."""


class PagedProblem(Problem[SpecT, InputsT]):
    """Layers that keep an entry for each token, in pages."""

    @abstractmethod
    def entries(self, inputs: InputsT) -> Entries:
        """Returns the cache entries of the inputs' tokens."""

    @abstractmethod
    def put_entries(self, spec: SpecT, inputs: InputsT, entries: Entries) -> None:
        """Changes the inputs so that their tokens have these cache entries."""

    @abstractmethod
    def of_new_entries(self, inputs: InputsT) -> tuple[Tensor, ...]:
        """Returns the inputs from which the new tokens' entries come."""

    @abstractmethod
    def make_noticed(self, spec: SpecT, inputs: InputsT, entries: Entries, place: int) -> None:
        """Changes an entry so that the first token's output changes."""

    @abstractmethod
    def look_for(self, spec: SpecT, inputs: InputsT, tokens: slice, entries: Entries, places: Sequence[int]) -> None:
        """Changes a row so that what its queries find depends on each of the keys at `places`.

        Otherwise a single key among thousands would have next to no effect. `entries` are those of the context; places
        beyond them are new tokens.
        """


class EntryProblem(PagedProblem[SpecT, InputsT]):
    """Attention to an entry of each token."""

    query_names: ClassVar[tuple[str, ...]]
    """Names of the inputs that are multiplied with keys. If all of them are 0, all keys weigh the same. The last one is
    multiplied with cached entries as they are, with no rounding in between."""
    key_name: ClassVar[str]
    """The input from which the new tokens' scores come, or a part of them."""
    value_name: ClassVar[str]
    """The input from which the new tokens' values come."""

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

    def of_new_entries(self, inputs: InputsT) -> tuple[Tensor, ...]:
        return self.new_keys(inputs), self.new_values(inputs)

    @abstractmethod
    def values(self, spec: SpecT, entries: Entries) -> Tensor:
        """Returns a view of the part of entries from which values come."""

    @abstractmethod
    def climbing(self, spec: SpecT, inputs: InputsT, entries: Entries, scores: Tensor) -> Entries:
        """Returns entries whose scores with the first token are about `scores` [num_entries]."""


class StateAnswer(NamedTuple):
    """The oracle's answer for some tokens of a row."""

    out: Tensor
    """[num_tokens, num_q_heads, out_dim] fp32."""
    states: tuple[Tensor, ...]
    """For each plane of the state: [num_tokens, ...] fp32, behind each token."""


class StateProblem(Problem[SpecT, InputsT]):
    """Layers that keep a state for each sequence, which every token changes."""

    roundings: ClassVar[int] = 2
    """What a convolution gives, and outputs."""
    half_slack: ClassVar[float] = 2.0
    """Chunked forms multiply numbers of the step's dtype several times in a row."""

    def planes(self, spec: SpecT) -> tuple[PlaneSpec, ...]:
        """Returns the planes of a state, in the order of `State`."""
        return spec.states(1, torch.float32).planes

    def empty(self, spec: SpecT) -> State:
        """Returns the state before the first token."""
        return tuple(torch.zeros(plane.shape) for plane in self.planes(spec))

    @abstractmethod
    def random_state(self, spec: SpecT, normal: Normal) -> State:
        """Returns a state that tokens before the step could have left."""

    @abstractmethod
    def answer(self, spec: SpecT, inputs: InputsT, state: State) -> StateAnswer:
        """Returns the oracle's answer for consecutive tokens of one row, which begins with `state`."""

    @abstractmethod
    def with_features(self, spec: SpecT, features: Iterable[str], conv_width: int, *, unit_keys: bool) -> SpecT:
        """Returns the spec with these features, by name, and otherwise as it is."""
