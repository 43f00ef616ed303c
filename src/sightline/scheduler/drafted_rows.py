"""Guesses in the rows of a step: which rows have room for some, what was guessed for them, and counts of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from sightline.scheduler.sequence import DraftRoom, Drafts, ScheduledRow


@dataclass
class DraftCounts:
    """Counts of guesses."""

    num_drafts: int = 0
    """Rows with guesses that were committed."""
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    """Guessed tokens that were right."""
    at: Counter[int] = field(default_factory=Counter)
    """Those by their position behind the last known token, from 0."""

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Counts a row."""
        self.num_drafts += 1
        self.num_drafted_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self.at.update(range(num_accepted))

    def accepted_at(self, count: int) -> tuple[int, ...]:
        """Right guesses by position, for the first `count` positions behind the last known token."""
        return tuple([self.at[position] for position in range(count)])

    @staticmethod
    def total(counts: Iterable[DraftCounts]) -> DraftCounts:
        """The sum of some counts."""
        found = DraftCounts()
        for each in counts:
            found.num_drafts += each.num_drafts
            found.num_drafted_tokens += each.num_drafted_tokens
            found.num_accepted_tokens += each.num_accepted_tokens
            found.at += each.at
        return found


def add_drafts(rows: list[ScheduledRow], drafts: Drafts, page_size: int, most: tuple[int, int]) -> None:
    """Adds guesses to rows that generate, as far as they and their logits have room beside everything else.

    They use pages that the rows have, and leave room for one more token. So they take nothing from anybody. `most` are
    the tokens of a step, and those of them that have logits.
    """
    max_tokens, max_scored = most
    num_spare = min(
        min(max_tokens, drafts.max_step_tokens) - sum([row.num_tokens for row in rows]),
        max_scored - sum([row.num_logits for row in rows]),
    )
    rooms: dict[int, DraftRoom] = {}
    for index, row in enumerate(rows):
        sequence, seq_len = row.sequence, row.seq_len
        room = min(sequence.num_pages * page_size, sequence.max_len) - seq_len
        if row.num_tokens == 1 and row.completes and room > 0:
            rooms[index] = DraftRoom(sequence, room)
    if num_spare <= 0 or not rooms:
        return
    for index, draft in zip(rooms, drafts.propose(tuple(rooms.values()), num_spare), strict=True):
        tokens, parents = draft
        rows[index] = replace(rows[index], num_tokens=1 + len(tokens), drafts=tokens, parents=parents)
