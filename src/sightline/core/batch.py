"""The frozen `Batch`: everything that one step computes on, explicit, with no mode.

    |------ context_len ------|-- query_len --|
    |---------------- seq_len ----------------|

A prefill row has a long query and no context, a decode row a query of one, a chunk both, a tree step a
mask: they are rows of the same kind and may stand in the same batch. Every operation that changes the
shape (`pad`, `take`, `split`, `idle`) returns a new batch with a new id, which no plan belongs to.

Knows nothing of plans, pools or backends.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

import torch
from torch import Tensor

BatchId = NewType("BatchId", int)
PADDING_ROW = 0
"""The page-table row of rows that stand for nobody."""
PADDING_SLOT = 0
"""The slot, in the padding page of every pool, that padding tokens write to."""

_batch_ids = itertools.count(1)


def _next_batch_id() -> BatchId:
    return BatchId(next(_batch_ids))


class MaskKind(Enum):
    """Which of a row's tokens a query may see. The context is always visible."""

    CAUSAL = "causal"
    FULL = "full"
    TREE = "tree"


@dataclass(frozen=True, eq=False)
class RowMask:
    """The mask of one row."""

    kind: MaskKind
    tree: Tensor | None = None
    """[query_len, query_len] bool for `TREE`: True where query i sees new token j."""

    def __post_init__(self) -> None:
        if (self.kind is MaskKind.TREE) != (self.tree is not None):
            raise ValueError(f"expected a tree exactly for a TREE mask, got {self.kind} with tree {self.tree}")


CAUSAL = RowMask(MaskKind.CAUSAL)
FULL = RowMask(MaskKind.FULL)


@dataclass(frozen=True, eq=False)
class Lengths:
    """One length a row. The device's copy is the truth."""

    device: Tensor
    """[num_rows] int64."""
    bound: tuple[int, ...]
    """A host upper bound for each row; always there."""
    host: tuple[int, ...] | None
    """The exact host copy, where the host knows it."""

    @staticmethod
    def known(values: Sequence[int], device: torch.device) -> Lengths:
        """Lengths that the host knows."""
        exact = tuple(values)
        return Lengths(torch.tensor(exact, dtype=torch.int64, device=device), exact, exact)

    def __post_init__(self) -> None:
        if len(self.bound) != self.num_rows or (self.host is not None and len(self.host) != self.num_rows):
            raise ValueError(
                f"expected bounds and host copies of {self.num_rows} lengths, got {self.bound} and {self.host}"
            )

    @property
    def num_rows(self) -> int:
        return self.device.shape[0]

    def exact(self) -> tuple[int, ...]:
        """The exact host copy; a caller that needs it says so in its capability row."""
        if self.host is None:
            raise ValueError("expected lengths that the host knows, got device-only lengths")
        return self.host


