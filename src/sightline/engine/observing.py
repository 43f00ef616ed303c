"""What others see of the step loop: drafters the rows that are about to be committed, metrics the use of caches."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from sightline.cache.prefix import PrefixCache
from sightline.cache.store import CacheStore
from sightline.core.errors import DeviceFaultError
from sightline.engine.launch import LaunchedStep, LifeT, StepResults
from sightline.speculative.drafter import ObservedRow, ObservedStep
from sightline.speculative.drafts import AdaptiveDrafts

logger = logging.getLogger("sightline")


def share_in_use(stores: Sequence[CacheStore], prefixes: Sequence[PrefixCache]) -> float:
    """The share of usable pages that sequences hold, 0 to 1."""
    usable = sum(store.num_usable_pages for store in stores)
    free = sum(store.num_free_pages for store in stores) + sum(each.num_evictable for each in prefixes)
    return (usable - free) / max(1, usable)


def show(drafts: AdaptiveDrafts, step: LaunchedStep[LifeT], results: StepResults) -> None:
    """Shows the drafter a step. Its rows still hold their pages, and whatever it computes is there when they are
    committed, so that its entries are shared with the model's."""
    rows: list[ObservedRow] = []
    start = 0
    for index, (row, live) in enumerate(zip(step.rows, step.lives, strict=True)):
        if not row.sequence.is_out:
            try:
                result = results.take(index)
                if live.error is None:
                    rows.append(ObservedRow(row, result, start))
            except (DeviceFaultError, torch.AcceleratorError):
                raise
            except Exception:
                logger.debug("row %d cannot be read: it raises again, and ends, when it is committed", index)
        start += row.num_tokens
    drafts.observe_step(ObservedStep(rows, step.states))
