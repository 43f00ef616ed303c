"""CUDA graphs where there is no CUDA: what torch is asked for is written down, and a replay asks for it again.

As on a device, a replay reads and writes the memory that was captured, whatever it holds by then, and the host decides
nothing in it. Operations whose result's shape depends on numbers, or that give the host one, cannot be captured; what
copies a whole tensor to the host, as `tolist` does, a device would refuse and this does not. Serves backends of torch's
operations, and of Triton's kernels in its interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from sightline.core.device import Device, DeviceKind

RECORDING = Device(DeviceKind.CUDA, torch.device("cpu"), "a recording", (9, 0))
_WAITING = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.bincount.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.equal.default,
)


class RecordedGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def record(self, call: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if call in _WAITING or (call is torch.ops.aten.index.Tensor and _has_mask(args[1])):
            raise RuntimeError(f"expected operations that wait for nothing, got {call}")
        given = call(*args, **kwargs)
        self._calls.append((call, args, kwargs, _tensors(given)))
        return given

    @torch.inference_mode()
    def replay(self) -> None:
        for call, args, kwargs, kept in self._calls:
            for target, given in zip(kept, _tensors(call(*args, **kwargs)), strict=True):
                if target.data_ptr() != given.data_ptr():
                    target.copy_(given)


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph

    def __torch_dispatch__(
        self, call: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        return self._graph.record(call, args, kwargs or {})


@contextmanager
def _recorded(graph: RecordedGraph, **_: object) -> Iterator[None]:
    launch = InterpretedFunction.run

    def launched(kernel: Any, *args: Any, **settings: Any) -> None:
        """What the interpreter itself asks torch for is no operation of the graph."""
        with _disable_current_modes():
            graph.record(launch, (kernel, *args), settings)

    with pytest.MonkeyPatch.context() as patch, _Recording(graph):
        patch.setattr(InterpretedFunction, "run", launched)
        yield


def _has_mask(indices: list[Tensor | None]) -> bool:
    return any(index is not None and index.dtype is torch.bool for index in indices)


def _tensors(given: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", _recorded)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 36, 1 << 36))
