"""Scratch memory: one arena of named leases, taken when backends are built, recorded in a ledger.

A lease's address never changes, and no lease can be taken once the arena is sealed. Only an elastic lease, which holds
a lane's plan buffers, grows: to what the largest step needs, within the same limit. Does not know what a lease is used
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

import torch
from torch import Tensor

from sightline.core.errors import ConfigError, PlanError

Lane = NewType("Lane", int)
"""A stream of steps with its own scratch memory and plan buffers."""
MAIN_LANE = Lane(0)
SECOND_LANE = Lane(1)


@dataclass(frozen=True)
class LeaseEntry:
    """One line of the memory ledger."""

    owner: str
    name: str
    lane: Lane
    num_bytes: int


def poison_(tensor: Tensor) -> None:
    """Fills memory with values that show up in any result they reach: NaN, or 1 for integers.

    Integers are usually indices, and 1 is within any bounds: an index out of bounds would crash the device.
    """
    tensor.fill_(torch.nan if tensor.is_floating_point() else 1)


class Workspace:
    """Hands out leases until `limit_bytes` is reached."""

    def __init__(self, device: torch.device, limit_bytes: int, *, poison: bool = False) -> None:
        """`poison` fills leases that are not zeroed with values that show up if they are read before being written."""
        self.device = device
        self._limit_bytes = limit_bytes
        self._poison = poison
        self._sealed = False
        self._leases: dict[tuple[str, str, Lane], Tensor] = {}
        self._elastic: dict[tuple[str, str, Lane], ElasticLease] = {}

    def lease(
        self,
        owner: str,
        name: str,
        lane: Lane,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        zeroed: bool = False,
    ) -> Tensor:
        """Returns a tensor that belongs to (`owner`, `name`, `lane`) permanently. `zeroed` fills it with zeros."""
        key = self._new_key(owner, name, lane)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if self.num_bytes + num_bytes > self._limit_bytes:
            raise ConfigError(
                f"expected at most {self._limit_bytes:,} bytes of scratch memory, got {self.num_bytes:,} and "
                f"{num_bytes:,} more for {owner}.{name}; lower max_model_len, max_num_seqs or "
                "max_num_batched_tokens"
            )
        allocate = torch.zeros if zeroed else torch.empty
        lease = self._leases[key] = allocate(tuple(shape), dtype=dtype, device=self.device)
        if self._poison and not zeroed:
            poison_(lease)
        return lease

    def elastic(self, owner: str, name: str, lane: Lane) -> ElasticLease:
        """Returns a lease that may grow while steps are planned; it counts with its current size."""
        key = self._new_key(owner, name, lane)
        lease = self._elastic[key] = ElasticLease(self, f"{owner}.{name}", self.device)
        return lease

    def _new_key(self, owner: str, name: str, lane: Lane) -> tuple[str, str, Lane]:
        key = (owner, name, lane)
        if self._sealed:
            raise PlanError(
                f"expected every lease to be taken before the first step, got {owner}.{name} during one; "
                "take it in the constructor, at the largest size of any step"
            )
        if key in self._leases or key in self._elastic:
            raise ValueError(f"lease {key} was taken already; keep the tensor that it returned")
        return key

    @property
    def room_bytes(self) -> int:
        """Bytes left below the limit."""
        return self._limit_bytes - self.num_bytes

    def seal(self) -> None:
        """Forbids new leases, now that everything is built."""
        self._sealed = True

    @property
    def num_bytes(self) -> int:
        fixed = sum(tensor.nbytes for tensor in self._leases.values())
        return fixed + sum(lease.num_bytes for lease in self._elastic.values())

    def of_other_lanes(self, lane: Lane) -> dict[str, Tensor]:
        """The leases of other lanes, which a step of `lane` must not touch, by name."""
        return {
            f"{owner}.{name} of lane {other}": tensor
            for (owner, name, other), tensor in self._leases.items()
            if other != lane
        }

    def ledger(self) -> tuple[LeaseEntry, ...]:
        """Every lease in the order taken, then the elastic ones with their current sizes."""
        sizes = {key: tensor.nbytes for key, tensor in self._leases.items()}
        sizes |= {key: lease.num_bytes for key, lease in self._elastic.items()}
        return tuple(LeaseEntry(owner, name, lane, size) for (owner, name, lane), size in sizes.items())


class ElasticLease:
    """One resizable block of bytes with a single owner."""

    def __init__(self, workspace: Workspace, name: str, device: torch.device) -> None:
        self._workspace = workspace
        self._name = name
        self._device = device
        self.num_bytes = 0

    @property
    def room_bytes(self) -> int:
        """The maximum size of the lease."""
        return self.num_bytes + self._workspace.room_bytes

    def resize(self, least: int, wanted: int) -> Tensor:
        """Replaces the block by an uninitialized one [num_bytes] uint8: `wanted` bytes if there is room, `least` at
        minimum."""
        self._check_room(least)
        self.num_bytes = min(wanted, self.room_bytes)
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)

    def beside(self, num_bytes: int, needed_bytes: int) -> Tensor:
        """Allocates bytes outside the block, for a plan that did not fit it; `needed_bytes` is the plan's total
        so far."""
        self._check_room(needed_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _check_room(self, needed_bytes: int) -> None:
        """Raises `PlanError` if the lease may not grow to `needed_bytes`."""
        room = self.room_bytes
        if needed_bytes > room:
            raise PlanError(
                f"expected at most {room:,} bytes of {self._name}, which is left of the scratch memory, got a step "
                f"that needs {needed_bytes:,}; plan a smaller one, or lower max_num_batched_tokens or max_num_seqs"
            )