@dataclass(frozen=True, eq=False)
class PoolRows:
    """What a batch needs of one pool's page table."""

    table_id: int
    """Identity of the page table that `rows` and `versions` speak of."""
    versions: tuple[int, ...]
    """[num_rows]: the version of each page-table row when the batch was made."""
    write_slots: Tensor
    """[num_tokens] int64: where each new token's entry goes."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One step's rows. Frozen, unplanned."""

    tokens: Tensor
    """[num_tokens] int64, row after row, then padding."""
    positions: Tensor
    """[num_tokens] int64. Of a row they follow its context one by one, but for a tree's, where they are depths."""
    query_lens: Lengths
    context_lens: Lengths
    masks: tuple[RowMask, ...]
    """[num_rows]."""
    rows: tuple[int, ...]
    """[num_rows]: page-table row of each row."""
    table_rows: Tensor
    """[num_rows] int64: the same on the device."""
    pools: Mapping[str, PoolRows]
    """By pool key. Empty: the step neither reads nor writes any cache."""
    logit_indices: Tensor
    """[num_logits] int64: the tokens whose logits are wanted; of a row, none, its last, or several."""
    logit_rows: tuple[int, ...]
    """[num_logits]: the row of each wanted token."""
    batch_id: BatchId = field(init=False, default_factory=_next_batch_id)
    """New for every batch, also for one that `dataclasses.replace` makes: other contents are another batch."""

    def __post_init__(self) -> None:
        num_rows, num_tokens = len(self.rows), self.tokens.shape[0]
        sizes = {
            "query_lens": (self.query_lens.num_rows, num_rows),
            "context_lens": (self.context_lens.num_rows, num_rows),
            "masks": (len(self.masks), num_rows),
            "table_rows": (self.table_rows.shape[0], num_rows),
            "positions": (self.positions.shape[0], num_tokens),
            "logit_rows": (len(self.logit_rows), self.logit_indices.shape[0]),
        }
        for key, pool in self.pools.items():
            sizes[f"pools[{key}].versions"] = (len(pool.versions), num_rows)
            sizes[f"pools[{key}].write_slots"] = (pool.write_slots.shape[0], num_tokens)
        for name, (got, expected) in sizes.items():
            if got != expected:
                raise ValueError(f"expected {name} of length {expected}, got {got}")
        owned = [row for row in self.rows if row != PADDING_ROW]
        if self.pools and len(set(owned)) != len(owned):
            raise ValueError(f"expected each page-table row once, got {self.rows}: two rows would write the same slots")
        if not all(0 <= row < num_rows for row in self.logit_rows):
            raise ValueError(f"expected logit rows from 0 to {num_rows - 1}, got {self.logit_rows}")
        if self.query_lens.host is not None:
            self._check_tokens(self.query_lens.host)

    def _check_tokens(self, query_lens: tuple[int, ...]) -> None:
        if sum(query_lens) > self.num_tokens:
            raise ValueError(f"expected at least {sum(query_lens)} tokens for the rows, got {self.num_tokens}")
        for row, (query_len, mask) in enumerate(zip(query_lens, self.masks, strict=True)):
            if mask.tree is not None and mask.tree.shape != (query_len, query_len):
                raise ValueError(
                    f"expected a tree of {query_len} × {query_len} for row {row}, got {tuple(mask.tree.shape)}"
                )

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included."""
        return self.tokens.shape[0]

    def query_offsets_host(self) -> tuple[int, ...]:
        """[num_rows + 1]: where each row's tokens begin, and where the last ends."""
        return tuple(itertools.accumulate(self.query_lens.exact(), initial=0))

    def num_decoding(self) -> int:
        """Leading rows of at most one new token under a causal mask."""
        bounds, masks = self.query_lens.bound, self.masks
        if not bounds or (max(bounds) <= 1 and masks.count(CAUSAL) == len(masks)):
            return len(bounds)
        for row, (bound, mask) in enumerate(zip(bounds, masks, strict=True)):
            if bound > 1 or mask.kind is not MaskKind.CAUSAL:
                return row
        return len(bounds)

    def pad(self, num_rows: int, num_tokens: int) -> Batch:
        """A new batch with rows of no tokens and tokens of no row added at the end."""
        extra_rows, extra_tokens = num_rows - self.num_rows, num_tokens - self.num_tokens
        if extra_rows < 0 or extra_tokens < 0:
            raise ValueError(
                f"expected padding to at least {self.num_rows} rows and {self.num_tokens} tokens, "
                f"got {num_rows} and {num_tokens}"
            )
        pools = {
            key: PoolRows(
                pool.table_id,
                pool.versions + (0,) * extra_rows,
                _extend(pool.write_slots, extra_tokens, PADDING_SLOT),
            )
            for key, pool in self.pools.items()
        }
        return Batch(
            tokens=_extend(self.tokens, extra_tokens, 0),
            positions=_extend(self.positions, extra_tokens, 0),
            query_lens=_pad_lengths(self.query_lens, extra_rows),
            context_lens=_pad_lengths(self.context_lens, extra_rows),
            masks=self.masks + (CAUSAL,) * extra_rows,
            rows=self.rows + (PADDING_ROW,) * extra_rows,
            table_rows=_extend(self.table_rows, extra_rows, PADDING_ROW),
            pools=pools,
            logit_indices=self.logit_indices,
            logit_rows=self.logit_rows,
        )

    def take(self, rows: Sequence[int]) -> Batch:
        """A new batch of the named rows, in that order. Padding tokens are left behind."""
        if len(set(rows)) != len(rows) or not all(0 <= row < self.num_rows for row in rows):
            raise ValueError(f"expected each row once, from 0 to {self.num_rows - 1}, got {list(rows)}")
        offsets = self.query_offsets_host()
        kept = [token for row in rows for token in range(offsets[row], offsets[row + 1])]
        new_token = {old: new for new, old in enumerate(kept)}
        new_row = {old: new for new, old in enumerate(rows)}
        wanted = [
            (new_token[token], new_row[row])
            for token, row in zip(self.logit_indices.tolist(), self.logit_rows, strict=True)
            if row in new_row
        ]
        device = self.tokens.device
        index = torch.tensor(kept, dtype=torch.int64, device=device)
        return Batch(
            tokens=self.tokens[index],
            positions=self.positions[index],
            query_lens=_take_lengths(self.query_lens, rows),
            context_lens=_take_lengths(self.context_lens, rows),
            masks=tuple(self.masks[row] for row in rows),
            rows=tuple(self.rows[row] for row in rows),
            table_rows=self.table_rows[torch.tensor(list(rows), dtype=torch.int64, device=device)],
            pools={
                key: PoolRows(pool.table_id, tuple(pool.versions[row] for row in rows), pool.write_slots[index])
                for key, pool in self.pools.items()
            },
            logit_indices=torch.tensor([token for token, _ in wanted], dtype=torch.int64, device=device),
            logit_rows=tuple(row for _, row in wanted),
        )

    def split(self, first_rows: int) -> tuple[Batch, Batch]:
        """Two new batches: the first `first_rows` rows, and the rest."""
        if not 0 <= first_rows <= self.num_rows:
            raise ValueError(f"expected a split between 0 and {self.num_rows} rows, got {first_rows}")
        return self.take(range(first_rows)), self.take(range(first_rows, self.num_rows))

    def part(self, rows: slice, tokens: slice) -> Batch:
        """A new batch of rows that stand side by side, over this one's memory; `tokens` are theirs.

        Logits are no matter of a part: they are the whole step's.
        """
        return Batch(
            tokens=self.tokens[tokens],
            positions=self.positions[tokens],
            query_lens=_slice_lengths(self.query_lens, rows),
            context_lens=_slice_lengths(self.context_lens, rows),
            masks=self.masks[rows],
            rows=self.rows[rows],
            table_rows=self.table_rows[rows],
            pools={
                key: PoolRows(pool.table_id, pool.versions[rows], pool.write_slots[tokens])
                for key, pool in self.pools.items()
            },
            logit_indices=self.logit_indices[:0],
            logit_rows=(),
        )

    def idle(self) -> Batch:
        """A new batch of no rows over the same pools: what a rank with nothing to do runs."""
        return self.take(())


def _extend(values: Tensor, count: int, fill: int) -> Tensor:
    return torch.cat([values, values.new_full((count,), fill)])


def _pad_lengths(lengths: Lengths, count: int) -> Lengths:
    host = None if lengths.host is None else lengths.host + (0,) * count
    return Lengths(_extend(lengths.device, count, 0), lengths.bound + (0,) * count, host)


def _slice_lengths(lengths: Lengths, rows: slice) -> Lengths:
    host = None if lengths.host is None else lengths.host[rows]
    return Lengths(lengths.device[rows], lengths.bound[rows], host)


def _take_lengths(lengths: Lengths, rows: Sequence[int]) -> Lengths:
    index = torch.tensor(list(rows), dtype=torch.int64, device=lengths.device.device)
    host = None if lengths.host is None else tuple(lengths.host[row] for row in rows)
    return Lengths(lengths.device[index], tuple(lengths.bound[row] for row in rows), host)
