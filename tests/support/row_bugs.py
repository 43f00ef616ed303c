"""Bugs to plant in how callers share rows, each of which the simulator finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from sightline.scheduler.decision import RunningSequence
from sightline.scheduler.victims import victims


def _plant_victims(patch: pytest.MonkeyPatch, change: Callable[..., Iterator[RunningSequence]]) -> None:
    patch.setattr("sightline.scheduler.policy.victims", change)
    patch.setattr("sightline.scheduler.policy._can_admit", lambda state, draft: True)


def let_a_caller_keep_all_rows(patch: pytest.MonkeyPatch) -> None:
    """Who has no row waits until somebody ends."""

    def urgency_alone(*state: object, is_deprived: bool, **rest: object) -> Iterator[RunningSequence]:
        return victims(*state, is_deprived=False, **rest)  # type: ignore[arg-type]

    _plant_victims(patch, urgency_alone)


def take_the_only_row_of_a_caller(patch: pytest.MonkeyPatch) -> None:
    """Who has no row takes that of the last in rank, whosever it is."""

    def from_anybody(
        running: Sequence[RunningSequence], held: object, priority: int, *, is_deprived: bool, **rest: object
    ) -> Iterator[RunningSequence]:
        least = priority if is_deprived else priority + 1
        return (sequence for sequence in reversed(running) if sequence.priority >= least)

    _plant_victims(patch, from_anybody)


def take_rows_for_callers_that_have_some(patch: pytest.MonkeyPatch) -> None:
    def for_everybody(*state: object, is_deprived: bool, **rest: object) -> Iterator[RunningSequence]:
        return victims(*state, is_deprived=True, **rest)  # type: ignore[arg-type]

    _plant_victims(patch, for_everybody)
