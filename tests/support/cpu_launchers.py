"""Launchers of CPU kernels for tests, which check that records keep the memory that they read and write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass

from torch import Tensor

from sightline.kernels.cpu.program import CpuLauncher
from sightline.kernels.cpu.record import ENTRY_POINT, Record

_LOWEST_ADDRESS = 1 << 32
"""Smaller arguments are sizes, strides and the bits of floats."""


def check_keeps(record: Record) -> None:
    """Every address among the arguments must be in memory that the record keeps: a program may run long afterwards."""
    kept = [each.untyped_storage() for each in _tensors(record.keeps)]
    for address in record.arguments.tolist():
        owners = [each for each in kept if each.data_ptr() <= address <= each.data_ptr() + each.nbytes()]
        assert address < _LOWEST_ADDRESS or owners, f"{record.name} keeps nothing at {address:#x}"


def _tensors(kept: object) -> Iterator[Tensor]:
    match kept:
        case Tensor():
            yield kept
        case tuple():
            for each in kept:
                yield from _tensors(each)
        case _ if is_dataclass(kept):
            yield from _tensors(tuple(vars(kept).values()))


class CheckedLauncher(CpuLauncher):
    """Checks every record before it is run or kept."""

    def launch(self, record: Record) -> None:
        check_keeps(record)
        super().launch(record)


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
        check_keeps(record)
        self.names.append(record.name)
        kernel = ENTRY_POINT(record.kernel)
        for thread in reversed(range(self._num_threads)):
            kernel(record.arguments.ctypes.data, thread, self._num_threads)
