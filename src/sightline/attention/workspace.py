"""Scratch memory: one arena of named leases, taken when backends are built, counted in a ledger.

A lease's address never changes, and once the arena is sealed there are no new ones. Does not know what a lease is
used for.
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


@dataclass(frozen=True)
class LeaseEntry:
    """One line of the memory ledger."""

    owner: str
    name: str
    lane: Lane
    num_bytes: int


def poison_(tensor: Tensor) -> None:
    """Fills memory with what shows in any result that it reaches: NaN, or the number 1 in integers.

    Integers are indices as a rule, and 1 lies within any bounds: a device would not survive one that does not.
    """
    tensor.fill_(torch.nan if tensor.is_floating_point() else 1)


class Workspace:
    """Hands out leases until `limit_bytes` is reached."""

    def __init__(self, device: torch.device, limit_bytes: int, *, poison: bool = False) -> None:
        """`poison` fills leases that do not ask for zeros with what shows when it is read before it is written."""
        self._device = device
        self._limit_bytes = limit_bytes
        self._poison = poison
        self._sealed = False
        self._leases: dict[tuple[str, str, Lane], Tensor] = {}

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
        """A tensor that belongs to (`owner`, `name`, `lane`) for good. `zeroed` says that it starts as zeros."""
        key = (owner, name, lane)
        if self._sealed:
            raise PlanError(
                f"expected every lease to be taken before the first step, got {owner}.{name} during one; "
                "take it in the constructor, at the largest size of any step"
            )
        if key in self._leases:
            raise ValueError(f"lease {key} was taken already; keep the tensor that it returned")
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if self.num_bytes + num_bytes > self._limit_bytes:
            raise ConfigError(
                f"expected at most {self._limit_bytes:,} bytes of scratch memory, got {self.num_bytes:,} and "
                f"{num_bytes:,} more for {owner}.{name}; lower max_model_len or max_num_batched_tokens"
            )
        allocate = torch.zeros if zeroed else torch.empty
        lease = self._leases[key] = allocate(tuple(shape), dtype=dtype, device=self._device)
        if self._poison and not zeroed:
            poison_(lease)
        return lease

    def seal(self) -> None:
        """Everything is built: whoever asks for more from here on has forgotten something."""
        self._sealed = True

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._leases.values())

    def of_other_lanes(self, lane: Lane) -> dict[str, Tensor]:
        """The leases that a step of `lane` has no business with, by name."""
        return {
            f"{owner}.{name} of lane {other}": tensor
            for (owner, name, other), tensor in self._leases.items()
            if other != lane
        }

    def ledger(self) -> tuple[LeaseEntry, ...]:
        """Every lease, in the order taken."""
        return tuple(
            LeaseEntry(owner, name, lane, tensor.nbytes) for (owner, name, lane), tensor in self._leases.items()
        )
