"""Where the tensors of a batch are: in memory of its own, or at fixed addresses that a captured graph reads.

Knows sizes and how numbers get there. Does not know rows or pools.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.core.errors import BatchError
from sightline.core.lengths import moved
from sightline.core.staging import StagingRing


class BatchMemory:
    """The memory of a batch's tensors, which another batch may reuse; `tenant` counts the reuses."""

    def __init__(self) -> None:
        self.tenant = 0

    def put(self, lists: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
        """Each list as a tensor int64 on the device, by a single copy."""
        return moved(lists, device)

    def num_padding(self, num_rows: int) -> int:
        """Padding rows of a batch of so many rows."""
        del num_rows
        return 0

    def query_bounds(self, query_lens: tuple[int, ...]) -> tuple[int, ...]:
        """Upper bounds of the rows' new tokens."""
        return query_lens


@dataclass(frozen=True)
class StepShape:
    """The sizes that every step of a captured graph is padded to.

    No step has more rows or logits than tokens, so one number is enough for all three.
    """

    size: int
    """Rows, tokens and logits."""
    query_bound: int
    """Most new tokens of a row."""

    def __str__(self) -> str:
        tokens = f"{self.size} token{'s' if self.size > 1 else ''}"
        return f"{tokens}, one a row" if self.query_bound == 1 else f"{tokens}, up to {self.query_bound} a row"


class StaticMemory(BatchMemory):
    """Tensors at fixed addresses, for one batch of the shape at a time."""

    def __init__(self, shape: StepShape, num_pools: int, device: torch.device, ring: StagingRing) -> None:
        """`ring` must have buffers of `num_numbers(shape, num_pools)`."""
        super().__init__()
        self.shape = shape
        self.device = device
        self._ring = ring
        self._sizes = _sizes(shape, num_pools)
        self._block = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self._views = self._block.split_with_sizes(self._sizes)

    @staticmethod
    def num_numbers(shape: StepShape, num_pools: int) -> int:
        """Numbers that a batch of the shape consists of."""
        return sum(_sizes(shape, num_pools))

    def put(self, lists: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
        """Overwrites the tensors. Padding is 0 everywhere: no length, the padding row, the padding slot."""
        missing = [size - len(each) for size, each in zip(self._sizes, lists, strict=True)]
        if min(missing) < 0 or device != self.device:
            got = f"{len(lists[0])} on {device}"
            raise BatchError("tokens", None, f"at most {self.shape.size} on {self.device}", got, "run it eagerly")
        padded = [part for each, count in zip(lists, missing, strict=True) for part in (each, (0,) * count)]
        self.tenant += 1
        self._ring.copy(itertools.chain.from_iterable(padded), self._block)
        return self._views

    def num_padding(self, num_rows: int) -> int:
        return self.shape.size - num_rows

    def query_bounds(self, query_lens: tuple[int, ...]) -> tuple[int, ...]:
        """The shape's for every row: launches of a captured graph depend on them."""
        bound = self.shape.query_bound
        if max(query_lens, default=0) > bound:
            raise BatchError("query_lens", None, f"at most {bound}", max(query_lens), "run it eagerly")
        return (bound,) * self.shape.size


def _sizes(shape: StepShape, num_pools: int) -> list[int]:
    """Tokens, positions, places and sources of tokens that steps in flight choose, query lengths, context lengths,
    table rows, logit indices, and write slots of each pool."""
    return [shape.size] * (8 + num_pools)
