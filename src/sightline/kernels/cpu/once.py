"""Results that are made once in a process, whichever threads ask for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import update_wrapper
from typing import Generic, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Once(Generic[_P, _T]):
    """A function whose results are kept for ever, by its arguments.

    `functools.cache` lets two threads that ask at once make two results, and keeps one of them. Of a kernel, whose
    address alone callers may keep, the other one's machine code would be freed and yet run.
    """

    def __init__(self, make: Callable[_P, _T]) -> None:
        self.make = make
        """Makes a result anew, for tests."""
        self._made: dict[object, _T] = {}
        self._lock = threading.RLock()
        update_wrapper(self, make)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        key = (args, tuple(kwargs.items())) if kwargs else args
        made = self._made
        if key not in made:
            with self._lock:
                if key not in made:
                    made[key] = self.make(*args, **kwargs)
        return made[key]

    def clear(self) -> None:
        """Forgets the results, for tests that change what makes them. Nobody may use the old ones."""
        self._made.clear()
