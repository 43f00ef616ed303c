"""An interrupt from the keyboard waits for what must be done whole."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

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
