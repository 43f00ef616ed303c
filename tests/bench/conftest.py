"""Measures the machine once per test process: it takes seconds, and no test but those of the floor is about it."""

from __future__ import annotations

from functools import cache

import pytest

from sightline.bench.engine import work
from sightline.bench.floor import measure_machine

measured_once = cache(measure_machine)


@pytest.fixture(autouse=True)
def one_measured_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "measure_machine", measured_once)
