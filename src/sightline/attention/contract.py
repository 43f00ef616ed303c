"""The contract between the engine and an attention backend. No optional hook, no inheritance between backends.

    Batch ── Planner ──▶ AttentionBackend.plan (host) ──▶ AttentionPlan.prepare (device, once a step)
                                                          AttentionPlan.run     (device, once a layer)

A backend is built once per layer group with everything that it will ever need (`BackendContext`). A plan owns both the
cache write and the read, under one `CachePolicy`, which the planner decides for each group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.compressed.inputs import CompressedIndexInputs, CompressedInputs
from sightline.attention.kinds import Feature
from sightline.attention.shared.tile_tokens import TileTokens
from sightline.attention.shared.tiles import RowSpan
from sightline.attention.spec import AttentionSpec
from sightline.attention.workspace import Lane, Workspace
from sightline.cache.pools import GroupCache, Pool
from sightline.cache.states import STATES
from sightline.core.batch import Batch
from sightline.core.errors import ConfigError, PlanError
from sightline.kernels.cpu.record import Launcher

InputsT = TypeVar("InputsT")
TakenT = TypeVar("TakenT", contravariant=True)
SpecT = TypeVar("SpecT", bound=AttentionSpec)

Lse: TypeAlias = Tensor
"""[num_tokens, num_q_heads] fp32, natural logarithm; -inf for a query that sees no key."""


class CachePolicy(Enum):
    """How a group's plan uses the cache.

    Every slot that a plan reads was committed or launched before the step, in stream order, or is written in that step:
    by the plan itself, or by the lender of a borrowed cache, whose layer runs earlier.
    """

    PAGED = "paged"
    """Writes the new entries, and reads them and the context."""
    TRANSIENT = "transient"
    """Touches no pool: reads only the new entries and does not keep them."""
    BORROWED = "borrowed"
    """Writes nothing, and reads another layer's entries: the context and, as far as masks show them, the new ones."""


@dataclass(frozen=True)
class StepLimits:
    """The largest step that a backend may be asked to plan."""

    max_rows: int
    max_step_tokens: int
    max_seq_len: int
    lanes: tuple[Lane, ...]
    max_rollout: int
    """Most steps of a draft that are planned at once; 0 if none is."""


class EntryTurn(ABC):
    """Tokens of a sparse step whose chosen entries are on the device at the same time."""

    tokens: TileTokens
    """The tokens, padding perhaps included."""

    @abstractmethod
    def spans(self) -> tuple[RowSpan, ...]:
        """The tokens by row, in the order of `tokens`, without padding. For steps whose lengths the host knows."""

    @abstractmethod
    def fetch(self, layer: int, chosen: Tensor) -> None:
        """Copies what these tokens chose to the device, if it is not there; in stream order, and without the host.

        `chosen` [num_tokens, top_k] int32 is that of all tokens of the step. What an earlier turn fetched may be gone.
        """

    @abstractmethod
    def slots(self, chosen: Tensor, part: slice) -> Tensor:
        """[part, top_k] int64: where the chosen entries of some of these tokens are, after `fetch`. Slots index
        the layer's plane or, if the plan reads the step, its new entries. `chosen` is that of all tokens of the step.

        Behind the last entry of a query its first is repeated, so that what is read there was written. Padding tokens
        have slots that exist.
        """


class EntryPlan(ABC):
    """A step's use of the entries of a group."""

    turns: tuple[EntryTurn, ...]
    """The tokens of a sparse step, in turns; empty if the step is not sparse."""
    reads_step: bool
    """True if the step has no cache: slots index its own tokens."""
    new_slots: Tensor | None
    """[num_tokens] int64: the slots of `plane` for the entries that tokens complete; None if nothing is kept. For
    backends that write these themselves, and call `keep` then."""

    @abstractmethod
    def prepare(self) -> None:
        """Device work before the first layer, once a step."""

    @abstractmethod
    def write(self, layer: int, new: Tensor) -> None:
        """Keeps the new entries [num_tokens, latent + rope], before any entry is fetched or read."""

    @abstractmethod
    def keep(self, layer: int) -> None:
        """Keeps the new entries that are at `new_slots`, before any entry is fetched or read."""

    @abstractmethod
    def plane(self, layer: int) -> Tensor:
        """[num_slots, entry], as stored: what the slots of turns index, if the step has a cache."""

    @abstractmethod
    def gather(self, layer: int, slots: Tensor, out: Tensor) -> None:
        """Fills `out` [n, latent + rope], in the compute dtype, with the entries at `slots` [n] of `plane`."""


