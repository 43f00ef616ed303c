"""The steps of other replicas, as the leading rank knows them: it makes their batches, and runs none of them.

rows of all replicas ──▶ a batch each ──▶ agreed size, if they compute layers together ──▶ orders
                             │
                             └─▶ launched in the account of the replica's cache, where its context lengths are
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sightline.cache.store import NetworkCache
from sightline.core.batch import Batch, StepWork
from sightline.core.batch_memory import StepShape, StepSize

NO_ROWS = StepWork.of(())


class Beside(NamedTuple):
    """The step of another replica."""

    batch: Batch
    shape: StepShape | None
    """The bucket that it is run in; None if it is run eagerly."""


def agreed_size(works: Sequence[StepWork]) -> StepSize:
    """The size that the steps of all replicas are padded to."""
    return StepSize.joined([work.size for work in works])


def idle_beside(batch: Batch, network: NetworkCache, *, is_padded: bool) -> Beside:
    """The step of a replica without rows beside a batch, whose size it has if it `is_padded`."""
    idle = Batch(NO_ROWS, network.sources, batch.device)
    if not is_padded:
        return Beside(idle, None)
    return Beside(idle.pad(batch.num_rows, batch.num_tokens), batch.memory.shape)
