"""Stolen time is read from the system, and a system that does not tell it has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sightline.bench.host import stolen
from sightline.bench.host.stolen import StolenTime, stolen_seconds


def test_the_share_is_what_was_stolen_of_all_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat, ticks = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(stolen, "_STAT", stat)
    now = iter((100.0, 110.0))
    monkeypatch.setattr("sightline.bench.host.stolen.time.monotonic", lambda: next(now))
    monkeypatch.setattr("sightline.bench.host.stolen.os.cpu_count", lambda: 2)
    stat.write_text(f"cpu  9 9 9 9 9 9 9 {7 * ticks} 9 9\ncpu0 1 2 3\n")
    window = StolenTime()
    stat.write_text(f"cpu  9 9 9 9 9 9 9 {12 * ticks} 9 9\ncpu0 1 2 3\n")
    assert window.share == pytest.approx(5 / 20)


@pytest.mark.parametrize("text", [None, "", "cpu 1 2 3\n"])
def test_a_system_that_does_not_tell_has_no_stolen_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(stolen, "_STAT", stat)
    if text is not None:
        stat.write_text(text)
    assert stolen_seconds() == 0.0
