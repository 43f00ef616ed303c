"""Work in several threads at once, with what each returned or raised, and no test that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")
SECONDS = 60.0
"""What anything may take. Reached only by a thread that hangs."""


class Background(Generic[_T]):
    """Work in a thread of its own, which begins at once."""

    def __init__(self, work: Callable[[], _T], name: str = "background") -> None:
        self._work = work
        self._result: list[_T] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> _T:
        """What the work returned; raises what it raised."""
        self._thread.join(SECONDS)
        assert self.is_done, f"the thread {self._thread.name} hangs"
        if self.error is not None:
            raise self.error
        return self._result[0]

    def _run(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as error:
            self.error = error


def together(works: Sequence[Callable[[], _T]]) -> list[_T]:
    """Runs each in its own thread, and returns what they return; raises the first error."""
    started = [Background(work, f"thread {index}") for index, work in enumerate(works)]
    return [each.result() for each in started]


def until(condition: Callable[[], bool]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


class Hold:
    """A place in the code that holds whoever comes first until it is let go; others pass."""

    def __init__(self) -> None:
        self._first = threading.Lock()
        self._entered = threading.Event()
        self._free = threading.Event()

    def __call__(self) -> None:
        if self._first.acquire(blocking=False):
            self._entered.set()
            assert self._free.wait(SECONDS), "nobody let go"

    def until_entered(self) -> None:
        assert self._entered.wait(SECONDS), "nobody came"

    def let_go(self) -> None:
        self._free.set()
