"""Plan buffers: the memory that the plans of one lane fill, with an epoch that changes whenever it is refilled.

    |-- group0[0] --|-- group0[1] --|-- group1[0] --|   free   |
    begin                                       taken      capacity

All parts of one step take from one block, one after the other, and the next plan in the lane starts at the beginning
again: a lane needs as much as its largest step. Each step of a rollout has a block of its own. The epoch advances with
every plan, so that an older plan can tell that its memory may have been overwritten.

Knows names, sizes and the lease that it grows. Does not know what a buffer is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sightline.attention.streams import InOrder, StreamMark
from sightline.attention.workspace import ElasticLease, poison_
from sightline.core.errors import UncapturedPlanError

_ALIGNMENT = 256
"""Alignment of every buffer in bytes, enough for the widest loads of any kernel."""
_FIRST_BYTES = 1 << 18
"""Initial size of a lane's block, so that small steps never move it."""
_GROWTH = 4
"""A block grows by a quarter more than needed, so that contexts growing token by token rarely move it."""


class PlanMemory:
    """The plan buffers of one lane, or a set of them that a rollout leases."""

    def __init__(self, lease: ElasticLease, mark: StreamMark | None = None, *, poison: bool = False) -> None:
        """`poison` fills each buffer with values that show up in results if they are read before being written."""
        self.mark: StreamMark = InOrder() if mark is None else mark
        """Behind the last work that filled or read the buffers."""
        self._lease = lease
        self._poison = poison
        self._block = lease.resize(0, min(_FIRST_BYTES, lease.room_bytes // 4))
        self._used = 0
        """Bytes taken since `begin`, including buffers that did not fit the block."""
        self._views: dict[str, Tensor] = {}
        self._pinned: Mapping[str, int] | None = None
        """Addresses that a captured graph reads; None if there is none."""
        self.epoch = 0

    @property
    def has_overflowed(self) -> bool:
        """True if some of the plan's buffers did not fit the block. They are allocated elsewhere; the next plan will
        fit."""
        return self._used > self._block.numel()

    def begin(self) -> None:
        """Starts a plan and invalidates all earlier buffers. Grows the block if the last plan overflowed."""
        if self.has_overflowed:
            self._block = self._lease.resize(self._used, self._used + self._used // _GROWTH)
        self._used = 0
        self._views = {}
        self.epoch += 1

    def part(self, name: str) -> PlanBuffers:
        """The buffers of one part of a plan; their names begin with `name`."""
        return PlanBuffers(self, name)

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if name in self._views:
            raise ValueError(f"buffer {name!r} was taken twice in one plan; give each use its own name")
        size = torch.Size(shape)
        start, num_bytes = self._used, size.numel() * dtype.itemsize
        used = start + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if used <= self._block.numel():
            memory = self._block[start : start + num_bytes]
        elif self._pinned is not None:
            raise UncapturedPlanError(
                f"expected plan buffers of at most {self._block.numel():,} bytes, as a graph was captured with, got "
                f"{used:,} up to {name}; run the step eagerly, and declare no graph level for a backend that needs more"
            )
        else:
            # Allocated for this plan only: the block cannot move while the plan's other buffers are in it.
            memory = self._lease.beside(num_bytes, used)
        self._used = used
        view = self._views[name] = memory.view(dtype).view(size)
        if self._poison:
            poison_(view)
        return view

    def addresses(self) -> Mapping[str, int]:
        """Address of each buffer of the last plan: equal for plans of equal sizes, once the block is large enough."""
        return {name: view.data_ptr() for name, view in self._views.items()}

    def pin(self) -> None:
        """Fixes the addresses of the last plan's buffers, because a captured graph reads them."""
        self._pinned = self.addresses()

    def require_pinned(self) -> None:
        """Raises `UncapturedPlanError` if the last plan's buffers are not where a captured graph reads them."""
        if self._pinned is None or (found := self.addresses()) == self._pinned:
            return
        moved = sorted({name for name, _ in self._pinned.items() ^ found.items()})
        raise UncapturedPlanError(
            f"expected the plan buffers of a captured graph at their captured addresses, got others for "
            f"{', '.join(moved[:3])}; its backend must take the same buffers in every plan of a step of these sizes"
        )

    def contents(self) -> Mapping[str, Tensor]:
        """The last plan's buffers, by name."""
        return self._views


class PlanBuffers:
    """Allocates the buffers of a backend's plan."""

    def __init__(self, memory: PlanMemory, name: str) -> None:
        self._memory = memory
        self._name = name

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialized tensor that is valid until the next plan in the lane."""
        return self._memory.take(f"{self._name}.{name}", shape, dtype)