class EntryCounts(NamedTuple):
    """How many entries of contexts in host memory attention has read."""

    chosen: int = 0
    copied: int = 0
    """Entries among `chosen` that were not hot, and were copied from the host."""


class EntryCoordinator(ABC):
    """Knows where a group's entries are: all on the device, or most of them in host memory.

    Made before the backends that need it, from the group's cache.
    """

    cache: GroupCache

    @abstractmethod
    def plan(self, step: StepView, buffers: PlanBuffers) -> EntryPlan:
        """Plans how a step of a group reads and writes its entries. Derived state is kept in the plan and in
        `buffers`."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The device memory that it takes beside the pools."""

    @abstractmethod
    def counts(self) -> EntryCounts:
        """Returns the counts so far. Does not wait for the device, so the last steps may be missing."""


@dataclass(frozen=True)
class BackendContext(Generic[SpecT]):
    """Everything that a backend needs, complete before it is built."""

    group: str
    spec: SpecT
    cache: GroupCache
    """The group's pools; those of the lender if the group borrows."""
    workspace: Workspace
    limits: StepLimits
    dtype: torch.dtype
    device: torch.device
    launcher: Launcher
    """Runs the kernels of CPU backends."""
    coordinator: EntryCoordinator
    """Plans where a step reads entries and writes new ones. Made for the same cache."""

    def __post_init__(self) -> None:
        if self.coordinator.cache is not self.cache:
            raise ConfigError(
                f"expected the coordinator of {self.group}'s own cache, got that of {self.coordinator.cache.group}; "
                "make the coordinator from the cache that the backend gets"
            )


class StateSlots(NamedTuple):
    """Where the recurrent states of a step are. No slot is read and written in one step, except slot 0.

    Slot 0 is the empty state: reading it gives zeros, and a token with write slot 0 keeps no state.
    """

    read_slots: Tensor
    """[num_rows] int64: the state behind each row's context."""
    write_slots: Tensor
    """[num_tokens] int64: where the state behind each new token is kept. Never 0 for the last token of a row."""
    kept_host: tuple[int, ...]
    """[num_tokens]: `write_slots` on the host."""


@dataclass(frozen=True)
class StepView:
    """A step, or part of a step, as a backend sees it."""

    batch: Batch
    policy: CachePolicy
    lane: Lane
    needs: frozenset[Feature]
    """Features that this step needs beyond the spec: LSE, non-causal or tree masks, a shared cache."""

    @property
    def is_transient(self) -> bool:
        return self.policy is CachePolicy.TRANSIENT

    @property
    def is_borrowed(self) -> bool:
        return self.policy is CachePolicy.BORROWED

    @property
    def needs_lse(self) -> bool:
        return Feature.LSE in self.needs

    @property
    def is_sparse(self) -> bool:
        """True if some query may see more entries than the group's layers read. Otherwise attention is that of a dense
        layer, and indexers keep keys without choosing any.

        The planner decides it once, for all groups that read or make the same choice.
        """
        return Feature.SPARSE in self.needs

    @property
    def states(self) -> StateSlots | None:
        """The states that a group reads and writes; None if rows begin with an empty one and none is kept."""
        if self.policy is not CachePolicy.PAGED:
            return None
        rows = self.batch.pools[STATES]
        if rows.read_slots is None:
            raise PlanError("expected a batch that names the states of its rows, got one of a model without states")
        return StateSlots(rows.read_slots, rows.write_slots, rows.kept)

    def write_slots(self, pool: Pool) -> Tensor | None:
        """[num_tokens] int64: where the new entries go in the pool; None if the plan writes nothing."""
        return self.batch.pools[pool.key].write_slots if self.policy is CachePolicy.PAGED else None


