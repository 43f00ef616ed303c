"""The order of planning and running if they are on two streams of a device.

    side stream   ─ wait ─ plan N+1 ─ record ┐
                     ▲                       ▼
    main stream   ─ run N ─ record ──────── wait ─ run N+1 ─ record

A set of plan buffers has one mark, behind the last work that touched it. Whoever fills or reads the buffers waits for
the mark first and records it afterwards: a step does not read buffers that are being filled, and a plan does not fill
buffers that a step still reads. The waits are the device's; the host does not wait.

Where everything is in one stream, or on a CPU, order is given and marks do nothing. Does not know plans.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from sightline.attention.contents import batch_tensors
from sightline.core.batch import Batch


class StreamMark(Protocol):
    """A point in a stream that other streams can wait for."""

    def record(self) -> None:
        """Moves the mark behind all work given to the current stream so far."""

    def wait(self) -> None:
        """Makes the current stream wait for the mark before it does later work."""

    def keep(self, batch: Batch) -> None:
        """Says that the current stream reads the batch's tensors: their memory is not reused before it has."""


class InOrder:
    """The mark of a device without streams, or of planning and running in the same stream."""

    def record(self) -> None: ...

    def wait(self) -> None: ...

    def keep(self, batch: Batch) -> None: ...


class CudaMark:
    """A mark in CUDA streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))

    def keep(self, batch: Batch) -> None:
        stream = torch.cuda.current_stream(self._device)
        for tensor in batch_tensors(batch).values():
            # Trees of guesses are on the host too.
            if tensor.is_cuda:
                tensor.record_stream(stream)


@dataclass(frozen=True)
class PlanStream:
    """Where plans are made beside running steps, and how the two are ordered."""

    enter: Callable[[], AbstractContextManager[object]]
    """Makes it the current stream. Assemble the batch inside too, so that its copies are on the same stream."""
    make_mark: Callable[[], StreamMark]

    @staticmethod
    def beside(device: torch.device) -> PlanStream:
        """A stream of its own on a CUDA device; on others, `HERE`."""
        if device.type != "cuda":
            return HERE
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return PlanStream(lambda: torch.cuda.stream(stream), lambda: CudaMark(device))


HERE = PlanStream(nullcontext, InOrder)
"""The stream that steps run in."""
