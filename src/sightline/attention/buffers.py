"""Plan buffers: the memory that the plans of one lane fill, with an epoch that says when it was filled again.

    |-- group0[0] --|-- group0[1] --|-- group1[0] --|   free   |
    begin                                       taken      capacity

All parts of one step take from one block, one after the other, and the next plan in the lane starts at the beginning
again: a lane needs as much as its largest step, whatever other steps there were. The epoch moves with every plan, so
that an older plan finds out that its memory may hold something else.

Knows names, sizes and the lease that it grows. Does not know what a buffer is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sightline.attention.workspace import ElasticLease, poison_

_ALIGNMENT = 256
"""Bytes: every buffer begins where any kernel can read it in its widest words."""
_FIRST_BYTES = 1 << 18
"""What a lane begins with, so that small steps never move it."""
_GROWTH = 4
"""A block that grows gets a quarter more than was needed: contexts that grow token by token move it now and then."""


class PlanMemory:
    """The plan buffers of one lane."""

    def __init__(self, lease: ElasticLease, *, poison: bool = False) -> None:
        """`poison` fills what is taken with what shows when it is read before it is filled."""
        self._lease = lease
        self._poison = poison
        self._block = lease.resize(0, min(_FIRST_BYTES, lease.room_bytes // 4))
        self._used = 0
        """Bytes taken since `begin`, also of what had no room in the block."""
        self._views: dict[str, Tensor] = {}
        self.epoch = 0

    @property
    def has_overflowed(self) -> bool:
        """True if the plan found no room for all that it took: it lies elsewhere, and the next one will not."""
        return self._used > self._block.numel()

    def begin(self) -> None:
        """Starts a plan: everything that was taken before is lost. What had no room the last time has room now."""
        if self.has_overflowed:
            self._block = self._lease.resize(self._used, self._used + self._used // _GROWTH)
        self._used = 0
        self._views = {}
        self.epoch += 1

    def part(self, name: str) -> PlanBuffers:
        """What one part of a plan takes from; its buffers' names begin with `name`."""
        return PlanBuffers(self, name)

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if name in self._views:
            raise ValueError(f"buffer {name!r} was taken twice in one plan; give each use its own name")
        size = torch.Size(shape)
        start, num_bytes = self._used, size.numel() * dtype.itemsize
        used = start + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if used <= self._block.numel():
            memory = self._block[start : start + num_bytes]
        else:
            # This plan's own, and gone with it: the block cannot move while the plan's other buffers lie in it.
            memory = self._lease.beside(num_bytes, used)
        self._used = used
        view = self._views[name] = memory.view(dtype).view(size)
        if self._poison:
            poison_(view)
        return view

    def addresses(self) -> Mapping[str, int]:
        """Where each buffer of the last plan begins: the same for plans of the same sizes, once they had room."""
        return {name: view.data_ptr() for name, view in self._views.items()}

    def contents(self) -> Mapping[str, Tensor]:
        """What the last plan's buffers hold, by name."""
        return self._views


class PlanBuffers:
    """What a backend takes its plan's memory from."""

    def __init__(self, memory: PlanMemory, name: str) -> None:
        self._memory = memory
        self._name = name

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor to fill, contents undefined. It is the plan's until the next plan in the lane."""
        return self._memory.take(f"{self._name}.{name}", shape, dtype)
