"""What the leading rank says of a replica's part of a step: its rows, and what changed of their pages and states.

Knows batches and caches, and which pages were told before. Does not know how an order is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from sightline.cache.store import NetworkCache
from sightline.core.batch import Batch, MaskKind
from sightline.core.batch_memory import StepShape
from sightline.core.errors import BatchError
from sightline.distributed.orders import PagesOfRow, PartOrder, StatesOfRow, TreeOfRow


class PartTeller:
    """Says what a replica computes. A page is told once: in a part that was `sent`."""

    def __init__(self, network: NetworkCache) -> None:
        """`network` is the model's cache of the replica, or the leader's account of it."""
        self._network = network
        self._told: dict[tuple[int, int], tuple[int, int]] = {}
        """By pool and row: the version of the row, and how many of its pages the others know."""
        self._unsent: dict[tuple[int, int], tuple[int, int]] = {}
        """What they will know besides once the last part is sent."""

    def part(self, batch: Batch, shape: StepShape | None) -> PartOrder:
        """The part of an order for a batch that is run in a bucket of this shape, or eagerly. Call `sent` once it is
        sent: a part that is not, because the step failed before, is forgotten."""
        work = batch.work
        masks = {mask.kind for mask in work.masks}
        if not batch.pools or masks - {MaskKind.CAUSAL, MaskKind.TREE}:
            raise BatchError(
                "rows", None, "rows that generate, as several ranks compute them", "a text that is embedded"
            )
        return PartOrder(
            list(work.table_rows),
            list(work.context_lens),
            list(work.query_lens),
            list(work.num_logits),
            list(work.num_candidates),
            batch.num_rows,
            batch.num_tokens,
            None if shape is None else (shape.size, shape.query_bound),
            self._pages(work.table_rows),
            self._states(batch),
            _trees(batch),
        )

    def sent(self) -> None:
        """Records that the others have the last part."""
        self._told |= self._unsent

    def _pages(self, rows: Sequence[int]) -> list[PagesOfRow]:
        """The pages that the rows got since the others were told."""
        found = []
        self._unsent = {}
        for number, pool in enumerate(self._network.pools):
            table = pool.table
            for row in rows:
                version, count = self._told.get((number, row), (-1, 0))
                current, owned = table.version(row), table.num_owned(row)
                first = count if version == current else 0
                if (version, count) != (current, owned):
                    found.append(PagesOfRow(number, row, first, list(table.pages_of(row)[first:])))
                    self._unsent[number, row] = (current, owned)
        return found

    def _states(self, batch: Batch) -> list[StatesOfRow]:
        """The states that each row of the step reads and writes."""
        states, work = self._network.states, batch.work
        if states is None:
            return []
        reads = states.slots_to_read(work.table_rows, work.context_lens)
        kept, start, found = batch.pools[states.key].kept, 0, []
        for read, context_len, count in zip(reads, work.context_lens, work.query_lens, strict=True):
            slots = [(context_len + place + 1, slot) for place, slot in enumerate(kept[start : start + count]) if slot]
            found.append(StatesOfRow(read, [position for position, _ in slots], [slot for _, slot in slots]))
            start += count
        return found


def _trees(batch: Batch) -> list[TreeOfRow]:
    found = []
    for index, (mask, positions) in enumerate(zip(batch.work.masks, batch.work.positions, strict=True)):
        if mask.tree is not None and positions is not None:
            sees = [each.nonzero().flatten().tolist() for each in mask.tree]
            found.append(TreeOfRow(index, list(positions), sees))
    return found
