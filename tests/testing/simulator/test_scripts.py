"""Scripts that once broke the engine, shrunk by the simulator, and break it no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from sightline.testing.simulator.scenario import Scenario
from sightline.testing.simulator.simulation import Simulation

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.json"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.stem))
def test_a_script_plays_to_its_end(script: Path) -> None:
    counts = Simulation(Scenario.from_json(script.read_text())).run()
    assert counts.finished > 0
