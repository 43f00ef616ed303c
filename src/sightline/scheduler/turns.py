"""The order in which waiting sequences of one priority are considered.

A sequence comes first if its caller holds the fewest rows, then if its caller has used the least, then if it arrived
first. Otherwise a row would go to a caller with many rows, and be taken back for one with few. Knows values only.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

from sightline.scheduler.decision import WaitingSequence
from sightline.scheduler.victims import LEAST_LEAD


class QueuePosition(NamedTuple):
    """Sort key of a sequence: the lowest comes first."""

    priority: int
    share: int
    """Tokens that its caller has used."""
    arrival: int


def in_turn(
    priority: int,
    lines: Mapping[str, Sequence[WaitingSequence]],
    usage: Mapping[str, int],
    held: Mapping[str, int],
    least_lead: float = LEAST_LEAD,
) -> Generator[tuple[QueuePosition, WaitingSequence], None, None]:
    """Yields the sequences of one priority in turn, counting each one's prompt and row as its caller's, as if admitted.

    The caller that has used least goes first, unless another has no row, or its row would make it lead over another by
    `least_lead` rows: then the one with the fewest rows goes, in its turn.
    """
    tokens = dict(usage)
    heads_by_rows: dict[int, list[tuple[QueuePosition, str, int]]] = {}
    for caller, line in lines.items():
        position = QueuePosition(priority, tokens[caller], line[0].arrival)
        heads_by_rows.setdefault(held.get(caller, 0), []).append((position, caller, 0))
    for heads in heads_by_rows.values():
        heapq.heapify(heads)
    while heads_by_rows:
        turn = min(heads[0][0] for heads in heads_by_rows.values())
        num_held, fewest = min(heads_by_rows, key=lambda each: heads_by_rows[each][0]), min(heads_by_rows)
        if fewest == 0 or num_held + 1 - fewest >= least_lead:
            num_held = fewest
        _, caller, place = heapq.heappop(heads_by_rows[num_held])
        if not heads_by_rows[num_held]:
            del heads_by_rows[num_held]
        line = lines[caller]
        yield turn, line[place]
        tokens[caller] += _charge(line[place])
        if place + 1 < len(line):
            position = QueuePosition(priority, tokens[caller], line[place + 1].arrival)
            heapq.heappush(heads_by_rows.setdefault(num_held + 1, []), (position, caller, place + 1))


def usage_after(usage: Mapping[str, int], lines: Mapping[str, Sequence[WaitingSequence]]) -> Mapping[str, int]:
    """Each caller's usage once all sequences of the lines are admitted."""
    return {**usage, **{caller: usage[caller] + sum(map(_charge, line)) for caller, line in lines.items()}}


def _charge(sequence: WaitingSequence) -> int:
    return 0 if sequence.was_admitted else sequence.num_tokens
