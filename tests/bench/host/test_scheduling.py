"""A load is what it says, is checked before anything is told of it, and the command tells every point and both bars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sightline.bench.host.idle_engine import HostBench
from sightline.bench.host.load import LONG_PROMPT, PAGE_SIZE, PREFIX_PAGES, Load, LoadedScheduler
from sightline.bench.host.scheduling import (
    BAR_PREFIXES,
    BAR_ROWS,
    LOOKUP_BAR,
    STEP_BAR,
    WARM_STEPS,
    LoadPoint,
    ProcessorTimes,
    SchedulerBench,
    verdicts,
)
from sightline.cli import app
from sightline.core.errors import SightlineError


def run_steps(loaded: LoadedScheduler, num_steps: int) -> None:
    for _ in range(num_steps):
        loaded.launch(loaded.scheduler.schedule().rows)
        loaded.commit(loaded.tokens())


@pytest.fixture
def loaded() -> LoadedScheduler:
    return LoadedScheduler(Load(rows=6, prefixes=20, num_steps=40))


def test_rows_decode_and_as_many_wait_in_a_cache_without_a_free_page(loaded: LoadedScheduler) -> None:
    assert loaded.scheduler.num_running == loaded.scheduler.num_waiting == 6
    assert all(sequence.num_pending == 1 for sequence in loaded.scheduler.running)
    assert loaded.store.num_free_pages == 0
    assert len(loaded.find_long().bundles) == LONG_PROMPT // PAGE_SIZE
    loaded.check()


@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_pages_that_rows_fill_are_published_and_those_they_grow_by_evicted(max_in_flight: int) -> None:
    loaded = LoadedScheduler(Load(rows=6, prefixes=20, num_steps=40), max_in_flight)
    before, kept = loaded.prefixes.num_evictable, sum(state.num_prefix_pages for state in loaded.scheduler.running)
    run_steps(loaded, 40)
    loaded.land()
    published = sum(state.num_prefix_pages for state in loaded.scheduler.running) - kept
    assert published >= 6 * 40 // PAGE_SIZE - 6
    assert before - loaded.prefixes.num_evictable >= published - 6
    assert loaded.prefixes.num_evictable >= 20 * PREFIX_PAGES
    loaded.check()


def test_the_last_prefixes_are_found_to_the_end(loaded: LoadedScheduler) -> None:
    run_steps(loaded, 40)
    chains = sum(node.parent is not None and node.parent.parent is None for node in loaded.prefixes.nodes())
    assert chains >= 20 + 1 + 6


def test_a_page_with_an_owner_too_many_is_not_reported_on(loaded: LoadedScheduler) -> None:
    loaded.store.share(loaded.find_long().bundles[7])
    with pytest.raises(SightlineError, match=r"other owners than theirs.*nothing is reported"):
        loaded.check()


def test_a_row_with_a_token_too_few_is_not_reported_on(loaded: LoadedScheduler) -> None:
    loaded.scheduler.running[2].tokens.pop()
    with pytest.raises(SightlineError, match="tokens computed of a row"):
        loaded.check()


def test_a_lost_prompt_is_not_reported_on(loaded: LoadedScheduler) -> None:
    loaded.prefixes.clear()
    with pytest.raises(SightlineError, match="the pages of the long prompt"):
        loaded.check()


def test_steps_that_did_not_run_every_row_are_not_reported() -> None:
    bench = SchedulerBench(Load(rows=3, prefixes=4, num_steps=WARM_STEPS + 4))
    bench.run(WARM_STEPS)
    scheduler = bench.loaded.scheduler
    for sequence in [*scheduler.running]:
        scheduler.remove(sequence)
    with pytest.raises(SightlineError, match="expected steps of 3 rows, one token each"):
        bench.run(1)


def test_the_parts_of_a_step_are_less_than_the_whole() -> None:
    bench = HostBench(Load(rows=16, prefixes=8, num_steps=12))
    bench.run(12)
    step = bench.step()
    assert 0 < step.plan < step.whole
    assert step.assemble + step.plan + step.sampling < step.whole


def point(both: float, lookup: float, rows: int = BAR_ROWS) -> LoadPoint:
    nothing, step, find = (ProcessorTimes(value, value, value) for value in (0.0, both, lookup))
    return LoadPoint(rows, BAR_PREFIXES, nothing, nothing, step, step, find, nothing)


@pytest.mark.parametrize(
    ("both", "lookup", "ends"),
    [
        (STEP_BAR, LOOKUP_BAR, ["met.", "met."]),
        (STEP_BAR * 1.01, LOOKUP_BAR * 0.5, ["MISSED.", "met."]),
        (STEP_BAR * 0.5, LOOKUP_BAR * 1.01, ["met.", "MISSED."]),
    ],
)
def test_the_bars_are_said_to_be_met_or_missed(both: float, lookup: float, ends: list[str]) -> None:
    told = verdicts([point(9.0, 9.0, rows=16), point(both, lookup)])
    assert [line.split()[-1] for line in told] == ends


def test_bars_that_were_not_measured_are_not_said_to_be_met() -> None:
    [line] = verdicts([point(0.0, 0.0, rows=16)])
    assert "not measured" in line


def test_the_command_tells_every_point_and_how_it_grew(tmp_path: Path) -> None:
    saved = tmp_path / "scheduler.json"
    arguments = ["bench", "scheduler", "--rows", "2,8", "--prefixes", "4,16,64", "--num-steps", "10"]
    result = CliRunner().invoke(app, [*arguments, "--save-result", str(saved)])
    assert result.exit_code == 0, result.output
    assert "which was not measured" in result.stdout
    assert "| 16.00× |" in " ".join(result.stdout.split())
    report = json.loads(saved.read_text())
    assert [(each["rows"], each["prefixes"]) for each in report["by_rows"]] == [(2, 4), (8, 4)]
    assert [(each["rows"], each["prefixes"]) for each in report["by_prefixes"]] == [(2, 4), (2, 16), (2, 64)]
    for each in [*report["by_rows"], *report["by_prefixes"], report["overlapped"]]:
        assert 0 < each["schedule"]["median"] < each["both"]["largest"]
        assert min(each["lookup"]["least"], each["lock"]["least"], each["bookkeeping"]["least"]) > 0
    assert report["environment"]["python"]
    assert report["host"]["whole"] > 0
