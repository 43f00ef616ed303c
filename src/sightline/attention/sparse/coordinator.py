"""Entries that are all on the device: slots are found through the page table, and nothing is copied.

Knows pools and choices. Does not know entries in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import EntryCoordinator, EntryCounts, EntryPlan, EntryTurn, StepView
from sightline.attention.shared.entry_planes import EntryPlane, entry_planes
from sightline.attention.shared.tile_tokens import TileTokens
from sightline.attention.shared.tiles import RowSpan, row_spans
from sightline.attention.sparse.chosen import ChosenSlots, plan_slots
from sightline.cache.pools import GroupCache, Pool
from sightline.core.batch import Batch
from sightline.core.errors import ConfigError
from sightline.kernels.chosen_slots import FindSlots, chosen_slots

LATENTS = "latent"
"""The pool of a latent group."""
ENTRY = "entry"
"""The plane of its entries."""


@dataclass(frozen=True, eq=False)
class _ResidentTurn(EntryTurn):
    tokens: TileTokens
    found: ChosenSlots
    batch: Batch

    def spans(self) -> tuple[RowSpan, ...]:
        return row_spans(self.batch, None)

    def fetch(self, layer: int, chosen: Tensor) -> None:
        """Nothing to do: every entry is there."""

    def slots(self, chosen: Tensor, part: slice) -> Tensor:
        return self.found.of(chosen[part], part)


@dataclass(frozen=True, eq=False)
class ResidentPlan(EntryPlan):
    """A step that reads the pool's planes, or, without a cache, its own entries."""

    turns: tuple[EntryTurn, ...]
    reads_step: bool
    planes: Sequence[Tensor]
    """Per layer: [num_slots, latent + rope]."""
    entries: Sequence[EntryPlane]
    """Accessors for `planes`."""
    new_slots: Tensor | None

    def prepare(self) -> None:
        """Nothing to do: the pool is read as it is."""

    def write(self, layer: int, new: Tensor) -> None:
        if self.new_slots is not None:
            self.entries[layer].write(self.new_slots, new)

    def keep(self, layer: int) -> None:
        """Nothing to do: the pool has them."""

    def plane(self, layer: int) -> Tensor:
        return self.planes[layer]

    def gather(self, layer: int, slots: Tensor, out: Tensor) -> None:
        self.entries[layer].gather(slots, out)


class ResidentEntries(EntryCoordinator):
    """Serves every group whose pools are on the device. Only latent groups ask it for plans: the others find entries
    through the page table themselves."""

    def __init__(self, cache: GroupCache, find: FindSlots = chosen_slots) -> None:
        """`find` is the device's own way to find slots."""
        if cache.is_on_host:
            raise ConfigError(
                f"expected a coordinator with a buffer on the device for {cache.group}, whose entries are in host "
                "memory, got one for entries on the device; use HotEntries"
            )
        self.cache = cache
        self._find = find
        pool = cache.pools.get(LATENTS)
        self._planes = () if pool is None else pool.plane(ENTRY).unbind(0)
        self._entries = () if pool is None else entry_planes(pool, ENTRY)

    @property
    def num_bytes(self) -> int:
        return 0

    def counts(self) -> EntryCounts:
        return EntryCounts()

    def plan(self, step: StepView, buffers: PlanBuffers) -> ResidentPlan:
        pool = self.cache.pools[LATENTS]
        turns = _one_turn(step, pool, buffers, self._find)
        return ResidentPlan(turns, step.is_transient, self._planes, self._entries, step.write_slots(pool))


def plan_without_cache(step: StepView, pool: Pool, buffers: PlanBuffers) -> ResidentPlan:
    """A step that reads its own entries and keeps none, wherever the pool is."""
    return ResidentPlan(_one_turn(step, pool, buffers, chosen_slots), True, (), (), None)


def _one_turn(step: StepView, pool: Pool, buffers: PlanBuffers, find: FindSlots) -> tuple[EntryTurn, ...]:
    """All tokens, padding included, if the step is sparse."""
    if not step.is_sparse:
        return ()
    count = step.batch.num_tokens
    tokens = buffers.take("tokens", (count,), torch.int64)
    torch.arange(count, out=tokens)
    found = plan_slots(step, pool, buffers, find)
    return (_ResidentTurn(TileTokens(count, 1, tokens, slice(0, count)), found, step.batch),)
