"""Assembles a batch from scheduled rows, with or without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sightline.cache.store import CacheStore
from sightline.core.batch import Batch, RowWork, StepWork


def assemble(work: Sequence[RowWork], store: CacheStore, chosen: Tensor | None = None, *, awaited: int = 0) -> Batch:
    """A batch of paged rows. The pages that they write must be allocated, and belong to no other row.

    `chosen` are the tokens that steps in flight choose, if rows continue some; `awaited` is the number of tokens that
    the step before will choose, if it is not launched yet.
    """
    return Batch(StepWork.of(work), store.main.sources, store.device, chosen, awaited)


def assemble_transient(work: Sequence[RowWork], device: torch.device) -> Batch:
    """A batch without a cache. Every row is a whole text, without context."""
    return Batch(StepWork.of(work), (), device)