@dataclass(frozen=True, eq=False, kw_only=True)
class SoftmaxQueries:
    """The inputs of a layer that borrows its keys and values, read-only.

    Padding tokens come last, belong to no row and may hold anything. Each head is contiguous; the strides of tokens and
    heads are arbitrary, as in slices of one projection.
    """

    q: Tensor
    """[num_tokens, num_q_heads, head_dim]."""
    sinks: Tensor | None
    """[num_q_heads] if the spec has sinks, otherwise None."""

    def part(self, tokens: slice) -> SoftmaxQueries:
        """A view of the inputs for a slice of tokens."""
        return SoftmaxQueries(q=self.q[tokens], sinks=self.sinks)


@dataclass(frozen=True, eq=False, kw_only=True)
class SoftmaxInputs(SoftmaxQueries):
    """The inputs of a layer with keys and values of its own, which may have the same strides as queries."""

    k: Tensor
    """[num_tokens, num_kv_heads, head_dim]."""
    v: Tensor
    """[num_tokens, num_kv_heads, head_dim]."""

    def part(self, tokens: slice) -> SoftmaxInputs:
        return SoftmaxInputs(q=self.q[tokens], k=self.k[tokens], v=self.v[tokens], sinks=self.sinks)


@dataclass(frozen=True, eq=False)
class LatentInputs:
    """One layer's inputs, read-only. Padding tokens come last, belong to no row and may hold anything.

    Queries and keys are rotated and the latent is normalised, ready to be cached. Each head, latent and rope key is
    contiguous; the strides of tokens and heads are arbitrary.
    """

    q_nope: Tensor
    """[num_tokens, num_q_heads, nope_dim]."""
    q_rope: Tensor
    """[num_tokens, num_q_heads, rope_dim]."""
    latent: Tensor
    """[num_tokens, latent_dim]."""
    k_rope: Tensor
    """[num_tokens, rope_dim]."""
    key_up: Tensor
    """[num_q_heads, nope_dim, latent_dim]: a head's key is key_up @ latent. A weight: no step writes it, so it may be
    read before earlier launches have finished."""
    value_up: Tensor
    """[num_q_heads, value_dim, latent_dim]: a head's value is value_up @ latent. A weight, like `key_up`."""
    chosen: Tensor | None = None
    """[num_tokens, top_k] int32 if the step is sparse: the places in its row (the context, then the new tokens) of the
    entries that each query attends to, in increasing order, -1 behind the last. There are min(top_k, as many as the
    query sees) of them."""

    def whole_queries(self) -> Tensor | None:
        """[num_tokens, num_q_heads, nope_dim + rope_dim], contiguous, if both parts are views of such a tensor; else
        None."""
        nope, rope = self.q_nope, self.q_rope
        tokens, heads, nope_dim = nope.shape
        size = nope_dim + rope.shape[2]
        strides = (heads * size, size, 1)
        follows = rope.data_ptr() == nope.data_ptr() + nope_dim * nope.element_size()
        is_one = follows and nope.stride() == rope.stride() == strides
        return nope.as_strided((tokens, heads, size), strides) if is_one else None

    def part(self, tokens: slice) -> LatentInputs:
        """A view of the inputs for a slice of tokens."""
        return replace(
            self,
            q_nope=self.q_nope[tokens],
            q_rope=self.q_rope[tokens],
            latent=self.latent[tokens],
            k_rope=self.k_rope[tokens],
            chosen=None if self.chosen is None else self.chosen[tokens],
        )


@dataclass(frozen=True, eq=False)
class IndexInputs:
    """The inputs of one layer's indexer, read-only; see `IndexSpec`. Padding tokens come last and may hold anything.

    Queries and keys are rotated and the key is normalised, ready to be cached. Each head and key is contiguous; the
    strides of tokens and heads are arbitrary.
    """

    q: Tensor
    """[num_tokens, num_q_heads, head_dim]."""
    key: Tensor
    """[num_tokens, head_dim]."""
    weights: Tensor
    """[num_tokens, num_q_heads]: how much each head counts, of either sign. A score that is NaN counts as the
    highest."""

    def part(self, tokens: slice) -> IndexInputs:
        """A view of the inputs for a slice of tokens."""
        return IndexInputs(self.q[tokens], self.key[tokens], self.weights[tokens])


