"""A scenario in which something is wrong becomes a short one in which the same thing is."""

from __future__ import annotations

import pytest

from sightline.cache.table import PageTable
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import RowResult, ScheduledRow
from sightline.testing.simulator.scenario import ClientSubmits, Scenario
from sightline.testing.simulator.seeds import SeedFailure, play_seeds, shortened
from sightline.testing.simulator.shrink import shrink
from sightline.testing.simulator.simulation import play
from sightline.testing.simulator.workload import draw_scenario


def first_failing() -> Scenario:
    """The first scenario that shows what was planted."""
    scenarios = (draw_scenario(seed, 80) for seed in range(30))
    return next(scenario for scenario in scenarios if play(scenario) is not None)


def test_a_leak_shrinks_to_a_handful_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    clear = PageTable.clear
    monkeypatch.setattr(PageTable, "clear", lambda table, row: clear(table, row)[:-1])
    scenario = first_failing()
    short, violation = shortened(scenario)
    assert violation is not None
    assert "other owners" in str(violation)
    assert len(short.events) <= 2 < len(scenario.events)
    assert not short.scene.async_scheduling
    again = play(Scenario.from_json(short.to_json()))
    assert again is not None
    assert str(again) == str(violation)


def test_a_chunk_off_by_one_shrinks_to_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Scheduler.commit

    def miscounted(scheduler: Scheduler, row: ScheduledRow, result: RowResult) -> None:
        commit(scheduler, row, result)
        if not result.tokens:
            row.sequence.num_computed += 1

    monkeypatch.setattr(Scheduler, "commit", miscounted)
    short, violation = shortened(first_failing())
    assert violation is not None
    assert len(short.events) == 1


def test_shrinking_keeps_to_its_number_of_replays() -> None:
    scenario, played = draw_scenario(1, 200), 0

    def wrong_step(candidate: Scenario) -> int | None:
        nonlocal played
        played += 1
        return 200

    shrink(scenario, wrong_step, max_replays=10)
    assert played == 10


def test_shrinking_finds_the_one_event_that_matters() -> None:
    scenario = draw_scenario(2, 200)
    asked = [event for event in scenario.events if isinstance(event, ClientSubmits)][5]

    def wrong_step(candidate: Scenario) -> int | None:
        return next(
            (event.at for event in candidate.events if isinstance(event, ClientSubmits) and event.name == 5), None
        )

    [left] = shrink(scenario, wrong_step).events
    assert isinstance(left, ClientSubmits)
    assert left == ClientSubmits(0, asked.name, left.prompt, 1)
    assert len(left.prompt) == 1


def test_what_is_right_is_not_shrunk() -> None:
    scenario = draw_scenario(0, 20)
    assert shortened(scenario) == (scenario, None)


def test_seeds_played_by_several_processes_come_in_order() -> None:
    alone = list(play_seeds(range(4), 10, num_jobs=1))
    assert list(play_seeds(range(4), 10, num_jobs=2)) == alone
    assert not any(isinstance(result, SeedFailure) for result in alone)
