"""What a batch knows of the pools that its rows read and write.

Owns the interface of a pool, and a batch's rows in it. Does not know pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sightline.core.errors import BatchError


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


def slots_of_kept(
    source: PoolPages,
    rows: Sequence[int],
    firsts: Sequence[int],
    counts: Sequence[int],
    kept: Sequence[bool],
    padding_slot: int,
) -> list[int]:
    """Like `PoolPages.slots_to_write`, with the padding slot for the tokens of rows that keep no entries."""
    asked = [count if keeps else 0 for count, keeps in zip(counts, kept, strict=True)]
    slots = iter(source.slots_to_write(rows, firsts, asked))
    return [
        next(slots) if keeps else padding_slot for count, keeps in zip(counts, kept, strict=True) for _ in range(count)
    ]


def check_rows(
    rows: tuple[int, ...], context_lens: tuple[int, ...], sources: Sequence[PoolPages], padding_row: int
) -> None:
    """With a cache, each page-table row must exist, occur once and not be the padding row; without one, no row may have
    a context."""
    if not sources:
        if any(context_lens):
            row = next(index for index, length in enumerate(context_lens) if length)
            raise BatchError("context_lens", row, "0 in a batch without pools", context_lens[row])
        return
    if len(set(rows)) != len(rows):
        row = next(index for index, table_row in enumerate(rows) if table_row in rows[:index])
        raise BatchError(
            "rows", row, "each page-table row once: two rows would write the same slots", f"{rows[row]} twice"
        )
    most = min([source.num_table_rows for source in sources])
    if rows and not (min(rows) > padding_row and max(rows) <= most):
        row = next(index for index, table_row in enumerate(rows) if not padding_row < table_row <= most)
        raise BatchError("rows", row, f"a page-table row from 1 to {most}", rows[row])
