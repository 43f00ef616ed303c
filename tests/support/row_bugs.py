"""Bugs to plant in how callers share rows, each of which the simulator finds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import pytest

from sightline.scheduler.decision import RunningSequence
from sightline.scheduler.victims import victims


def _plant_victims(patch: pytest.MonkeyPatch, change: Callable[..., Iterator[RunningSequence]]) -> None:
    patch.setattr("sightline.scheduler.policy.victims", change)
    patch.setattr("sightline.scheduler.policy._can_admit", lambda state, draft: True)


def let_a_caller_keep_all_rows(patch: pytest.MonkeyPatch) -> None:
    """Who has no row waits until somebody ends."""

    def urgency_alone(
        running: Sequence[RunningSequence], held: Mapping[str, int], priority: int, num_held: int | None, *rest: object
    ) -> Iterator[RunningSequence]:
        return victims(running, held, priority, None)

    _plant_victims(patch, urgency_alone)


def let_a_caller_keep_all_rows_but_one(patch: pytest.MonkeyPatch) -> None:
    """Who has a row gets no other one before somebody ends."""

    def for_the_first_row(
        running: Sequence[RunningSequence],
        held: Mapping[str, int],
        priority: int,
        num_held: int | None,
        spared: Collection[int],
    ) -> Iterator[RunningSequence]:
        return victims(running, held, priority, None if num_held else num_held, spared)

    _plant_victims(patch, for_the_first_row)


def take_the_only_row_of_a_caller(patch: pytest.MonkeyPatch) -> None:
    """Who has no row takes that of the last in rank, whosever it is."""

    def from_anybody(
        running: Sequence[RunningSequence], held: object, priority: int, num_held: int | None, *rest: object
    ) -> Iterator[RunningSequence]:
        least = priority if num_held == 0 else priority + 1
        return (sequence for sequence in reversed(running) if sequence.priority >= least)

    _plant_victims(patch, from_anybody)


def take_rows_from_callers_that_have_as_few(patch: pytest.MonkeyPatch) -> None:
    """Rows go back and forth between callers that wait."""

    def from_equals(
        running: Sequence[RunningSequence],
        held: Mapping[str, int],
        priority: int,
        num_held: int | None,
        spared: Collection[int],
    ) -> Iterator[RunningSequence]:
        return victims(running, held, priority, None if num_held is None else max(0, num_held - 2), spared)

    _plant_victims(patch, from_equals)
