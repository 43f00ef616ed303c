"""Which recurrent states are kept for others, and how long.

A sequence that begins alike can go on only where a state was kept. States are large and pages are many, so a state is
kept only where a later sequence is likely to go on:

    prompt      behind its last whole page: the same prompt again, or another continuation of it
    branch      behind the last cached page that a new prompt shares with others, where no state was kept yet
    chunk       behind each chunk of a long prompt that ends with a page
    answer      behind its last whole page, which moves on as it grows: the next turn of a conversation
    fork        behind the last but one token of a prompt, while other continuations of the same request wait

Those of the first four go into the prefix tree with their page. Knows positions, pins and the tree. Does not know
slots, nor what a state holds.
"""

from __future__ import annotations

from sightline.cache.prefix import PrefixCache
from sightline.cache.states import StateCheckpoint, StateTable
from sightline.scheduler.sequence import ScheduledRow, SequenceState


class Checkpoints:
    """The states of one network that outlive a step."""

    def __init__(self, states: StateTable, prefixes: PrefixCache | None, page_size: int) -> None:
        """Without `prefixes`, a state is kept for waiting continuations of the same request only."""
        self._states = states
        self._prefixes = prefixes
        self._page_size = page_size

    def ask(self, row: ScheduledRow, *, has_followers: bool) -> None:
        """Asks for states behind some of the tokens that a row is about to compute.

        If no more states may be kept, the row keeps fewer, or none.
        """
        pinned = row.sequence.pinned
        for position in self._wanted(row, has_followers=has_followers):
            if position not in pinned and self.make_room():
                self._states.pin(row.table_row, position)
                pinned.add(position)

    def _wanted(self, row: ScheduledRow, *, has_followers: bool) -> set[int]:
        sequence, size, stop = row.sequence, self._page_size, row.seq_len
        wanted = set[int]()
        if self._prefixes is not None:
            # A sequence with the same tokens computes the last one again. Any guess may be the last that is accepted.
            ends = (
                (len(sequence.tokens) - 1) // size * size,
                sequence.branch,
                *range(stop - len(row.drafts), stop + 1),
            )
            wanted |= {position for position in ends if position % size == 0}
        if has_followers:
            wanted.add(len(sequence.request.prompt_token_ids) - 1)
        return {position for position in wanted if row.context_len < position <= stop}

    def make_room(self) -> bool:
        """True if there is room for one more state, if need be in place of the one that was unused for longest."""
        if self._states.has_room:
            return True
        return self._prefixes is not None and self._prefixes.drop_checkpoint() and self._states.has_room

    def publish(self, sequence: SequenceState, position: int) -> None:
        """Adds the state behind a page that was just added to the prefix cache, if it was asked for.

        An answer has one checkpoint: the one before it goes.
        """
        node = sequence.prefix
        if self._prefixes is None or node is None or position not in sequence.pinned:
            return
        checkpoint = self._states.checkpoint(sequence.held_row, position)
        if checkpoint is not None and self._prefixes.attach(node, checkpoint):
            if sequence.answered is not None:
                self._prefixes.detach(sequence.answered)
                sequence.answered = None
            if position > len(sequence.request.prompt_token_ids):
                sequence.answered = node
        self.give_up(sequence, position)

    def returned(self, sequence: SequenceState, position: int) -> None:
        """Adds the state that a tier below has given back with a page, if there is room for it."""
        node = sequence.prefix
        if self._prefixes is None or node is None or node.checkpoint is not None:
            return
        checkpoint = self._states.checkpoint(sequence.held_row, position)
        if checkpoint is not None and self.make_room():
            self._prefixes.attach(node, checkpoint)

    def give_up(self, sequence: SequenceState, position: int) -> None:
        """Gives up the state behind `position` tokens. Idempotent."""
        if position in sequence.pinned:
            sequence.pinned.remove(position)
            self._states.unpin(sequence.held_row, position)

    def end_fork(self, leader: SequenceState) -> None:
        """Gives up the state for other continuations, if the sequence keeps one. Idempotent."""
        last = len(leader.request.prompt_token_ids) - 1
        if last % self._page_size or self._prefixes is None:
            self.give_up(leader, last)

    def fork(self, leader: SequenceState) -> StateCheckpoint | None:
        """The state for other continuations of a running sequence's prompt, if it keeps one."""
        if leader.table_row is None:
            return None
        return self._states.checkpoint(leader.table_row, len(leader.request.prompt_token_ids) - 1)
