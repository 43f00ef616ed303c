"""Memory for a step's activations: leased once, shaped for each step, shared by all layers.

    Activations (a lane's leases, at the largest step) ──shaped──▶ Scratch (one number of tokens)
                                                                      └─ of(Kind, sizes): a layer's buffers

A layer asks for its buffers by kind and sizes, and layers that ask alike get the same memory: what one layer left there
means nothing to the next. Does not know what the buffers hold.

A buffer is [num_tokens, features] to whoever uses it. In memory it is feature after feature where so many rows are
multiplied faster that way: a product writes the order that its output has, so no layer has to know.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from sightline.attention.workspace import Lane, Workspace

OWNER = "activations"
"""In the memory ledger."""


def prefers_feature_major(num_rows: int) -> bool:
    """True where W x is faster than x W^T: a batch of decoding rows, but neither one of a few nor a prefill.

    Measured over all products of a small decoder (docs/benchmarks.md): 1.2 times as fast at 8 and 16 rows, 1.4 at 32,
    equal at 48, slower at 2 to 6 and at 64.
    """
    return 8 <= num_rows <= 48


def empty_rows(num_rows: int, features: int, like: Tensor, *, turns: bool) -> Tensor:
    """[num_rows, features] of `like`'s dtype and device, for a product that gains, or not, by being turned."""
    if turns and prefers_feature_major(num_rows):
        return like.new_empty((features, num_rows)).t()
    return like.new_empty((num_rows, features))


class BufferKind(Protocol):
    """The buffers of one kind of layer: made from a scratch and the layer's sizes."""

    def __init__(self, scratch: Scratch, *sizes: int) -> None: ...


KindT = TypeVar("KindT", bound=BufferKind)


class Activations:
    """A lane's leases. The largest step decides their size, so that no step allocates."""

    def __init__(
        self, workspace: Workspace, lane: Lane, max_tokens: int, dtype: torch.dtype, *, turns: bool = True
    ) -> None:
        """`turns` says that the products gain by feature after feature where `prefers_feature_major` says so."""
        self.turns = turns
        self._workspace = workspace
        self._lane = lane
        self.max_tokens = max_tokens
        self._dtype = dtype
        self._leases: dict[str, Tensor] = {}
        self._last = Scratch(self, max_tokens)

    def shaped(self, num_tokens: int) -> Scratch:
        """For a step of so many tokens. The scratch of the step before loses its contents."""
        if num_tokens > self.max_tokens:
            raise ValueError(f"expected at most {self.max_tokens} tokens in a step, got {num_tokens}")
        if self._last.num_tokens != num_tokens:
            self._last = Scratch(self, num_tokens)
        return self._last

    def memory(self, name: str, features: int, dtype: torch.dtype | None = None) -> Tensor:
        """[max_tokens * features], the same at every call, in `dtype` or that of the activations.

        A name has one dtype.
        """
        key = f"{name} {features}"
        if key not in self._leases:
            self._leases[key] = self._workspace.lease(
                OWNER, key, self._lane, (self.max_tokens * features,), dtype or self._dtype
            )
        return self._leases[key]


class Scratch:
    """One step's buffers."""

    def __init__(self, activations: Activations, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._activations = activations
        self._kept: dict[Hashable, Any] = {}

    def of(self, kind: type[KindT], *sizes: int) -> KindT:
        """The buffers of a kind of layer, made when first asked for."""
        key = (kind, sizes)
        kept: KindT | None = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = kind(self, *sizes)
        return kept

    def take(self, name: str, features: int, dtype: torch.dtype | None = None) -> Tensor:
        """[num_tokens, features], contents undefined, in the memory order that products prefer."""
        memory = self._activations.memory(name, features, dtype)[: self.num_tokens * features]
        if self._activations.turns and prefers_feature_major(self.num_tokens):
            return memory.view(features, self.num_tokens).t()
        return memory.view(self.num_tokens, features)

    def take_rows(self, name: str, features: int) -> Tensor:
        """[num_tokens, features], contents undefined, each token's features side by side."""
        return self._activations.memory(name, features)[: self.num_tokens * features].view(self.num_tokens, features)
