"""Ctrl-C at a good moment: what must not be left half done is done whole, and interrupted then."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_INTERRUPTING = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""Signals whose handlers raise, as a rule: Ctrl-C, a request to end, a timer."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within, handlers of signals that interrupt wait until the end.

    Only the main thread is ever interrupted so; elsewhere this does nothing. What lasts, such as a forward pass, should
    not be within.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {number: signal.getsignal(number) for number in _INTERRUPTING}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    caught: list[tuple[int, FrameType | None]] = []
    for number in handlers:
        signal.signal(number, lambda *signalled: caught.append(signalled))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for signalled, frame in caught[:1]:
            handlers[signal.Signals(signalled)](signalled, frame)
