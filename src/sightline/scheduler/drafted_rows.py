"""Guesses for the rows of a step: which rows have room for some, and the rows with what was guessed."""

from __future__ import annotations

from dataclasses import replace

from sightline.scheduler.sequence import DraftRoom, Drafts, ScheduledRow


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
