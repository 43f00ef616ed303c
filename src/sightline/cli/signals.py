"""Requests to end that are obeyed as Ctrl-C is: by an exception, so that nothing is left behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def ended_by(*numbers: signal.Signals) -> Iterator[None]:
    """Raises `SystemExit` where one of the signals comes. One that is ignored, as `nohup` has it, stays so."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
