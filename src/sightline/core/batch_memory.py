"""Where the tensors of a batch are: in memory of its own, or at fixed addresses that a captured graph reads.

Knows sizes and how numbers get there. Does not know rows or pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.core.errors import BatchError
from sightline.core.lengths import moved
from sightline.core.staging import StagingRing


class BatchMemory:
    """The memory of a batch's tensors, which another batch may reuse; `tenant` counts the reuses."""

    is_fixed: ClassVar[bool] = False
    """True if a captured step may read it."""

    def __init__(self) -> None:
        self.tenant = 0

    @property
    def shape(self) -> StepShape | None:
        """The shape that batches in it are padded to; None if they are as large as their rows."""
        return None

    def put(self, columns: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
        """Each column as a tensor int64 on the device, by a single copy."""
        return moved(columns, device)

    def num_padding(self, num_rows: int) -> int:
        """The number of padding rows of a batch of `num_rows` rows."""
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

    is_fixed = True

    def __init__(self, shape: StepShape, num_slot_columns: int, device: torch.device, ring: StagingRing) -> None:
        """`ring` must have buffers of `num_numbers(shape, num_slot_columns)`."""
        super().__init__()
        self._shape = shape
        self.device = device
        self._ring = ring
        self._block = torch.zeros(self.num_numbers(shape, num_slot_columns), dtype=torch.int64, device=device)
        self._views = self._block.view(-1, shape.size).unbind()

    @staticmethod
    def num_numbers(shape: StepShape, num_slot_columns: int) -> int:
        """Numbers that a batch of the shape consists of."""
        return _num_columns(num_slot_columns) * shape.size

    @property
    def shape(self) -> StepShape:
        return self._shape

    def put(self, columns: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
        """Overwrites the tensors. Padding is 0 everywhere: no length, the padding row, the padding slot."""
        lens = [len(column) for column in columns]
        if max(lens) > self.shape.size or device != self.device:
            got = f"{lens[0]} on {device}"
            raise BatchError("tokens", None, f"at most {self.shape.size} on {self.device}", got, "run it eagerly")
        self.tenant += 1
        self._ring.copy(columns, self._block)
        return self._views

    def num_padding(self, num_rows: int) -> int:
        return self.shape.size - num_rows

    def query_bounds(self, query_lens: tuple[int, ...]) -> tuple[int, ...]:
        """The shape's for every row: launches of a captured graph depend on them."""
        bound = self.shape.query_bound
        if max(query_lens, default=0) > bound:
            raise BatchError("query_lens", None, f"at most {bound}", max(query_lens), "run it eagerly")
        return (bound,) * self.shape.size


def _num_columns(num_slot_columns: int) -> int:
    """Tokens, positions, places and sources of tokens that steps in flight choose, query lengths, context lengths,
    table rows, logit indices, and the slots that are written in each pool and read in those of states."""
    return 8 + num_slot_columns
