"""Traffic by seed finds nothing wrong with the engine: 10,000 steps, and every kind of fault among them.

`pytest -m slow tests/testing/simulator/test_simulated_traffic.py` plays 90,000 more.

In classes, so that the processes that run the tests can share them out.
"""

from __future__ import annotations

from dataclasses import fields
from typing import ClassVar

import pytest
from msgspec.structs import asdict

from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.scenario import Close, DeviceFault
from sightline.testing.simulator.simulation import Simulation, simulate
from sightline.testing.simulator.workload import draw_scenario

CHUNKS = 10
"""Per class; the first of them in `make prove`."""
CHUNK_STEPS = 2_500
TRAFFIC_STEPS = 100
HOST = {"offloaded_blocks", "returned_blocks", "late_transfers", "failed_transfers"}
"""Events of engines with a host tier."""
RARE = {"device_faults", "closes", "shared_rows"}
"""About once a seed at most, so that a chunk may have none."""
GUESSED = {"drafts", "trees", "accepted_tokens", "wrong_drafts", "whole_drafts", "border_drafts"}
"""Only where tokens are guessed, see `test_simulated_guesses.py`."""


class _Traffic:
    first: ClassVar[int]

    @pytest.mark.parametrize(
        "chunk", [pytest.param(chunk, marks=pytest.mark.slow if chunk else ()) for chunk in range(CHUNKS)]
    )
    def test_traffic_breaks_nothing(self, chunk: int) -> None:
        """Forty times, thirty-six of them slow: 100,000 steps and more than 200 seeds in all."""
        seed, total = self.first + 1_000 * chunk, EventCounts()
        while total.steps < CHUNK_STEPS:
            total += simulate(seed, TRAFFIC_STEPS)
            seed += 1
        assert total.seeds > 10
        idle = [field.name for field, value in zip(fields(total), total.values(), strict=True) if value < 5]
        assert set(idle) <= RARE | GUESSED | HOST


class TestFirstQuarter(_Traffic):
    first = 0


class TestSecondQuarter(_Traffic):
    first = 10_000


class TestThirdQuarter(_Traffic):
    first = 20_000


class TestLastQuarter(_Traffic):
    first = 30_000


def test_every_end_of_an_engine_occurs() -> None:
    kinds = {type(draw_scenario(seed, 5).events[-1]) for seed in range(100) if draw_scenario(seed, 5).events}
    assert {DeviceFault, Close} <= kinds


def test_a_seed_repeats_exactly() -> None:
    assert [simulate(seed, 60) for seed in range(4)] == [simulate(seed, 60) for seed in range(4)]


def test_a_scenario_depends_on_its_seed_alone() -> None:
    assert draw_scenario(3, 200) == draw_scenario(3, 200)
    assert draw_scenario(3, 200) != draw_scenario(4, 200)


def test_both_ways_of_scheduling_are_played() -> None:
    scenes = [draw_scenario(seed, 1).scene for seed in range(100)]
    for name in ("async_scheduling", "prefix_caching", "paranoid"):
        assert {asdict(scene)[name] for scene in scenes} == {True, False}
    assert {scene.page_size for scene in scenes} == {1, 2, 3, 4, 5, 8}


def test_counts_add_up() -> None:
    one, other = (Simulation(draw_scenario(seed, 20)).run() for seed in (0, 1))
    assert (one + other).steps == one.steps + other.steps
    assert (one + other).told().startswith("2 seeds, ")
