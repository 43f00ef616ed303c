"""The order in which waiting sequences of one priority are considered.

By how little the caller has used, then by arrival; callers without a row come first. Knows values only.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

from sightline.scheduler.decision import WaitingSequence


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
) -> Generator[tuple[QueuePosition, WaitingSequence], None, None]:
    """Yields the sequences of one priority in turn, counting each one's prompt as its caller's usage, as if admitted.

    Each caller that holds no row goes before the others, with one sequence, in the turn of the first of all.
    """
    tokens = dict(usage)
    deprived: list[tuple[QueuePosition, str, int]] = []
    others: list[tuple[QueuePosition, str, int]] = []
    for caller, line in lines.items():
        heads = others if caller in held else deprived
        heads.append((QueuePosition(priority, tokens[caller], line[0].arrival), caller, 0))
    heapq.heapify(deprived)
    heapq.heapify(others)
    while deprived or others:
        turn = min(heads[0][0] for heads in (deprived, others) if heads)
        _, caller, place = heapq.heappop(deprived or others)
        line = lines[caller]
        yield turn, line[place]
        tokens[caller] += _charge(line[place])
        if place + 1 < len(line):
            position = QueuePosition(priority, tokens[caller], line[place + 1].arrival)
            heapq.heappush(others, (position, caller, place + 1))


def usage_after(usage: Mapping[str, int], lines: Mapping[str, Sequence[WaitingSequence]]) -> Mapping[str, int]:
    """Each caller's usage once all sequences of the lines are admitted."""
    return {**usage, **{caller: usage[caller] + sum(map(_charge, line)) for caller, line in lines.items()}}


def _charge(sequence: WaitingSequence) -> int:
    return 0 if sequence.was_admitted else sequence.num_tokens
