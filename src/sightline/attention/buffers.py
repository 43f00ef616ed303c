"""Plan buffers: the memory that a plan fills, with an epoch that says when it was filled again.

One set serves one group in one lane. Planning again in the same lane fills the same memory, and the epochs are
how an older plan finds out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sightline.attention.workspace import poison_


class PlanBuffers:
    """Named tensors that are reused from step to step and grow to the largest size asked for."""

    def __init__(self, device: torch.device, *, poison: bool = False) -> None:
        """`poison` fills what is taken with what shows when it is read before it is filled."""
        self._device = device
        self._poison = poison
        self._storage: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}
        self._epochs: dict[str, int] = {}
        self._filled: set[str] = set()

    def begin(self) -> None:
        """Starts a plan: the buffers taken from here on are the plan's."""
        self._filled = set()

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor to fill, contents undefined. Whoever took `name` before has lost it: its epoch moves on."""
        if name in self._filled:
            raise ValueError(f"buffer {name!r} was taken twice in one plan; give each use its own name")
        size = torch.Size(shape)
        storage = self._storage.get(name)
        if storage is None or storage.dtype != dtype:
            storage = self._storage[name] = torch.empty(size.numel(), dtype=dtype, device=self._device)
        elif storage.numel() < size.numel():
            # Doubling keeps a sequence that grows token by token from moving at every step.
            capacity = max(size.numel(), 2 * storage.numel())
            storage = self._storage[name] = torch.empty(capacity, dtype=dtype, device=self._device)
        self._epochs[name] = self._epochs.get(name, 0) + 1
        self._filled.add(name)
        view = self._views[name] = storage[: size.numel()].view(size)
        if self._poison:
            poison_(view)
        return view

    def addresses(self) -> Mapping[str, int]:
        """Where each buffer lies: the same from step to step, once the largest was planned."""
        return {name: storage.data_ptr() for name, storage in self._storage.items()}

    def stamp(self) -> Mapping[str, int]:
        """The epoch of each buffer that was taken since `begin`."""
        return {name: self._epochs[name] for name in sorted(self._filled)}

    def changed_since(self, stamp: Mapping[str, int]) -> tuple[str, ...]:
        """The buffers that were filled again since `stamp`."""
        return tuple([name for name, epoch in stamp.items() if self._epochs[name] != epoch])

    def contents(self, names: Sequence[str]) -> tuple[Tensor, ...]:
        """What the named buffers hold, for fingerprints."""
        return tuple(self._views[name] for name in names)
