"""Turning scheduled rows into a frozen `Batch` over the current page tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sightline.cache.pools import CacheStore, Pool
from sightline.core.batch import CAUSAL, Batch, Lengths, PoolRows, RowMask


@dataclass(eq=False, slots=True)
class RowWork:
    """What one row of a step computes.

    Nobody sets its fields: it is made as often as `ScheduledRow`, and as that is.
    """

    table_row: int
    tokens: Sequence[int]
    """The new tokens."""
    context_len: int
    """Tokens of this row that are in the cache."""
    num_logits: int
    """Of so many of its last tokens: none in the middle of a prompt, one to go on, more to score the prompt."""
    mask: RowMask = CAUSAL
    positions: Sequence[int] | None = None
    """Of the new tokens, where they do not follow the context one by one."""


def assemble(work: Sequence[RowWork], store: CacheStore) -> Batch:
    """A batch of paged rows. The pages that they write must be there already, and be nobody else's."""
    for row in work:
        if row.positions is not None and len(row.positions) != len(row.tokens):
            raise ValueError(f"expected {len(row.tokens)} positions, one a token, got {len(row.positions)}")
    return _batch(work, store.pools, store.device)


def assemble_transient(work: Sequence[RowWork], device: torch.device) -> Batch:
    """A batch that touches no cache: every row is whole, with no context."""
    return _batch(work, (), device)


def _batch(work: Sequence[RowWork], pools: Sequence[Pool], device: torch.device) -> Batch:
    tokens: list[int] = []
    positions: list[int] = []
    logit_indices: list[int] = []
    logit_rows: list[int] = []
    query_lens = [len(row.tokens) for row in work]
    context_lens = [row.context_len for row in work]
    for index, (row, query_len, context_len) in enumerate(zip(work, query_lens, context_lens, strict=True)):
        num_logits = row.num_logits
        if not 0 <= num_logits <= query_len:
            raise ValueError(
                f"expected logits of none to all of the {query_len} tokens of row {index}, got {num_logits}"
            )
        tokens += row.tokens
        positions += row.positions or range(context_len, context_len + query_len)
        logit_indices += range(len(tokens) - num_logits, len(tokens))
        logit_rows += [index] * num_logits
    rows = tuple([row.table_row for row in work])
    slots = [pool.slots_to_write(zip(rows, context_lens, query_lens, strict=True)) for pool in pools]
    # One way to the device for all of it.
    on_device = _moved([tokens, positions, query_lens, context_lens, rows, logit_indices, *slots], device)
    return Batch(
        tokens=on_device[0],
        positions=on_device[1],
        query_lens=Lengths(on_device[2], tuple(query_lens), tuple(query_lens)),
        context_lens=Lengths(on_device[3], tuple(context_lens), tuple(context_lens)),
        masks=tuple([row.mask for row in work]),
        rows=rows,
        table_rows=on_device[4],
        pools={
            pool.key: PoolRows(pool.table.table_id, pool.table.versions(rows), write_slots)
            for pool, write_slots in zip(pools, on_device[6:], strict=True)
        },
        logit_indices=on_device[5],
        logit_rows=tuple(logit_rows),
    )


def _moved(lists: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Each list as a tensor [length] int64, side by side in memory. numpy reads a list in a third of torch's time."""
    joined = torch.from_numpy(np.array(list(itertools.chain.from_iterable(lists)), dtype=np.int64)).to(device)
    return tuple(joined.split_with_sizes([len(each) for each in lists]))