class ConvWeights(NamedTuple):
    """The weights of a causal convolution of every channel on its own."""

    weight: Tensor
    """[channels, width] in the model's dtype; the last column is for the current token."""
    bias: Tensor | None
    """[channels], or None."""


@dataclass(frozen=True, eq=False)
class RecurrentInputs:
    """One layer's inputs, read-only; see `RecurrentSpec`. Padding tokens come last and may hold anything.

    The features of a token are contiguous; the strides of tokens are arbitrary, and 0 for a number that all share.
    """

    mixed: Tensor
    """[num_tokens, channels]: queries and keys of all key heads, then values of all heads, before the convolution."""
    decay: Tensor
    """[num_tokens, num_heads], or [num_tokens, num_heads, key_dim] with decay per channel: fp32, logarithm of what is
    left of the state, at most 0."""
    beta: Tensor
    """[num_tokens, num_heads] fp32: how much of a value is stored."""
    conv: ConvWeights | None
    """None if the layer has no convolution."""
    skip: Tensor | None
    """[num_heads] fp32 if the spec has a skip, otherwise None."""

    def part(self, tokens: slice) -> RecurrentInputs:
        """A view of the inputs for a slice of tokens."""
        return replace(self, mixed=self.mixed[tokens], decay=self.decay[tokens], beta=self.beta[tokens])


@dataclass(frozen=True, eq=False)
class ConvolutionInputs:
    """One layer's inputs, read-only. Padding tokens come last and may hold anything."""

    x: Tensor
    """[num_tokens, channels]; the channels of a token are contiguous."""
    conv: ConvWeights

    def part(self, tokens: slice) -> ConvolutionInputs:
        """A view of the inputs for a slice of tokens."""
        return replace(self, x=self.x[tokens])


ChoiceInputs: TypeAlias = IndexInputs | CompressedIndexInputs
"""The inputs of one layer's indexer."""
AttentionInputs: TypeAlias = (
    SoftmaxQueries | LatentInputs | RecurrentInputs | ConvolutionInputs | CompressedInputs | ChoiceInputs
)
"""The inputs for one kind of spec. Those of a layer with its own softmax entries are `SoftmaxInputs`."""


class AttentionPlan(ABC, Generic[TakenT]):
    """A planned step of one group.

    Contravariant in what it takes: a `BORROWED` plan, which takes queries alone, is also a plan that is given more.
    """

    @abstractmethod
    def prepare(self) -> None:
        """Runs the device work that all layers share; called once per step, before the first layer."""

    @abstractmethod
    def run(self, layer: int, inputs: TakenT, out: Tensor) -> Lse | None:
        """Writes the cache under the policy, and `out` [num_tokens, num_q_heads, out_dim]; `layer` is the index in the
        pools of the group's cache.

        `out` is contiguous and keeps its contents for padding tokens. Returns the LSE if and only if the step needs it,
        in its own memory: one row per token, undefined for padding. An indexer writes its choice to `out` [num_tokens,
        top_k] int32, as the inputs of its readers say (`LatentInputs.chosen`, `CompressedInputs.chosen`), and nothing
        there if the step is not sparse. A score that is NaN counts as the highest.
        """


class AttentionBackend(ABC, Generic[SpecT, InputsT]):
    """Serves one layer group of one kind of spec."""

    capabilities: ClassVar[tuple[Capability, ...]]

    @abstractmethod
    def __init__(self, context: BackendContext[SpecT]) -> None:
        """Takes every lease that any plan may need; the workspace is sealed before the first plan."""

    @abstractmethod
    def plan(self, step: StepView, buffers: PlanBuffers) -> AttentionPlan[InputsT]:
        """Plans a step on the host. All derived state is kept in `buffers` or in the plan."""
