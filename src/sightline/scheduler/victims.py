"""Which running sequences give way to a newcomer that does not fit, and in which order.

    urgency   rows of a higher priority number than the newcomer's, lowest rank first
    fairness  the lowest-ranked row of the caller with the most rows, while it holds at least two more than the
              newcomer's caller, and none that is more urgent than the newcomer; only one, unless the newcomer's caller
              has no row at all

Knows running sequences. Does not know pages, nor how many are needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

from sightline.scheduler.decision import RunningSequence

LEAST_LEAD = 2
"""A caller gives up a row only if it holds at least this many more than the newcomer's. With 1, each would take the
other's row in turn."""


def victims(
    running: Sequence[RunningSequence],
    held: Mapping[str, int],
    priority: int,
    num_held: int | None,
    spared: Collection[int] = (),
) -> Iterator[RunningSequence]:
    """Yields the sequences that give way to a newcomer of that priority.

    `num_held` is how many rows the newcomer's caller holds; None if only urgency counts. `running` is by rank. `held`
    counts running and admitted rows per caller; `spared` sequences give way to urgency only.
    """
    num_left = len(running)
    while num_left and running[num_left - 1].priority > priority:
        num_left -= 1
        yield running[num_left]
    if num_held is not None:
        shared = _of_the_largest(running, num_left, held, priority, num_held + LEAST_LEAD, spared)
        # Several rows may give way to one newcomer only if its caller has none.
        yield from islice(shared, 1) if num_held else shared


def _of_the_largest(
    running: Sequence[RunningSequence],
    num_left: int,
    held: Mapping[str, int],
    priority: int,
    least: int,
    spared: Collection[int],
) -> Iterator[RunningSequence]:
    """Among the remaining rows, those of the caller with the most, while it holds at least `least`; ties go to the
    caller whose last row ranks lowest."""
    counts = dict(held)
    for gone in running[num_left:]:
        counts[gone.caller] -= 1
    lines: dict[str, list[RunningSequence]] = {}
    for sequence in running[:num_left]:
        if sequence.priority == priority and counts[sequence.caller] >= least and sequence.arrival not in spared:
            lines.setdefault(sequence.caller, []).append(sequence)
    heap = [(-counts[caller], -line[-1].arrival, caller) for caller, line in lines.items()]
    heapq.heapify(heap)
    while heap:
        _, _, caller = heap[0]
        yield lines[caller].pop()
        counts[caller] -= 1
        if lines[caller] and counts[caller] >= least:
            heapq.heapreplace(heap, (-counts[caller], -lines[caller][-1].arrival, caller))
        else:
            heapq.heappop(heap)
