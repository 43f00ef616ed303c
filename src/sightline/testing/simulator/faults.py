"""The weather: a clock that only the simulation moves, and the faults that it can ask for, at named points.

Does not know when anything happens, nor what it leads to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sightline.cache.pages import PageAllocator
from sightline.core.errors import DeviceFaultError, OutOfPages

TICK = 2.0**-10
"""Seconds. Every time is a whole number of half ticks, which a float holds exactly."""
STEP_TICKS = 8
"""What a forward pass costs, and a tick more for each of its tokens."""
UNBEARABLE = "the simulated forward pass cannot bear one of its rows"
DEVICE_GONE = "the simulated device is gone"


class PlannedFault(Exception):  # noqa: N818 - the name is the condition
    """What a forward pass raises because the scenario says so."""


@dataclass
class VirtualClock:
    """Seconds since the simulation began."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def tick(self, count: int = 1) -> None:
        self.now += count * TICK


@dataclass
class Faults:
    """What is to go wrong next, and how often it did."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    num_refusals: int = 0
    """Allocations still to be refused."""
    fails_next: bool = False
    next_seconds: float = 0.0
    """What the next forward pass takes beyond its usual time."""
    device_is_gone: bool = False
    device_was_lost: bool = False
    """A forward pass has met that."""
    num_refused: int = 0
    num_forwards: int = 0
    num_failed_forwards: int = 0

    def refuse(self) -> bool:
        """Whether the allocation at hand fails."""
        if self.num_refusals == 0:
            return False
        self.num_refusals -= 1
        self.num_refused += 1
        return True

    def begin_forward(self, num_tokens: int) -> None:
        """The time that a forward pass takes, and what it raises whoever is in it."""
        self.num_forwards += 1
        self.clock.tick(STEP_TICKS + num_tokens)
        self.clock.now += self.next_seconds
        self.next_seconds = 0.0
        if self.device_is_gone:
            self.device_was_lost = True
            raise DeviceFaultError(DEVICE_GONE)
        if self.fails_next:
            self.fails_next = False
            self.fail("the simulated forward pass failed this once")

    def fail(self, message: str) -> None:
        """Raises out of a forward pass."""
        self.num_failed_forwards += 1
        raise PlannedFault(message)


class FaultyAllocator(PageAllocator):
    """Refuses what it could give where the faults say so, and shows all its counts at once."""

    def __init__(self, num_pages: int, faults: Faults) -> None:
        super().__init__(num_pages)
        self._faults = faults

    def allocate(self, count: int) -> tuple[int, ...]:
        if count > 0 and self._faults.refuse():
            raise OutOfPages(f"expected {count} free pages, got none: the simulation refuses")
        return super().allocate(count)

    def state(self) -> tuple[list[int], list[int]]:
        """Copies of the reference counts by page, and of the free list."""
        return list(self._owners), list(self._free)
