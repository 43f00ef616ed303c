"""What a batch knows of the pools that its rows read and write.

Owns the interface of a pool, and a batch's rows in it. Does not know pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class PoolPages(Protocol):
    """The interface of one pool that a batch needs: its page table, and the slots for new entries."""

    @property
    def key(self) -> str: ...
    @property
    def table_id(self) -> int: ...
    @property
    def num_table_rows(self) -> int: ...
    def versions(self, rows: Sequence[int]) -> tuple[int, ...]: ...
    def slots_to_write(self, rows: Sequence[int], firsts: Sequence[int], counts: Sequence[int]) -> Sequence[int]:
        """The slots of `counts` entries of each row from `firsts` on, row after row. All arguments are [num_rows]."""


@dataclass(frozen=True, eq=False)
class PoolRows:
    """A batch's rows in one pool's page table."""

    table_id: int
    """Identity of the page table that `rows` and `versions` refer to."""
    versions: tuple[int, ...]
    """[num_rows]: the version of each page-table row when the batch was made."""
    write_slots: Tensor
    """[num_tokens] int64: where each new token's entry goes."""
