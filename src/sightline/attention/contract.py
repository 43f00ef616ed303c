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
from typing import ClassVar, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.spec import AttentionSpec, Feature
from sightline.attention.workspace import Lane, Workspace
from sightline.cache.pools import GroupCache, Pool
from sightline.core.batch import Batch
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
    """The inputs of a layer with keys and values of its own; they lie as the queries may lie."""

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
        )


AttentionInputs: TypeAlias = SoftmaxQueries | LatentInputs
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
        in its own memory: one row per token, undefined for padding.
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
