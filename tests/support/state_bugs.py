"""Bugs to plant in how recurrent states are kept, each of which gives an error or a wrong answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from sightline.cache.prefix import PrefixCache, PrefixMatch, PrefixNode
from sightline.cache.states import StateCheckpoint, StatePool, StateStage, StateTable
from sightline.cache.store import CacheStore
from sightline.scheduler.checkpoints import Checkpoints
from sightline.scheduler.sequence import SequenceState

Plant = Callable[[pytest.MonkeyPatch], None]


def read_a_stale_slot(patch: pytest.MonkeyPatch) -> None:
    """A row reads the oldest state that it holds, whatever the tag says."""

    def oldest(self: StateTable, row: int, position: int, index: int | None) -> int:
        del position, index
        return self._held[row][min(self._held[row])][0]

    patch.setattr(StateTable, "_readable", oldest)


def read_the_state_of_another_row(patch: pytest.MonkeyPatch) -> None:
    """The slots of a step are in the wrong order."""
    found = StateTable.slots_to_read

    def turned(self: StateTable, rows: Sequence[int], contexts: Sequence[int]) -> list[int]:
        slots = found(self, rows, contexts)
        return slots[1:] + slots[:1]

    patch.setattr(StateTable, "slots_to_read", turned)


def update_in_place(patch: pytest.MonkeyPatch) -> None:
    """A row writes its new state into the slot that it reads, so that a step that runs again updates it twice."""
    written = StateTable.slots_to_write

    def over(
        self: StateTable, rows: Sequence[int], firsts: Sequence[int], counts: Sequence[int], candidates: Sequence[int]
    ) -> list[int]:
        slots = written(self, rows, firsts, counts, candidates)
        end = 0
        for row, first, count in zip(rows, firsts, counts, strict=True):
            end += count
            if first and count:
                self._held[row][first + count], slots[end - 1] = self._held[row][first], self._held[row][first][0]
        return slots

    patch.setattr(StateTable, "slots_to_write", over)


def commit_the_state_behind_all_guesses(patch: pytest.MonkeyPatch) -> None:
    """The row goes on from the state behind its last guess, also if that was wrong."""
    commit = StateTable.commit

    def last(self: StateTable, row: int, length: int) -> None:
        held = self._held[row]
        if length and max(held) > length:
            last_held = held[max(held)]
            self._drop(row, length)
            self._allocator.share([last_held[0]])
            held[length] = last_held
            self._positions[last_held[0]] = length
        commit(self, row, length)

    patch.setattr(StateTable, "commit", last)


def commit_one_guess_too_few(patch: pytest.MonkeyPatch) -> None:
    """The row goes on from the state in front of the last token that was accepted."""
    commit = StateTable.commit

    def early(self: StateTable, row: int, length: int) -> None:
        held = self._held[row]
        if length - 1 in held and self._stages[held[length - 1][0]] is StateStage.LAUNCHED:
            held[length - 1], held[length] = held[length], held[length - 1]
            self._positions[held[length - 1][0]], self._positions[held[length][0]] = length - 1, length
        commit(self, row, length)

    patch.setattr(StateTable, "commit", early)


def leave_the_tag_of_a_freed_slot(patch: pytest.MonkeyPatch) -> None:
    """A slot keeps its tag when nobody owns it, and a claim does not set another."""
    claim = StateTable._claim

    def untagged(self: StateTable, row: int, position: int, index: int) -> int:
        before, was_held = (list(self._stages), list(self._positions)), position in self._held[row]
        slot = claim(self, row, position, index)
        if not was_held and before[0][slot] is not StateStage.FREE:
            self._stages[slot], self._positions[slot] = before[0][slot], before[1][slot]
        return slot

    def free(self: StateTable, slot: int) -> None:
        self._allocator.release_one(slot)

    patch.setattr(StateTable, "_claim", untagged)
    patch.setattr(StateTable, "_free", free)


def use_pages_behind_the_last_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """A hit has the length of its cached pages, as in a model without recurrent layers."""
    find = PrefixCache.find

    def longest(self: PrefixCache, namespace: str, tokens: Sequence[int]) -> PrefixMatch:
        states, self._states = self._states, None
        try:
            return find(self, namespace, tokens)
        finally:
            self._states = states

    patch.setattr(PrefixCache, "find", longest)


def begin_with_an_empty_state_behind_a_prefix(patch: pytest.MonkeyPatch) -> None:
    """The pages of a prefix are shared, and its state is forgotten."""

    def nothing(self: CacheStore, row: int, checkpoint: StateCheckpoint) -> None:
        assert self.main.states is not None
        self.main.states.put(row, checkpoint.position)

    patch.setattr(CacheStore, "restore", nothing)


def restore_without_owning(patch: pytest.MonkeyPatch) -> None:
    """A row that goes on from a checkpoint is not one of its owners."""

    def borrowed(self: StateTable, row: int, checkpoint: StateCheckpoint) -> None:
        self._held[row][checkpoint.position] = (checkpoint.slot, checkpoint.generation)

    patch.setattr(StateTable, "restore", borrowed)


def keep_a_checkpoint_of_the_wrong_position(patch: pytest.MonkeyPatch) -> None:
    """The tree gets the state that the row goes on from, wherever that is."""

    def latest(self: StateTable, row: int, position: int) -> StateCheckpoint | None:
        held = self._held[row]
        ends = [each for each, (slot, _) in held.items() if self._stages[slot] is StateStage.COMMITTED]
        if not ends:
            return None
        self._positions[held[max(ends)][0]] = position
        return StateCheckpoint(*held[max(ends)], position)

    patch.setattr(StateTable, "checkpoint", latest)


def take_a_fork_from_where_its_leader_is(patch: pytest.MonkeyPatch) -> None:
    """Another continuation of a prompt begins with the state behind what the first one has generated."""

    def current(self: Checkpoints, leader: SequenceState) -> StateCheckpoint | None:
        row = leader.table_row
        found = None if row is None else self._states.checkpoint(row, max(self._states.positions(row)))
        return None if found is None else found._replace(position=len(leader.request.prompt_token_ids) - 1)

    patch.setattr(Checkpoints, "fork", current)
    patch.setattr(StateTable, "_require_kept", lambda self, checkpoint: None)


def forget_to_free_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """A node that is evicted, or loses its checkpoint, leaves the slot behind."""

    def lost(self: PrefixCache, node: PrefixNode) -> None:
        if node.checkpoint is not None:
            del self._with_checkpoint[node]
            node.checkpoint = None

    patch.setattr(PrefixCache, "detach", lost)


def write_the_empty_state(patch: pytest.MonkeyPatch) -> None:
    """Something is added to slot 0, which every sequence begins with."""
    fill = StatePool.fill

    def everywhere(self: StatePool, slots: Sequence[int], value: float) -> None:
        fill(self, slots, value)
        for plane in self._planes.values():
            plane[:, 0] += 0.5

    patch.setattr(StatePool, "fill", everywhere)


def free_the_state_that_a_step_in_flight_reads(patch: pytest.MonkeyPatch) -> None:
    """A row gives up the state that it goes on from as soon as a step is launched."""
    launch = StateTable.launch

    def eager(self: StateTable, row: int, start: int, stop: int) -> None:
        launch(self, row, start, stop)
        if start in self._held[row] and start < stop:
            self._drop(row, start)

    patch.setattr(StateTable, "launch", eager)


STATE_BUGS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        read_a_stale_slot,
        read_the_state_of_another_row,
        update_in_place,
        commit_the_state_behind_all_guesses,
        commit_one_guess_too_few,
        leave_the_tag_of_a_freed_slot,
        use_pages_behind_the_last_checkpoint,
        begin_with_an_empty_state_behind_a_prefix,
        restore_without_owning,
        keep_a_checkpoint_of_the_wrong_position,
        take_a_fork_from_where_its_leader_is,
        forget_to_free_a_checkpoint,
        write_the_empty_state,
        free_the_state_that_a_step_in_flight_reads,
    )
}
