"""A budget of seconds for the libraries that a benchmark compares: compiling and tuning may take minutes."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class OutOfTime(BaseException):
    """A library's budget is used up. Not an `Exception`, so that no library takes it for an unsupported shape."""


@dataclass
class Budget:
    """Seconds that a library may still spend, or infinity. Works in the main thread only, because it sets an alarm."""

    seconds: float

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Raises `OutOfTime` when the budget is used up."""
        if self.seconds <= 0.0:
            raise OutOfTime

        def stop(*_: object) -> None:
            raise OutOfTime

        before, started = signal.signal(signal.SIGALRM, stop), time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.0 if math.isinf(self.seconds) else self.seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
            self.seconds -= time.monotonic() - started
