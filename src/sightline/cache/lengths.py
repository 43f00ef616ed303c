"""How much of each page-table row may be read: committed entries, and those that launched steps will have written.

    |---- committed ----|-- in flight --|
    |------------ launched -------------|

Every slot that a plan reads was committed or launched before the step, in stream order, or is written by that plan. So
a row's context must be exactly what was launched: less would overwrite existing entries, more would read entries that
were never written. A launch that fails is taken back; a commit says that the entries exist.

Owns the numbers. Does not know pages: the store opens, fills and closes rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, itemgetter

from sightline.core.batch import PADDING_ROW, Batch, BatchId
from sightline.core.errors import BatchError

_NOBODY = BatchId(0)


class RowLengths:
    """The committed and the launched length of every page-table row of a store."""

    def __init__(self, num_rows: int) -> None:
        self._committed = [0] * (num_rows + 1)
        self._launched = [0] * (num_rows + 1)
        self._launched_by = [_NOBODY] * (num_rows + 1)
        """The batch of each row's last launch."""
        self._lanes: dict[int, int] = {}
        """The lane of each row's last launch; only kept once a lane other than the first has launched."""
        self._missing_from: dict[int, int] = {}
        """Rows of a failed step that another step was launched after: the length at which the missing entries begin."""

    def committed(self, row: int) -> int:
        return self._committed[row]

    def launched(self, row: int) -> int:
        return self._launched[row]

    def check(self, batch: Batch, lane: int) -> None:
        """Raises `BatchError` unless each row's context equals its launched length, in the same lane.

        A batch that was the last one launched on all its rows may run again: it writes the same entries.
        """
        if not batch.pools:
            return
        expected = _items(self._launched, batch.rows)
        contexts = batch.context_lens
        if contexts.host is None:
            self._check_bounds(batch, expected)
        elif expected != contexts.host:
            self._explain(batch, contexts.host, expected)
        if lane or self._lanes:
            self._check_lanes(batch, lane)
        if self._missing_from:
            self._check_missing(batch)

    def launch(self, batch: Batch, lane: int) -> None:
        """Records that the batch is about to run: later steps in the same lane may read what it writes."""
        if not batch.pools:
            return
        launched, launched_by, batch_id = self._launched, self._launched_by, batch.batch_id
        contexts, queries = batch.context_lens.host, batch.query_lens.host
        for row in batch.rows:
            launched_by[row] = batch_id
        # If only the device knows the lengths, and for trees, the new entries are candidates: nothing reads them until
        # they are settled.
        if contexts is not None and queries is not None:
            for row, mask, length in zip(batch.rows, batch.masks, map(add, contexts, queries), strict=True):
                if mask.tree is None:
                    launched[row] = length
        launched[PADDING_ROW] = 0
        if lane or self._lanes:
            self._lanes |= dict.fromkeys(batch.rows, lane)

    def advance(self, row: int, length: int) -> None:
        """Records that a step writing a row's entries up to `length` is running, for callers that run rows without a
        batch."""
        self._launched[row] = length
        self._launched_by[row] = _NOBODY

    def take_back(self, batch: Batch) -> None:
        """Takes back a launched batch that failed, because its entries were not written.

        A step launched after it has read missing entries: it must be taken back too, and until then the row accepts no
        other step.
        """
        if not batch.pools:
            return
        contexts = batch.context_lens
        known = contexts.bound if contexts.host is None else contexts.host
        for row, context, new in zip(batch.rows, known, batch.query_lens.bound, strict=True):
            first = max(min(context, self._missing_from.get(row, context)), self._committed[row])
            if self._launched_by[row] in (batch.batch_id, _NOBODY):
                self.settle(row, first)
            elif self._committed[row] < context + new and context < self._launched[row]:
                self._missing_from[row] = first

    def commit(self, row: int, length: int) -> None:
        """Records that the first `length` entries of a row exist. Idempotent."""
        if length > self._launched[row]:
            raise BatchError("committed length", None, f"at most {self._launched[row]}, as was launched", length)
        if length > self._missing_from.get(row, length):
            missing = self._missing_from[row]
            raise BatchError("committed length", None, f"at most {missing}: the step that writes more failed", length)
        if length > self._committed[row]:
            self._committed[row] = length

    def settle(self, row: int, launched: int) -> None:
        """Lowers the launched length to `launched`, because a launched step did not complete. Never raises it."""
        if launched < self._committed[row]:
            raise BatchError("launched length", None, f"at least {self._committed[row]}, as is committed", launched)
        self._launched[row] = min(launched, self._launched[row])
        self._launched_by[row] = _NOBODY
        if self._launched[row] <= self._missing_from.get(row, -1):
            del self._missing_from[row]

    def require_written(self, row: int) -> None:
        """Raises `BatchError` if a step outside the first lane may still write the row's pages after they are freed.

        Steps of the first lane run in order, so their pages may be freed while one of them is running.
        """
        if self._lanes.get(row, 0) and self._committed[row] < self._launched[row]:
            raise BatchError(
                "pages",
                None,
                f"all that lane {self._lanes[row]} launched in row {row} to be committed before its pages go",
                f"{self._committed[row]} of {self._launched[row]} entries",
                "commit that step, or take it back",
            )

    def fill(self, row: int, length: int) -> None:
        """Sets a row to exactly `length` existing entries, which were copied, shared or imported."""
        self._committed[row] = self._launched[row] = length
        self._launched_by[row] = _NOBODY
        self._lanes.pop(row, None)
        self._missing_from.pop(row, None)

    def _check_bounds(self, batch: Batch, launched: Sequence[int]) -> None:
        """If only the device knows the contexts, checks their upper bounds."""
        for index, (bound, length) in enumerate(zip(batch.context_lens.bound, launched, strict=True)):
            if bound < length and not self._is_run_again(batch, index):
                raise BatchError("context_lens.bound", index, f"at least {length}, as was launched", bound)

    def _explain(self, batch: Batch, contexts: Sequence[int], launched: Sequence[int]) -> None:
        for index, (context, length) in enumerate(zip(contexts, launched, strict=True)):
            if context != length and not self._is_run_again(batch, index):
                remedy = (
                    "run the steps that write the entries between them first, or fill the row"
                    if context > length
                    else "the entries after it would be overwritten: build the batch from where the row is, or take "
                    "back what was launched"
                )
                raise BatchError("context_lens", index, f"{length}, as was launched", context, remedy)

    def _is_run_again(self, batch: Batch, index: int) -> bool:
        return self._launched_by[batch.rows[index]] == batch.batch_id

    def _check_missing(self, batch: Batch) -> None:
        for index, row in enumerate(batch.rows):
            if row in self._missing_from:
                raise BatchError(
                    "context_lens",
                    index,
                    f"{self._missing_from[row]}, since a step that was launched there failed",
                    self._launched[row],
                    "take back the steps behind it too",
                )

    def _check_lanes(self, batch: Batch, lane: int) -> None:
        """Raises `BatchError` if launched but uncommitted entries are read outside the lane that writes them."""
        contexts = batch.context_lens
        known = contexts.bound if contexts.host is None else contexts.host
        for index, (row, context) in enumerate(zip(batch.rows, known, strict=True)):
            if context > self._committed[row] and self._lanes.get(row, 0) != lane:
                raise BatchError(
                    "lane",
                    index,
                    f"{self._lanes.get(row, 0)}, where its last step was launched",
                    lane,
                    "commit that step first: steps of two lanes have no order",
                )


def _items(values: Sequence[int], places: tuple[int, ...]) -> tuple[int, ...]:
    """The values at these indices, picked in one call."""
    if len(places) > 1:
        found: tuple[int, ...] = itemgetter(*places)(values)
        return found
    return tuple([values[place] for place in places])
