"""What a batch knows of the pools that its rows read and write.

Owns the interface of a pool, and a batch's rows in it. Does not know pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sightline.core.errors import BatchError
from sightline.core.lengths import extend


class PoolPages(Protocol):
    """The interface of one pool that a batch needs: its page table, and the slots for new entries."""

    @property
    def key(self) -> str: ...
    @property
    def table_id(self) -> int: ...
    @property
    def num_table_rows(self) -> int: ...
    def versions(self, rows: Sequence[int]) -> tuple[int, ...]: ...
    def slots_to_write(
        self, rows: Sequence[int], firsts: Sequence[int], counts: Sequence[int], candidates: Sequence[int]
    ) -> Sequence[int]:
        """The slots of `counts` entries of each row from `firsts` on, row after row. All arguments are [num_rows].

        Any of a row's last `candidates` tokens may turn out to be the last one that it keeps: a pool of states keeps
        the state behind each of them, and has the padding slot for other tokens.
        """

    def slots_to_read(self, rows: Sequence[int], contexts: Sequence[int]) -> Sequence[int] | None:
        """The slot of the state behind each row's context; None if rows read entries through the page table."""

    def slots_of(self, rows: Tensor, entries: Tensor) -> Tensor:
        """The slot of an entry of each row, on the device, for rows that have pages for it. All are [n] int64."""


@dataclass(frozen=True, eq=False)
class PoolRows:
    """A batch's rows in one pool's page table."""

    table_id: int
    """Identity of the page table that `rows` and `versions` refer to."""
    versions: tuple[int, ...]
    """[num_rows]: the version of each page-table row when the batch was made."""
    write_slots: Tensor
    """[num_tokens] int64: where each new token's entry goes; in a pool of states, where the state behind it is kept."""
    read_slots: Tensor | None = None
    """[num_rows] int64: the state behind each row's context; None if rows read entries through the page table."""
    kept: tuple[int, ...] = ()
    """[num_tokens]: `write_slots` on the host, in a pool of states."""

    def padded(self, extra_rows: int, extra_tokens: int, slot: int) -> PoolRows:
        """The rows with others appended that have `slot` only."""
        return PoolRows(
            self.table_id,
            self.versions + (0,) * extra_rows,
            extend(self.write_slots, extra_tokens, slot),
            None if self.read_slots is None else extend(self.read_slots, extra_rows, slot),
            self.kept and self.kept + (slot,) * extra_tokens,
        )

    def taken(self, rows: Sequence[int], row_index: Tensor, tokens: Sequence[int], token_index: Tensor) -> PoolRows:
        """Some rows and their tokens, in this order. The indices are the same numbers on the device."""
        return PoolRows(
            self.table_id,
            tuple(self.versions[row] for row in rows),
            self.write_slots[token_index],
            None if self.read_slots is None else self.read_slots[row_index],
            self.kept and tuple(self.kept[token] for token in tokens),
        )

    def part(self, rows: slice, tokens: slice) -> PoolRows:
        """A view of contiguous rows and their tokens."""
        return PoolRows(
            self.table_id,
            self.versions[rows],
            self.write_slots[tokens],
            None if self.read_slots is None else self.read_slots[rows],
            self.kept[tokens],
        )

    def placed_in(self, memory: PoolRows) -> PoolRows:
        """The same rows, with their tensors copied into those of `memory`."""
        read = self.read_slots
        if read is not None and memory.read_slots is not None:
            read = memory.read_slots.copy_(read)
        return PoolRows(self.table_id, self.versions, memory.write_slots.copy_(self.write_slots), read, self.kept)


def slots_of_kept(
    source: PoolPages,
    rows: Sequence[int],
    firsts: Sequence[int],
    counts: Sequence[int],
    candidates: Sequence[int],
    kept: Sequence[bool],
    padding_slot: int,
) -> list[int]:
    """Like `PoolPages.slots_to_write`, with the padding slot for the tokens of rows that keep no entries."""
    asked = [count if keeps else 0 for count, keeps in zip(counts, kept, strict=True)]
    slots = iter(source.slots_to_write(rows, firsts, asked, candidates))
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


def move_contexts(
    context_lens: Tensor,
    contexts: Tensor,
    positions: Tensor,
    query_lens: Tensor,
    table_rows: Tensor,
    written: Sequence[tuple[PoolPages, Tensor]],
) -> None:
    """Sets the first `context_lens` to `contexts` and moves the tokens of these rows with them, on the device.

    `positions` [num_tokens], and the write slots [num_tokens] of each pool in `written`, are overwritten. Tokens of no
    row stay as they are. Nothing here depends on the numbers, so that it can be captured.
    """
    count, ends = contexts.shape[0], query_lens.cumsum(0)
    if count == 0:
        return
    places = torch.arange(positions.shape[0], device=positions.device)
    is_real = places < ends[-1:]
    row = torch.searchsorted(ends, places, right=True).clamp_(max=ends.shape[0] - 1)
    moved = torch.zeros_like(context_lens)
    moved[:count] = contexts - context_lens[:count]
    positions += torch.where(is_real, moved[row], 0)
    context_lens[:count] = contexts
    for pool, slots in written:
        slots.copy_(torch.where(is_real, pool.slots_of(table_rows[row], positions), slots))
