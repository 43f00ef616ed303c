"""A batch of scheduled rows, over a store's pools or over none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sightline.cache.pools import CacheStore
from sightline.core.batch import Batch, RowWork


def assemble(work: Sequence[RowWork], store: CacheStore) -> Batch:
    """A batch of paged rows. The pages that they write must be there already, and be nobody else's."""
    return Batch(tuple(work), store.pools, store.device)


def assemble_transient(work: Sequence[RowWork], device: torch.device) -> Batch:
    """A batch that touches no cache: every row is whole, with no context."""
    return Batch(tuple(work), (), device)
