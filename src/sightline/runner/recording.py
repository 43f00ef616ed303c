"""Recording work on a device once, and replaying it: the contract, and CUDA graphs behind it.

A replay repeats the recorded launches at the recorded addresses. The host decides nothing in it, so whatever a step
decides must be in the memory that the launches read. Does not know steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Recording(Protocol):
    """Recorded work."""

    def replay(self) -> Tensor:
        """Runs the work again, in stream order, and returns its output, which is always the same memory.

        The next replay overwrites it: copy what is needed longer, in stream order.
        """


class Recorder(Protocol):
    """Records work."""

    @property
    def num_bytes(self) -> int:
        """Device memory that the recordings so far keep."""

    def record(self, work: Callable[[], Tensor]) -> Recording:
        """Records what the work launches. The work may run more than once, and must then launch the same."""


@dataclass(frozen=True, eq=False)
class CudaRecording:
    """A captured CUDA graph. Keeps its output alive, so that no other graph of the pool gets that memory."""

    graph: torch.cuda.CUDAGraph
    out: Tensor

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.out


class CudaRecorder:
    """Captures CUDA graphs whose temporary memory is one pool: they must be replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self.num_bytes = 0

    def record(self, work: Callable[[], Tensor]) -> CudaRecording:
        # Compiles kernels and allocates what libraries keep, neither of which a capture allows.
        work()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = work()
        self.num_bytes += torch.cuda.memory_reserved(self._device) - before
        return CudaRecording(graph, out)
