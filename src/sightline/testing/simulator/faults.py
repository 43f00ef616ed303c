"""A virtual clock, and the faults that a simulation can inject.

Does not know when a fault is injected, nor what follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sightline.cache.pages import PageAllocator
from sightline.core.errors import DeviceFaultError, OutOfPages
from sightline.testing.simulator.scenario import RankLoss

TICK = 2.0**-10
"""Seconds. Every time is a whole number of half ticks, which a float represents exactly."""
STEP_TICKS = 8
"""Duration of a forward pass, plus one tick per token."""
LOGIT_TICKS = 4
"""Duration of a token's logits, if steps are limited in time."""
UNBEARABLE = "the simulated forward pass cannot bear one of its rows"
DEVICE_GONE = "the simulated device is gone"


class PlannedFault(Exception):  # noqa: N818 - the name is the condition
    """The error that a forward pass raises because the scenario says so."""


@dataclass
class VirtualClock:
    """A clock that only the simulation moves."""

    now: float = 0.0
    """Seconds since the simulation began."""

    def __call__(self) -> float:
        return self.now

    def tick(self, count: int = 1) -> None:
        self.now += count * TICK


@dataclass
class Faults:
    """The faults to inject next, and counts of those that were injected."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    logit_ticks: int = 0
    num_refusals: int = 0
    """How many of the next allocations to refuse."""
    fails_next: bool = False
    next_seconds: float = 0.0
    """Extra duration of the next forward pass."""
    rank_loss: RankLoss | None = None
    """How another rank is lost."""
    device_is_gone: bool = False
    device_was_lost: bool = False
    """True once a forward pass has raised because the device is gone."""
    num_refused: int = 0
    num_forwards: int = 0
    num_failed_forwards: int = 0

    def refuse(self) -> bool:
        """Returns True if this allocation is to fail."""
        if self.num_refusals == 0:
            return False
        self.num_refusals -= 1
        self.num_refused += 1
        return True

    def begin_forward(self, num_tokens: int, num_logits: int) -> None:
        """Moves the clock by the duration of a forward pass, and raises the injected fault if there is one."""
        self.num_forwards += 1
        self.clock.tick(STEP_TICKS + num_tokens + self.logit_ticks * num_logits)
        self.clock.now += self.next_seconds
        self.next_seconds = 0.0
        if self.device_is_gone:
            self.device_was_lost = True
            raise DeviceFaultError(DEVICE_GONE)
        if self.fails_next:
            self.fails_next = False
            self.fail("the simulated forward pass failed this once")

    def fail(self, message: str) -> None:
        """Counts and raises a fault of a forward pass."""
        self.num_failed_forwards += 1
        raise PlannedFault(message)


class FaultyAllocator(PageAllocator):
    """An allocator that refuses allocations on request, and exposes its state."""

    def __init__(self, num_pages: int, faults: Faults) -> None:
        super().__init__(num_pages)
        self._faults = faults

    def allocate(self, count: int) -> tuple[int, ...]:
        if count > 0 and self._faults.refuse():
            raise OutOfPages(f"expected {count} free pages, got none: the simulation refuses")
        return super().allocate(count)

    def state(self) -> tuple[list[int], list[int]]:
        """Returns copies of the reference count of each page and of the free list."""
        return list(self._owners), list(self._free)
