"""Bugs in pausing and resuming, for the simulator to find."""

from __future__ import annotations

import pytest

from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import SequenceState


def never_resume_a_paused_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "resume", lambda scheduler, sequence: None)


def leak_the_pages_of_a_paused_row(patch: pytest.MonkeyPatch) -> None:
    """A row that is parked is left behind, open."""
    park = Scheduler._park

    def leaking(scheduler: Scheduler, sequence: SequenceState) -> None:
        sequence.table_row = None
        park(scheduler, sequence)

    patch.setattr(Scheduler, "_park", leaking)


def keep_the_lock_of_a_paused_row(patch: pytest.MonkeyPatch) -> None:
    """A parked sequence keeps its cached pages from being evicted."""
    park = Scheduler._park

    def locking(scheduler: Scheduler, sequence: SequenceState) -> None:
        sequence.prefix = None
        park(scheduler, sequence)

    patch.setattr(Scheduler, "_park", locking)


def park_a_row_in_flight(patch: pytest.MonkeyPatch) -> None:
    """A sequence is parked although a launched step writes to its pages."""
    pause = Scheduler.pause

    def hasty(scheduler: Scheduler, sequence: SequenceState) -> None:
        was_paused = sequence.is_paused
        pause(scheduler, sequence)
        if sequence.is_paused and not was_paused and sequence.num_steps:
            scheduler._park(sequence)

    patch.setattr(Scheduler, "pause", hasty)


def pause_nothing(patch: pytest.MonkeyPatch) -> None:
    """The rows of a client that reads nothing go on."""
    patch.setattr(Scheduler, "pause", lambda scheduler, sequence: None)


def resume_from_where_it_was(patch: pytest.MonkeyPatch) -> None:
    """A resumed sequence goes on as if its entries were still there."""
    park, admit = Scheduler._park, Scheduler._admit
    lengths: dict[int, int] = {}

    def remembering(scheduler: Scheduler, sequence: SequenceState) -> None:
        lengths[id(sequence)] = sequence.num_computed
        park(scheduler, sequence)

    def continuing(scheduler: Scheduler, sequence: SequenceState, *rest: object) -> None:
        admit(scheduler, sequence, *rest)  # type: ignore[arg-type]
        if sequence.table_row is not None and id(sequence) in lengths:
            sequence.num_computed = sequence.num_scheduled = max(sequence.num_computed, lengths.pop(id(sequence)))

    patch.setattr(Scheduler, "_park", remembering)
    patch.setattr(Scheduler, "_admit", continuing)
