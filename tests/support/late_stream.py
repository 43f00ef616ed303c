"""A side stream whose work arrives late: what a plan fills on it is there once somebody has waited for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from sightline.attention.buffers import PlanMemory
from sightline.attention.streams import PlanStream
from sightline.attention.workspace import poison_
from sightline.core.batch import Batch


class LateStream:
    """Stands for two CUDA streams on a CPU."""

    def __init__(self) -> None:
        self.is_current = False
        self.log: list[str] = []
        """Every wait and record, with the stream that did it."""

    @contextmanager
    def _enter(self) -> Iterator[None]:
        self.is_current = True
        try:
            yield
        finally:
            self.is_current = False

    def stream(self) -> PlanStream:
        return PlanStream(self._enter, lambda: LateMark(self))

    def note(self, what: str) -> None:
        self.log.append(f"{'side' if self.is_current else 'main'} {what}")


class LateMark:
    """Withholds what the side stream wrote to `memory` until it is waited for."""

    def __init__(self, device: LateStream) -> None:
        self._device = device
        self._under_way: list[tuple[Tensor, Tensor]] = []
        self.memory: PlanMemory | None = None
        self.batches: list[Batch] = []

    def record(self) -> None:
        self._device.note("records")
        if self._device.is_current and self.memory is not None:
            for view in self.memory.contents().values():
                self._under_way.append((view, view.clone()))
                poison_(view)

    def wait(self) -> None:
        self._device.note("waits")
        for view, arrived in self._under_way:
            view.copy_(arrived)
        self._under_way.clear()

    def keep(self, batch: Batch) -> None:
        self.batches.append(batch)
