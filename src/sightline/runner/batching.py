"""Turning scheduled rows into a frozen `Batch` over the current page tables."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sightline.cache.pools import CacheStore
from sightline.core.batch import CAUSAL, Batch, Lengths, PoolRows, RowMask


@dataclass(frozen=True, eq=False)
class RowWork:
    """What one row of a step computes."""

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
    device = store.device
    rows = tuple(row.table_row for row in work)
    for row in work:
        if row.positions is not None and len(row.positions) != len(row.tokens):
            raise ValueError(f"expected {len(row.tokens)} positions, one a token, got {len(row.positions)}")
        for pool in store.pools:
            pool.check_writable(row.table_row, row.context_len, row.context_len + len(row.tokens))
    query_lens = torch.tensor([len(row.tokens) for row in work], dtype=torch.int64, device=device)
    token_rows = torch.tensor(rows, dtype=torch.int64, device=device).repeat_interleave(query_lens)
    entries = torch.tensor(
        [row.context_len + index for row in work for index in range(len(row.tokens))],
        dtype=torch.int64,
        device=device,
    )
    pools = {
        pool.key: PoolRows(
            pool.table.table_id,
            pool.table.versions(rows),
            pool.table.slots(token_rows, entries, pool.page_size),
        )
        for pool in store.pools
    }
    return _batch(work, pools, device)


def assemble_transient(work: Sequence[RowWork], device: torch.device) -> Batch:
    """A batch that touches no cache: every row is whole, with no context."""
    return _batch(work, {}, device)


def _batch(work: Sequence[RowWork], pools: Mapping[str, PoolRows], device: torch.device) -> Batch:
    tokens = [token for row in work for token in row.tokens]
    positions = [
        position
        for row in work
        for position in (row.positions or range(row.context_len, row.context_len + len(row.tokens)))
    ]
    query_lens = Lengths.known([len(row.tokens) for row in work], device)
    for index, row in enumerate(work):
        if not 0 <= row.num_logits <= len(row.tokens):
            raise ValueError(
                f"expected logits of none to all of the {len(row.tokens)} tokens of row {index}, got {row.num_logits}"
            )
    ends = itertools.accumulate(len(row.tokens) for row in work)
    logit_indices = [i for row, end in zip(work, ends, strict=True) for i in range(end - row.num_logits, end)]
    return Batch(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        query_lens=query_lens,
        context_lens=Lengths.known([row.context_len for row in work], device),
        masks=tuple(row.mask for row in work),
        rows=tuple(row.table_row for row in work),
        pools=pools,
        logit_indices=torch.tensor(logit_indices, dtype=torch.int64, device=device),
        logit_rows=tuple(index for index, row in enumerate(work) for _ in range(row.num_logits)),
    )
