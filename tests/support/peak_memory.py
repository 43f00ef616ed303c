"""The most memory that tensors made in a block of code take at once, on any device.

Counts results of torch's operations while somebody holds them. What an operation takes only while it runs is not seen.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`num_bytes` is the most so far. Memory of tensors that were there before does not count."""

    def __init__(self, *before: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self._before = {each.untyped_storage().data_ptr() for each in before}
        self._alive: dict[int, tuple[ref[Tensor], int, int]] = {}

    def __torch_dispatch__(
        self, call: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        del types
        given = call(*args, **(kwargs or {}))
        for tensor in tree_leaves(given):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._alive[id(tensor)] = (ref(tensor), storage.data_ptr(), storage.nbytes())
        self._alive = {key: each for key, each in self._alive.items() if each[0]() is not None}
        sizes = {address: size for _, address, size in self._alive.values() if address not in self._before}
        self.num_bytes = max(self.num_bytes, sum(sizes.values()))
        return given
