"""Defers Ctrl-C and other signals while an operation must not be left half done.

Calls the functions below `signal`, because every step of an engine comes here. Those of `signal` look each handler up
in an enum and, before Python 3.13, raise and catch an exception if it is a function: 50 µs a step in place of 5.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

_INTERRUPTING = tuple(int(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM))
"""Signals whose handlers usually raise: Ctrl-C, a termination request, a timer."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defers the handlers of interrupting signals to the end of the block.

    Only the main thread is interrupted by signals; in others this does nothing. Do not wrap long work such as a forward
    pass.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: handler for number in _INTERRUPTING if callable(handler := _signal.getsignal(number))}
    caught: list[tuple[int, FrameType | None]] = []
    is_over = False

    def defer(number: int, frame: FrameType | None) -> None:
        if is_over:
            handlers[number](number, frame)
        else:
            caught.append((number, frame))

    try:
        for number in handlers:
            _signal.signal(number, defer)
        yield
    finally:
        # An interruption in here may leave `defer` installed: from this line on it only passes signals on.
        is_over = True
        for number, handler in handlers.items():
            _signal.signal(number, handler)
        if caught:
            # Calls all of them, in order, even if one raises.
            with ExitStack() as calls:
                for number, frame in reversed(caught):
                    calls.callback(handlers[number], number, frame)
