"""Shares the event loop among clients, so that `/health` is answered soon however many ask at the same moment."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum

TURN_SECONDS = 0.002
"""Time for clients' work in one iteration of the event loop; work beyond it waits for a later iteration."""


class ExchangeStage(Enum):
    """How far a request is. Stages wait in separate lines, so that a crowd of new requests does not hold up answers."""

    BEGINS = "begins"
    GOES_ON = "goes on"


class LoopTurns:
    """Limits the time for clients' work in each turn, which is an iteration of the event loop.

    Clients call `take` before each piece of work of up to about a millisecond. Once the time of a turn is spent, they
    wait, and each following turn lets one of them go on: the callers and stages in rotation, and within one of them
    whoever has waited longest.
    """

    def __init__(self, seconds: float = TURN_SECONDS, clock: Callable[[], float] = time.perf_counter) -> None:
        self._seconds = seconds
        self._clock = clock
        self._ends_at: float | None = None
        """None if nobody has taken the present turn."""
        self._lines: OrderedDict[tuple[str, ExchangeStage], deque[asyncio.Future[None]]] = OrderedDict()
        """Who waits, by caller and stage. The line that had a turn longest ago comes first; no line is empty."""

    async def take(self, caller: str, stage: ExchangeStage) -> None:
        """Returns at once if there is time left in this turn; otherwise in a later one."""
        if not self._lines and not self._is_over():
            return
        waiter = asyncio.get_running_loop().create_future()
        self._lines.setdefault((caller, stage), deque()).append(waiter)
        await waiter

    def _is_over(self) -> bool:
        now = self._clock()
        if self._ends_at is None:
            self._begin(now)
            return False
        return now >= self._ends_at

    def _begin(self, now: float) -> None:
        self._ends_at = now + self._seconds
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self._ends_at = None
        while self._lines:
            place, line = self._lines.popitem(last=False)
            waiter = line.popleft()
            if line:
                self._lines[place] = line
            # Pass over a waiter that was cancelled.
            if not waiter.done():
                waiter.set_result(None)
                self._begin(self._clock())
                break
