"""A batch's tensors by name, and the device-side check of `--paranoid`: they must match its host-side facts.

The host checks facts, but the tensors derived from them could have been changed in place. Reads everything back, so it
synchronizes with the device. Does not know plans.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sightline.cache.pools import Pool
from sightline.core.batch import PADDING_ROW, PADDING_SLOT, Batch
from sightline.core.errors import BatchError


def batch_tensors(batch: Batch) -> dict[str, Tensor]:
    """Every tensor of the batch, by name."""
    tensors = {
        "query_lens": batch.query_lens.device,
        "context_lens": batch.context_lens.device,
        "positions": batch.positions,
        "tokens": batch.tokens,
        "logit_indices": batch.logit_indices,
        "table rows": batch.table_rows,
    }
    for row, mask in enumerate(batch.masks):
        if mask.tree is not None:
            tensors[f"tree of row {row}"] = mask.tree
    for key, rows in batch.pools.items():
        tensors[f"write_slots of {key}"] = rows.write_slots
        if rows.read_slots is not None:
            tensors[f"read_slots of {key}"] = rows.read_slots
    return tensors


def planned_contents(batch: Batch, pools: Mapping[str, Pool]) -> dict[str, Tensor]:
    """The tensors of the batch and its page-table rows that must not change between planning and running.

    Excludes tokens that an earlier step chooses in between.
    """
    pages = {f"page-table rows of {key}": _pages_of(batch, pools[key]) for key in batch.pools if key in pools}
    tensors = batch_tensors(batch) | pages
    if batch.awaited:
        del tensors["tokens"]
    return tensors


def _pages_of(batch: Batch, pool: Pool) -> Tensor:
    """The pages that the batch's rows read and write, row after row."""
    lengths = zip(batch.context_lens.bound, batch.query_lens.bound, strict=True)
    counts = [min(-(-sum(each) // pool.page_size), pool.table.max_pages) for each in lengths]
    pages = [pool.table.pages[row, :count] for row, count in zip(batch.rows, counts, strict=True)]
    return torch.cat(pages) if pages else pool.table.pages[0, :0]


_OF_CONTEXTS = ("context_lens", "positions")


def check_contents(batch: Batch, pools: Mapping[str, Pool]) -> None:
    """Raises `BatchError` if a tensor of the batch, or a page-table row on the device, differs from what the host
    derives."""
    derived = Batch(batch.work, batch.sources, batch.device, batch.chosen, batch.awaited)
    pairs = {
        "tokens": (batch.tokens, derived.tokens, 0),
        "positions": (batch.positions, derived.positions, 0),
        "query_lens": (batch.query_lens.device, derived.query_lens.device, 0),
        "context_lens": (batch.context_lens.device, derived.context_lens.device, 0),
        "table_rows": (batch.table_rows, derived.table_rows, PADDING_ROW),
    }
    if batch.logit_rows:
        pairs["logit_indices"] = (batch.logit_indices, derived.logit_indices, 0)
    for key, rows in batch.pools.items():
        pairs[f"write_slots of {key}"] = (rows.write_slots, derived.pools[key].write_slots, PADDING_SLOT)
        read, expected = rows.read_slots, derived.pools[key].read_slots
        if read is not None and expected is not None:
            pairs[f"read_slots of {key}"] = (read, expected, PADDING_SLOT)
    if batch.awaited:
        del pairs["tokens"]
    if batch.context_lens.host is None:
        # Only the device knows them, and what follows from them.
        pairs = {name: pairs[name] for name in pairs if name not in _OF_CONTEXTS and not name.startswith("write_slots")}
    for field, (got, expected, padding) in pairs.items():
        _require_equal(field, got, expected, padding)
    for pool in pools.values() if batch.pools else ():
        _check_pages(batch, pool)


def _require_equal(field: str, got: Tensor, expected: Tensor, padding: int) -> None:
    """Requires `got` to equal `expected`, followed by `padding`."""
    found, wanted = got.tolist(), expected.tolist()
    wanted += [padding] * (len(found) - len(wanted))
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one != other:
            raise BatchError(f"{field}[{place}] on the device", None, other, one, "nothing may change it in place")


def _check_pages(batch: Batch, pool: Pool) -> None:
    for index, row in enumerate(batch.rows):
        owned = list(pool.table.owned(row))
        found = pool.table.pages[row, : len(owned)].tolist()
        if found != owned:
            raise BatchError(f"pages in pool {pool.key} on the device", index, owned, found)
