"""Memory for a step's activations: leased once, viewed in each step's shape, shared by all layers.

    Activations (a lane's leases, at the largest step) ──shaped──▶ Scratch (one number of tokens)
                                                                      └─ of(Kind, sizes): a layer's buffers

A layer asks for its buffers by kind and sizes. Layers that ask for the same get the same memory, so a buffer's contents
do not survive its layer. The scratch also hands out the operations that the layers name. Does not know what the buffers
hold.

A buffer has the shape [num_tokens, features]. Its memory is feature-major if products of so many rows are faster that
way. A product writes its output in whatever layout the buffer has, so no layer has to know.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from sightline.attention.workspace import Lane, Workspace
from sightline.layers.operations import Operations

OWNER = "activations"
"""The owner's name in the memory ledger."""


def prefers_feature_major(num_rows: int) -> bool:
    """True if W x is faster than x W^T: for a medium batch of decoding rows, not for a few rows or a prefill.

    Measured over all products of a small decoder (docs/benchmarks.md): 1.2 times as fast at 8 and 16 rows, 1.4 at 32,
    equal at 48, slower at 2 to 6 and at 64.
    """
    return 8 <= num_rows <= 48


def empty_rows(num_rows: int, features: int, like: Tensor, *, turns: bool) -> Tensor:
    """An empty [num_rows, features] with the dtype and device of `like`; `turns` as in `Projection`."""
    if turns and prefers_feature_major(num_rows):
        return like.new_empty((features, num_rows)).t()
    return like.new_empty((num_rows, features))


class BufferKind(Protocol):
    """The buffers of one kind of layer, created from a scratch and the layer's sizes."""

    def __init__(self, scratch: Scratch, *sizes: int) -> None: ...


KindT = TypeVar("KindT", bound=BufferKind)


class Activations:
    """The leased memory of a lane, sized for the largest step, so that no step allocates."""

    def __init__(
        self,
        workspace: Workspace,
        lane: Lane,
        max_tokens: int,
        dtype: torch.dtype,
        operations: Operations,
        *,
        turns: bool,
        network: str = "",
        num_replicas: int = 1,
    ) -> None:
        """With `turns`, buffers are feature-major whenever `prefers_feature_major` says so.

        `network` is the name of the network, if another one has activations in the same workspace. `num_replicas` is
        the number of replicas whose rows some layers compute together.
        """
        self.num_replicas = num_replicas
        self.of_replicas = (
            self
            if num_replicas == 1
            else Activations(
                workspace,
                lane,
                num_replicas * max_tokens,
                dtype,
                operations,
                turns=turns,
                network=f"{network}replicas' ",
            )
        )
        """The memory for the rows of all replicas."""
        self.operations = operations
        self.turns = turns
        self.device = workspace.device
        self._workspace = workspace
        self._lane = lane
        self._owner = f"{network}{OWNER}"
        self.max_tokens = max_tokens
        self._dtype = dtype
        self._leases: dict[str, Tensor] = {}
        self._last = Scratch(self, max_tokens)

    def shaped(self, num_tokens: int) -> Scratch:
        """The scratch for a step of `num_tokens`. The contents of the previous step's scratch are lost."""
        if num_tokens > self.max_tokens:
            raise ValueError(f"expected at most {self.max_tokens} tokens in a step, got {num_tokens}")
        if self._last.num_tokens != num_tokens:
            self._last = Scratch(self, num_tokens)
        return self._last

    def memory(self, name: str, features: int, dtype: torch.dtype | None = None) -> Tensor:
        """The memory [max_tokens * features] for a name, in `dtype` or that of the activations.

        Every call with the same name and size returns the same memory. A name must always have the same dtype.
        """
        key = f"{name} {features}"
        if key not in self._leases:
            self._leases[key] = self._workspace.lease(
                self._owner, key, self._lane, (self.max_tokens * features,), dtype or self._dtype
            )
        return self._leases[key]


class Scratch:
    """The buffers of one step."""

    def __init__(self, activations: Activations, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.operations = activations.operations
        self._activations = activations
        self._kept: dict[Hashable, Any] = {}

    @property
    def of_replicas(self) -> Scratch:
        """The scratch for the rows of all replicas, which have as many tokens each."""
        activations = self._activations
        return activations.of_replicas.shaped(activations.num_replicas * self.num_tokens)

    def of(self, kind: type[KindT], *sizes: int) -> KindT:
        """The buffers of a kind of layer, created on first use."""
        key = (kind, sizes)
        kept: KindT | None = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = kind(self, *sizes)
        return kept

    def take(self, name: str, features: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised buffer [num_tokens, features] in the memory order that products prefer."""
        memory = self._activations.memory(name, features, dtype)[: self.num_tokens * features]
        if self._activations.turns and prefers_feature_major(self.num_tokens):
            return memory.view(features, self.num_tokens).t()
        return memory.view(self.num_tokens, features)

    def empty_rows(self, num_rows: int, features: int, like: Tensor, *, turns: bool) -> Tensor:
        """A new buffer [num_rows, features] for rows other than the step's tokens; `turns` as in `Projection`."""
        return empty_rows(num_rows, features, like, turns=turns and self._activations.turns)

    def take_rows(self, name: str, features: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised row-major buffer [num_tokens, features]."""
        memory = self._activations.memory(name, features, dtype)
        return memory[: self.num_tokens * features].view(self.num_tokens, features)
