"""Calls of CPU kernels as data, so that a step can be run at once or kept and run again.

    kernel      void(int64 arguments, int64 thread, int64 num_threads), compiled code without Python
    Record      one call: the kernel's address and the numbers that it reads
    Launcher    takes records in order, and runs them or keeps them

A kernel shares its work among `num_threads` threads, which all call it with the same arguments. It has no barrier
inside: all threads finish a record before any of them begins the next. Does not know what kernels compute.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

ENTRY_POINT = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
"""Makes a kernel's address callable. A call runs without Python's lock."""


@dataclass(frozen=True, eq=False)
class Record:
    """One call of a kernel. Valid as long as it lives."""

    kernel: int
    """The address of the compiled function."""
    arguments: NDArray[np.int64]
    """Addresses, sizes and strides, in the order that the kernel documents. Floats are passed as their bits."""
    keeps: tuple[object, ...]
    """The owners of the memory behind the addresses, and of the compiled function."""
    name: str
    """The kernel's name, for messages and profiles."""


class Launcher(Protocol):
    """Takes the kernel calls of a step, in order."""

    @property
    def num_threads(self) -> int:
        """Threads that share a record: kernels number them from 0."""

    def launch(self, record: Record) -> None:
        """Runs the record, or keeps it for a program. Its outputs may be read only through later records until then."""


def float_bits(value: float) -> int:
    """The bits of an fp32, as arguments hold it. A value that fp32 does not have is infinite, as in torch."""
    with np.errstate(over="ignore"):
        return int(np.float32(value).view(np.int32))
