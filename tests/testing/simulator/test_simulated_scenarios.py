"""Scenarios are plain data: they go through JSON unchanged, and what is none is refused."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from sightline.core.errors import ConfigError
from sightline.testing.simulator.scenario import ClientCancels, ClientSubmits, Scenario
from sightline.testing.simulator.workload import draw_scenario


@pytest.mark.parametrize("seed", range(20))
def test_a_scenario_goes_through_json_unchanged(seed: int) -> None:
    scenario = draw_scenario(seed, 60)
    assert Scenario.from_json(scenario.to_json()) == scenario


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"events"', '"happenings"'),
        ('"event": "submit"', '"event": "shout"'),
        ('"max_tokens"', '"most_tokens"'),
        ('"prompt": [', '"prompt": ["a", '),
        ('"prompt": [', '"prompt": [true, '),
        ('"at": 2', '"at": "2"'),
        ('"page_size": ', '"page_size": -'),
        ('"paranoid"', '"kind"'),
        ("}", ""),
    ],
)
def test_what_is_no_scenario_is_refused(before: str, after: str) -> None:
    scene = replace(draw_scenario(0, 1).scene, max_len=40, page_size=4, num_pages=10)
    text = Scenario(scene, (ClientSubmits(2, 0, (1, 2), 3), ClientCancels(4, 0))).to_json()
    assert before in text
    with pytest.raises(ConfigError, match="expected"):
        Scenario.from_json(text.replace(before, after))


def test_events_come_in_order() -> None:
    scene = draw_scenario(0, 1).scene
    with pytest.raises(ConfigError, match="order"):
        Scenario(scene, (ClientCancels(3, 0), ClientCancels(2, 0)))


def test_a_request_that_has_no_room_is_refused() -> None:
    scene = replace(draw_scenario(0, 1).scene, max_len=8, page_size=4, num_pages=2)
    with pytest.raises(ConfigError, match="room"):
        Scenario(scene, (ClientSubmits(0, 0, (1,) * 6, 3),))
    assert Scenario(scene, (ClientSubmits(0, 0, (1,) * 6, 2),)).events


def test_defaults_are_left_out_of_the_script() -> None:
    scene = replace(draw_scenario(0, 1).scene, max_len=20, page_size=4, num_pages=5)
    [event] = json.loads(Scenario(scene, (ClientSubmits(0, 0, (1, 2), 3),)).to_json())["events"]
    assert event == {"event": "submit", "at": 0, "name": 0, "prompt": [1, 2], "max_tokens": 3}
