"""A launcher of CPU kernels for tests."""

from __future__ import annotations

import ctypes

from sightline.kernels.cpu.record import Record

_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class SerialLauncher:
    """Runs a record at once, for one thread after the other: kernels have no barrier, so that this is equivalent."""

    def __init__(self, num_threads: int = 1) -> None:
        self.names: list[str] = []
        """The names of all records, in order."""
        self._num_threads = num_threads

    @property
    def num_threads(self) -> int:
        return self._num_threads

    def launch(self, record: Record) -> None:
        self.names.append(record.name)
        kernel = _KERNEL(record.kernel)
        for thread in reversed(range(self._num_threads)):
            kernel(record.arguments.ctypes.data, thread, self._num_threads)
