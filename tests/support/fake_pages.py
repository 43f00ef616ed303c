"""A pool's page table as a batch sees it, without a pool: every slot and version is a number of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FakePages:
    """Entry e of row r lies in slot `first_slot` + 1000 r + e."""

    key: str
    table_id: int
    first_slot: int = 0
    num_table_rows: int = 64

    def versions(self, rows: Sequence[int]) -> tuple[int, ...]:
        return tuple(100 * self.table_id + row for row in rows)

    def slots_of(self, rows: Tensor, entries: Tensor) -> Tensor:
        return self.first_slot + 1000 * rows + entries

    def slots_to_read(self, rows: Sequence[int], contexts: Sequence[int]) -> None:
        del rows, contexts

    def slots_to_write(
        self, rows: Sequence[int], firsts: Sequence[int], counts: Sequence[int], candidates: Sequence[int] = ()
    ) -> list[int]:
        spans = zip(rows, firsts, counts, strict=True)
        return [
            self.first_slot + 1000 * row + entry for row, first, count in spans for entry in range(first, first + count)
        ]
