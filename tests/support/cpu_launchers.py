"""A launcher of CPU kernels for tests."""

from __future__ import annotations

from sightline.kernels.cpu.record import ENTRY_POINT, Record


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
        kernel = ENTRY_POINT(record.kernel)
        for thread in reversed(range(self._num_threads)):
            kernel(record.arguments.ctypes.data, thread, self._num_threads)
