"""Threads that ask for a result at once get the same one: the machine code of another one would be freed."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from sightline.kernels.cpu.once import Once


def test_threads_that_ask_at_once_get_the_same() -> None:
    barrier, calls = threading.Barrier(8), list[int]()

    @Once
    def make(number: int, *, scale: int = 1) -> object:
        calls.append(number)
        sys.setswitchinterval(1e-6)
        return object()

    def ask(number: int) -> object:
        barrier.wait(10)
        return make(number, scale=2)

    before = sys.getswitchinterval()
    try:
        with ThreadPoolExecutor(8) as pool:
            for number in range(50):
                assert len(set(map(id, pool.map(ask, [number] * 8)))) == 1
    finally:
        sys.setswitchinterval(before)
    assert calls == list(range(50))
    assert make(3, scale=2) is make(3, scale=2)
    assert make(3, scale=2) is not make(4, scale=2)
