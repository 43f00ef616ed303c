"""Recording work on a device once, and replaying it: the contract, with CUDA graphs or CPU programs behind it.

A replay repeats the recorded launches at the recorded addresses. The host decides nothing in it, so whatever a step
decides must be in the memory that the launches read. Does not know steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from sightline.kernels.cpu.program import CpuLauncher, Program


class UnrecordableError(Exception):
    """The work needs something that no recording repeats; the message names it."""


class Recording(Protocol):
    """Recorded work."""

    def replay(self) -> Tensor:
        """Runs the work again, in stream order, and returns its output, which is always the same memory.

        The next replay overwrites it: copy what is needed longer, in stream order.
        """


class Recorder(Protocol):
    """Records work."""

    is_essential: ClassVar[bool]
    """True if a step that is not recorded is so much slower that the ledger counts it as degraded."""

    @property
    def num_bytes(self) -> int:
        """Device memory that the recordings so far keep."""

    def record(self, work: Callable[[], Tensor]) -> Recording:
        """Records what the work launches. The work may run more than once, and must then launch the same.

        Raises `UnrecordableError` if the recording would not be all of the work.
        """


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

    is_essential: ClassVar[bool] = True

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


@dataclass(frozen=True, eq=False)
class CpuRecording:
    """A program of CPU kernels. Keeps the memory that it writes."""

    launcher: CpuLauncher
    program: Program
    out: Tensor

    def replay(self) -> Tensor:
        self.launcher.run(self.program)
        return self.out


class CpuRecorder:
    """Keeps the kernel calls of the work, and runs none of them.

    A program repeats only calls of compiled kernels. So work in which torch computes anything is refused; views and new
    uninitialised tensors are not computed.
    """

    is_essential: ClassVar[bool] = False

    def __init__(self, launcher: CpuLauncher) -> None:
        self._launcher = launcher
        self.num_bytes = 0

    def record(self, work: Callable[[], Tensor]) -> CpuRecording:
        refusing = _ComputesNothing()  # type: ignore[no-untyped-call]
        with self._launcher.recording() as tape, refusing:
            out = work()
        program = tape.program()
        self.num_bytes += out.nbytes + program.entries.nbytes
        return CpuRecording(self._launcher, program, out)


class _ComputesNothing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses torch operations that read or write data."""

    _ALLOCATES = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: otherwise torch imports its compiler on the first call, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in self._ALLOCATES:
            raise UnrecordableError(f"torch.{name}")
        found = func(*args, **(kwargs or {}))
        # Some operations, such as `to`, return a view or a copy.
        if name not in self._ALLOCATES and not _addresses(found) <= _addresses((args, kwargs)):
            raise UnrecordableError(f"torch.{name}")
        return found


def _addresses(values: Any) -> set[int]:
    """Where the memory of all tensors in some arguments or results begins."""
    tensors = [each for each in tree_flatten(values)[0] if isinstance(each, Tensor)]
    return {each.untyped_storage().data_ptr() for each in tensors}
