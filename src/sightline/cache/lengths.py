"""How much of each page-table row may be read: committed entries, and those that launched steps will have written.

    |---- committed ----|-- in flight --|
    |------------ launched -------------|

Every slot that a plan reads was committed or launched before the step, in stream order, or is written by that plan. So
a row's context must be exactly what was launched: less would overwrite existing entries, more would read entries that
were never written. A launch that fails is taken back; a commit says that the entries exist.

Owns the numbers. Does not know pages: the store opens, fills and closes rows.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from operator import add
from typing import TypeAlias

from sightline.cache.states import STATES, StateTable
from sightline.core.batch import CAUSAL, Batch, BatchId, MaskKind
from sightline.core.errors import BatchError
from sightline.core.interruption import uninterrupted
from sightline.core.lengths import picked

_Launch: TypeAlias = tuple[BatchId, int, int, int]
"""A step in one row: its batch, the start and the stop of the entries that it writes, and its lane.

A plain tuple, because one is created per row per step. Start and stop are equal if later steps may read none of them.
"""
_KEEP_LENGTH = (MaskKind.TREE, MaskKind.CONTEXT)
"""Masks of rows whose launched length a step leaves as it is."""
_NOBODY = BatchId(0)
"""Stands for the batch of a step that ran without one."""
_LAUNCHES_KEPT = 32
"""Steps after which committed launches are dropped. To look for them at every step would be slow."""


class RowLengths:
    """The committed length of every page-table row of a store, and the launches behind it."""

    def __init__(self, num_rows: int, states: StateTable | None = None) -> None:
        """`states` are the recurrent states of the rows, which go with the lengths; None if the network has none."""
        self.states = states
        self._committed = [0] * (num_rows + 1)
        self._launches: list[list[_Launch]] = [[] for _ in range(num_rows + 1)]
        """The launches of each row, in order: each starts where the one before it stops, or repeats it.
        `_uncommitted` drops those that are committed."""
        self._launched = [0] * (num_rows + 1)
        """Where each row's last launch stops; without one, the committed length."""
        self._failed: dict[int, Set[BatchId]] = {}
        """By row: launches that were taken back while others stand behind them. Those have read missing entries."""
        self._has_lanes = False
        """True once a lane other than the first has launched a step."""
        self._num_steps = 0

    def committed(self, row: int) -> int:
        return self._committed[row]

    def launched(self, row: int) -> int:
        return self._launched[row]

    def check(self, batch: Batch, lane: int) -> None:
        """Raises `BatchError` unless each row's context equals its launched length, in the same lane.

        A batch that was the last one launched on all its rows may run again until it is committed: it writes the same
        entries.
        """
        if batch.pools:
            self._check(batch, lane, picked(self._launched, batch.rows), "as was launched")

    def check_in_turn(self, batches: Sequence[Batch], lane: int) -> None:
        """Raises `BatchError` unless the batches can be launched in this order, in the same lane.

        Each row's context must equal its launched length, or the length that the batches before it will have written.
        """
        ahead: dict[int, int] = {}
        for batch in batches:
            if batch.pools:
                expected = tuple([ahead.get(row, self._launched[row]) for row in batch.rows])
                self._check(batch, lane, expected, "where the step before it stops")
                ahead.update(zip(batch.rows[: len(batch.work)], self._ends(batch), strict=False))

    def _check(self, batch: Batch, lane: int, expected: tuple[int, ...], why: str) -> None:
        """`expected` [num_rows] are the contexts that the batch must have; `why` says what they are."""
        contexts = batch.context_lens
        if contexts.host is None:
            self._check_bounds(batch, expected, why)
        elif expected != contexts.host:
            self._explain(batch, contexts.host, expected, why)
        if lane or self._has_lanes:
            self._check_lanes(batch, lane)
        if self._failed:
            self._check_missing(batch)

    def launch(self, batch: Batch, lane: int) -> None:
        """Records that the batch is about to run: later steps in the same lane may read what it writes.

        Raises `BatchError` as `check` does.
        """
        if not batch.pools:
            return
        self.check(batch, lane)
        self._has_lanes |= lane != 0
        self._num_steps += 1
        if self._num_steps % _LAUNCHES_KEPT == 0:
            # A batch that ran again and again is recorded once.
            self._launches = [list(dict.fromkeys(self._uncommitted(row))) for row in range(len(self._launches))]
        launches, launched, batch_id = self._launches, self._launched, batch.batch_id
        starts, stops = self._spans(batch)
        for row, start, stop in zip(batch.rows[: len(batch.work)], starts, stops, strict=False):
            launches[row].append((batch_id, start, stop, lane))
            launched[row] = stop
        if self.states is not None and STATES in batch.pools:
            with uninterrupted():
                for row, start, stop in zip(batch.rows[: len(batch.work)], starts, stops, strict=False):
                    self.states.launch(row, start, stop)

    def advance(self, row: int, length: int) -> None:
        """Records that a step writing a row's entries up to `length` is running, for callers that run rows without a
        batch."""
        launched = self._launched[row]
        if length < launched:
            raise BatchError("launched length", None, f"at least {launched}, as was launched", length)
        self._uncommitted(row).append((_NOBODY, launched, length, 0))
        self._launched[row] = length

    def take_back(self, batch: Batch) -> None:
        """Takes back a launched batch that failed, because its entries were not written.

        A step launched after it has read missing entries: it must be taken back too, and until then the row accepts no
        other step. Rows in which the batch is not launched, or is committed, stay as they are.
        """
        for row in batch.rows[: len(batch.work)] if batch.pools else ():
            launches = self._uncommitted(row)
            # Nothing is missing where the batch wrote only candidates.
            launches[:] = [launch for launch in launches if launch[0] != batch.batch_id or launch[1] < launch[2]]
            self._drop(row, self._failed.get(row, frozenset()) | {batch.batch_id})
            if self.states is not None:
                with uninterrupted():
                    self.states.unlaunch(row, self._launched[row])

    def commit(self, row: int, length: int) -> None:
        """Records that the first `length` entries of a row exist. Idempotent."""
        if length <= self._committed[row]:
            return
        if length > self._launched[row]:
            raise BatchError("committed length", None, f"at most {self._launched[row]}, as was launched", length)
        if row in self._failed and length > (missing := self._missing_from(row)):
            raise BatchError("committed length", None, f"at most {missing}: the step that writes more failed", length)
        if self.states is not None:
            self.states.commit(row, length)
        self._committed[row] = length

    def settle(self, row: int, launched: int) -> None:
        """Lowers the launched length to `launched`, because a launched step did not complete. Never raises it."""
        if launched < self._committed[row]:
            raise BatchError("launched length", None, f"at least {self._committed[row]}, as is committed", launched)
        launches = self._uncommitted(row)
        launches[:] = [
            (batch_id, start, min(stop, launched), lane) for batch_id, start, stop, lane in launches if start < launched
        ]
        self._drop(row, self._failed.get(row, frozenset()))
        if self.states is not None:
            self.states.settle(row, self._launched[row])

    def settle_all(self, rows: Sequence[int], launched: Sequence[int]) -> None:
        """Does as `settle` for every row."""
        lengths = tuple(launched)
        if picked(self._launched, rows) == lengths == picked(self._committed, rows):
            for row in rows:
                self._launches[row].clear()
                if self.states is not None:
                    self.states.settle(row, self._launched[row])
        else:
            for row, length in zip(rows, lengths, strict=True):
                self.settle(row, length)

    def require_written(self, row: int) -> None:
        """Raises `BatchError` if a step outside the first lane may still write the row's pages after they are freed.

        Steps of the first lane run in order, so their pages may be freed while one of them is running.
        """
        for _, _, stop, lane in self._uncommitted(row):
            if lane:
                raise BatchError(
                    "pages",
                    None,
                    f"all that lane {lane} launched in row {row} to be committed before its pages go",
                    f"{self._committed[row]} of {stop} entries",
                    "commit that step, or take it back",
                )

    def fill(self, row: int, length: int) -> None:
        """Sets a row to exactly `length` existing entries, which were copied, shared or imported."""
        self._committed[row] = self._launched[row] = length
        self._launches[row].clear()
        self._failed.pop(row, None)
        if self.states is not None:
            self.states.fill(row, length)

    def _spans(self, batch: Batch) -> tuple[Sequence[int], Sequence[int]]:
        """The first entry that each row writes, and the entry after its last.

        If only the device knows the lengths, and for trees, the new entries are candidates: nothing reads them until
        they are settled, and the row's launched length stays. Tokens that see the context alone have no entries.
        """
        contexts, queries = batch.context_lens.host, batch.query_lens.host
        if contexts is None or queries is None:
            launched = picked(self._launched, batch.rows)
            return launched, launched
        if batch.masks.count(CAUSAL) == len(batch.masks):
            return contexts, tuple(map(add, contexts, queries))
        rows = zip(contexts, queries, batch.masks, strict=True)
        return contexts, [context + (0 if mask.kind in _KEEP_LENGTH else query) for context, query, mask in rows]

    def _ends(self, batch: Batch) -> Sequence[int]:
        """The least context of a step that follows the batch in each row; an upper bound if only the device knows the
        lengths."""
        if batch.context_lens.host is not None and batch.query_lens.host is not None:
            return self._spans(batch)[1]
        return tuple(map(add, batch.context_lens.bound, batch.query_lens.bound))

    def _uncommitted(self, row: int) -> list[_Launch]:
        """The launches of a row that are not committed. A tree that follows the committed entries is not."""
        launches, committed = self._launches[row], self._committed[row]
        while launches and launches[0][1] < committed >= launches[0][2]:
            del launches[0]
        return launches

    def _drop(self, row: int, failed: Set[BatchId]) -> None:
        """Removes failed launches that nothing stands behind, and sets the launched length to where the rest stops."""
        launches = self._launches[row]
        while launches and launches[-1][0] in failed:
            launches.pop()
        self._launched[row] = max(launches[-1][2] if launches else 0, self._committed[row])
        left = failed & {launch[0] for launch in launches}
        if left:
            self._failed[row] = left
        else:
            self._failed.pop(row, None)

    def _missing_from(self, row: int) -> int:
        """The first entry that a failed launch should have written."""
        failed = self._failed[row]
        first = next(start for batch_id, start, _, _ in self._launches[row] if batch_id in failed)
        return max(first, self._committed[row])

    def _check_bounds(self, batch: Batch, launched: Sequence[int], why: str) -> None:
        """If only the device knows the contexts, checks their upper bounds."""
        for index, (bound, length) in enumerate(zip(batch.context_lens.bound, launched, strict=True)):
            if bound < length:
                raise BatchError("context_lens.bound", index, f"at least {length}, {why}", bound)

    def _explain(self, batch: Batch, contexts: Sequence[int], launched: Sequence[int], why: str) -> None:
        starts, stops = self._spans(batch)
        for index, (context, length) in enumerate(zip(contexts, launched, strict=True)):
            # The last launch is another if settling left only the beginning of what the batch wrote.
            again = (batch.batch_id, starts[index], stops[index])
            if context != length and again not in [launch[:3] for launch in self._uncommitted(batch.rows[index])[-1:]]:
                remedy = (
                    "run the steps that write the entries between them first, or fill the row"
                    if context > length
                    else "the entries after it would be overwritten: build the batch from where the row is, or take "
                    "back what was launched"
                )
                raise BatchError("context_lens", index, f"{length}, {why}", context, remedy)

    def _check_missing(self, batch: Batch) -> None:
        for index, row in enumerate(batch.rows):
            if row in self._failed:
                raise BatchError(
                    "context_lens",
                    index,
                    f"{self._missing_from(row)}, since a step that was launched there failed",
                    self._launched[row],
                    "take back the steps behind it too",
                )

    def _check_lanes(self, batch: Batch, lane: int) -> None:
        """Raises `BatchError` if another lane launched another step in one of the rows that is not committed."""
        for index, row in enumerate(batch.rows):
            for batch_id, _, _, other in self._uncommitted(row):
                if other != lane and batch_id != batch.batch_id:
                    raise BatchError(
                        "lane",
                        index,
                        f"{other}, where its last step was launched",
                        lane,
                        "commit that step first: steps of two lanes have no order",
                    )
