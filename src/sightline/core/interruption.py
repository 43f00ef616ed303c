"""Defers Ctrl-C and other signals while an operation must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_INTERRUPTING = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
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
    found = {number: signal.getsignal(number) for number in _INTERRUPTING}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    caught: list[tuple[int, FrameType | None]] = []
    is_over = False

    def defer(number: int, frame: FrameType | None) -> None:
        if is_over:
            handlers[signal.Signals(number)](number, frame)
        else:
            caught.append((number, frame))

    try:
        for number in handlers:
            signal.signal(number, defer)
        yield
    finally:
        # An interruption in here may leave `defer` installed: from this line on it only passes signals on.
        is_over = True
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for signalled, frame in caught:
            handlers[signal.Signals(signalled)](signalled, frame)
