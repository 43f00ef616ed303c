"""The contract between the engine and an attention backend. No optional hook, no inheritance between backends.

    Batch ── Planner ──▶ AttentionBackend.plan (host) ──▶ AttentionPlan.prepare (device, once a step)
                                                          AttentionPlan.run     (device, once a layer)

A backend is built once per layer group with everything that it will ever need (`BackendContext`). A plan owns the
cache write as well as the read, under one `CachePolicy`.
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
from sightline.cache.pools import GroupCache
from sightline.core.batch import Batch

InputsT = TypeVar("InputsT")
SpecT = TypeVar("SpecT", bound=AttentionSpec)

Lse: TypeAlias = Tensor
"""[num_tokens, num_q_heads] fp32, natural logarithm; -inf where a query saw nothing."""


class CachePolicy(Enum):
    """The law: every slot that a plan reads was committed before the step, or is written by that plan."""

    PAGED = "paged"
    """Writes the new entries, reads them and the context."""
    TRANSIENT = "transient"
    """Touches no pool: the new entries are all there is, and nothing keeps them."""


@dataclass(frozen=True)
class Limits:
    """The largest step that a backend will be asked to plan."""

    max_rows: int
    max_step_tokens: int
    max_seq_len: int
    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class BackendContext(Generic[SpecT]):
    """Everything that a backend may need, complete before it is built."""

    group: str
    spec: SpecT
    cache: GroupCache
    workspace: Workspace
    limits: Limits
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class StepView:
    """What a backend sees of a step, or of the part of a step that it serves."""

    batch: Batch
    policy: CachePolicy
    lane: Lane
    needs: frozenset[Feature]
    """What this step asks for beyond the spec: LSE, non-causal or tree masks."""


@dataclass(frozen=True, eq=False)
class SoftmaxInputs:
    """One layer's inputs, to be read only. Padding tokens come last, belong to no row and may hold anything.

    A head is one run of numbers; tokens and heads may lie at any distance, as in the parts of one projection.
    """

    q: Tensor
    """[num_tokens, num_q_heads, head_dim]."""
    k: Tensor
    """[num_tokens, num_kv_heads, head_dim]."""
    v: Tensor
    """[num_tokens, num_kv_heads, head_dim]."""
    sinks: Tensor | None
    """[num_q_heads] exactly where the spec has sinks."""

    def part(self, tokens: slice) -> SoftmaxInputs:
        """Those of some tokens, in the same memory."""
        return SoftmaxInputs(self.q[tokens], self.k[tokens], self.v[tokens], self.sinks)


@dataclass(frozen=True, eq=False)
class LatentInputs:
    """One layer's inputs, to be read only. Padding tokens come last, belong to no row and may hold anything.

    Queries and keys are rotated, and the latent is normalised: an entry is cached as it stands here. A head, a latent
    and a rope key are each one run of numbers; tokens and heads may lie at any distance.
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
    """[num_q_heads, nope_dim, latent_dim]: a head's key is key_up @ latent. A weight: nothing of a step writes it, and
    it may be read before what was launched earlier has ended."""
    value_up: Tensor
    """[num_q_heads, value_dim, latent_dim]: a head's value is value_up @ latent. A weight, as `key_up`."""

    def whole_queries(self) -> Tensor | None:
        """[num_tokens, num_q_heads, nope_dim + rope_dim], contiguous, where both parts lie in one tensor like that."""
        nope, rope = self.q_nope, self.q_rope
        tokens, heads, nope_dim = nope.shape
        size = nope_dim + rope.shape[2]
        strides = (heads * size, size, 1)
        follows = rope.data_ptr() == nope.data_ptr() + nope_dim * nope.element_size()
        is_one = follows and nope.stride() == rope.stride() == strides
        return nope.as_strided((tokens, heads, size), strides) if is_one else None

    def part(self, tokens: slice) -> LatentInputs:
        """Those of some tokens, in the same memory."""
        return replace(
            self,
            q_nope=self.q_nope[tokens],
            q_rope=self.q_rope[tokens],
            latent=self.latent[tokens],
            k_rope=self.k_rope[tokens],
        )


AttentionInputs: TypeAlias = SoftmaxInputs | LatentInputs
"""Those of the kind of spec that the layer has."""


class AttentionPlan(ABC, Generic[InputsT]):
    """One step of one group, decided."""

    @abstractmethod
    def prepare(self) -> None:
        """Device work that all layers share; once a step, before the first layer."""

    @abstractmethod
    def run(self, layer: int, inputs: InputsT, out: Tensor) -> Lse | None:
        """Writes the cache as the policy says, and `out` [num_tokens, num_q_heads, out_dim]; `layer` is the group's.

        `out` is contiguous; of padding tokens it is left as it is. Returns the LSE exactly where the step needs it, in
        memory of its own: one row for each token, padding included, whose values are undefined.
        """


class AttentionBackend(ABC, Generic[SpecT, InputsT]):
    """Serves one layer group of one kind of spec."""

    capabilities: ClassVar[tuple[Capability, ...]]

    @abstractmethod
    def __init__(self, context: BackendContext[SpecT]) -> None:
        """Takes every lease that any plan may need: the workspace is sealed before the first plan."""

    @abstractmethod
    def plan(self, step: StepView, buffers: PlanBuffers) -> AttentionPlan[InputsT]:
        """Host work only. Everything that the plan derives lies in `buffers` or in the plan."""
