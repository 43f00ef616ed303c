"""An interrupt from the keyboard waits for what must be done whole."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from sightline.core.interruption import uninterrupted


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """What started the tests may have it ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_an_interrupt_waits_until_the_end() -> None:
    done: list[int] = []

    def work() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.extend(range(1000))

    with pytest.raises(KeyboardInterrupt):
        work()
    assert len(done) == 1000
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens() -> None:
    with uninterrupted(), uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_inside_comes_through_and_the_handler_is_back() -> None:
    with pytest.raises(ValueError, match="mine"), uninterrupted():
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_inner_part_passes_the_interrupt_on_to_the_outer_one() -> None:
    done: list[str] = []

    def work() -> None:
        with uninterrupted():
            with uninterrupted():
                os.kill(os.getpid(), signal.SIGINT)
            done.append("after")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["after"]


def test_other_threads_are_left_alone() -> None:
    seen = []

    def work() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_signal_whose_handler_raises_does_not_swallow_the_one_behind_it() -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))

    def work() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert seen == [signal.SIGTERM]


def test_a_signal_whose_handler_returns_does_not_swallow_the_one_behind_it() -> None:
    ticks: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, _: ticks.append(number))

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert ticks == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("call", range(4))
def test_an_interruption_while_handlers_are_exchanged_loses_no_later_signal(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`call` counts the exchanges: of SIGINT and SIGALRM at the beginning, and at the end."""
    ticks: list[int] = []
    exchange, calls = _signal.signal, iter(range(4))
    previous = exchange(signal.SIGALRM, lambda number, _: ticks.append(number))

    def interrupted(number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        exchange(number, handler)
        if next(calls, None) == call:
            raise KeyboardInterrupt

    try:
        with monkeypatch.context() as patch:
            patch.setattr(_signal, "signal", interrupted)
            with pytest.raises(KeyboardInterrupt), uninterrupted():
                pass
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGALRM)
        assert ticks == [signal.SIGALRM]
    finally:
        exchange(signal.SIGALRM, previous)
