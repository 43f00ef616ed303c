"""Side by side, checks come to what they come to in turn, whatever becomes of the processes that try them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sightline.attention.proof import ProofBook
from sightline.core.device import Device, DeviceKind, detect_device
from sightline.core.errors import ConfigError
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.crew import side_by_side
from sightline.testing.conformance.kit import CheckResult, RowReport, Verdict
from sightline.testing.conformance.report import TriedRow, run_conformance
from sightline.testing.conformance.rows import PreparedRow, RowToTry, Watch, list_rows
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import WHOLE, Check, Effort
from sightline.testing.conformance.worker import Brief, Desk, Errand
from support.crew_checks import BUILDING, DEADLY, HALF, SHY, SINGLE, STUB

CPU = detect_device("cpu")


def data(jobs: int, folder: Path, said: list[str]) -> dict[str, Any]:
    """What comes of a run after an earlier one that proved more, without what differs from run to run anyhow."""
    book = ProofBook(folder)
    run_conformance(
        device="cpu", book=book, candidates=[STUB], checks=BUILDING[-1:], samples=Samples().and_more((), (), [272])
    )
    watch = Watch(
        lambda row: said.append(row.label), lambda row, result: said.append(f"{row.label} {result.check} came")
    )
    report = run_conformance(device="cpu", book=book, candidates=[STUB], checks=BUILDING, watch=watch, jobs=jobs)
    assert book.find(STUB, SINGLE, CPU) is not None
    assert book.find(STUB, HALF, CPU) is None
    found: dict[str, Any] = json.loads(json.dumps(report.to_data()))
    for row in found["rows"]:
        row["proof"] = row["proof"] and row["proof"] | {"date": ""}
        row["checks"] = [check | {"seconds": 0} for check in row["checks"]]
    return found


def test_the_report_is_the_same_and_nothing_else_comes_to_standard_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    in_turn = data(1, tmp_path / "one", [])
    capfd.readouterr()
    said: list[str] = []
    assert data(2, tmp_path / "two", said) == in_turn
    assert capfd.readouterr().out == "noise\n" * 2, "the earlier run's, which is in this process"
    single, half = in_turn["rows"]
    assert 272 in single["proof"]["coverage"]["values"]["PAGE_SIZE"]
    assert half["voided"]
    verdicts = {check["check"]: check["verdict"] for check in half["checks"]}
    assert verdicts == {
        "ground": "failed",
        "house": "blocked",
        "roof": "blocked",
        "sky": "excused",
        "room": "passed",
        "sound": "passed",
        "bricks": "passed",
        "cracks": "failed",
    }
    assert sorted(said) == sorted(
        f"{label}{check}"
        for label in ("float32", "float16")
        for check in ("", *(f" {check.name} came" for check in BUILDING))
    )


def test_the_shares_of_a_check_are_all_of_it_in_whatever_process() -> None:
    """Each process lists the cases for itself, and Python orders a set in each of them otherwise."""
    told = [
        subprocess.run(
            [sys.executable, "-m", "support.shared_cases"],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert set(json.loads(told[0])) == {"covering"}
    for shares in json.loads(told[0]).values():
        [whole] = shares["1"]
        assert len(shares) == 2
        assert sorted(case for share in [*shares.values()][1] for case in share) == sorted(whole)


def prepared() -> PreparedRow:
    row = list_rows([STUB], CPU)[0]
    assert isinstance(row, RowToTry)
    return PreparedRow(row, Samples(), (), ProofBook.identify(STUB, SINGLE, CPU))


def alone(checks: tuple[Check, ...], row: PreparedRow) -> tuple[list[CheckResult], RowReport]:
    """What one process after the other said, and what came of it."""
    came: list[CheckResult] = []
    watch = Watch(on_result=lambda _row, result: came.append(result))
    with closing(side_by_side(Brief(CPU, Effort.QUICK, (STUB,), checks), [row], checks, 1, watch)) as reports:
        return came, next(reports)


def test_a_process_that_dies_or_is_broken_fails_its_own_check_alone() -> None:
    came, report = alone(DEADLY, prepared())
    assert [result.check for result in came] == ["china", "storm", "child", "cliff", "threads", "ground"], (
        "the deepest first"
    )
    told = "expected the check to end, got the end of its process:"
    assert [(result.verdict, result.detail) for result in came] == [
        (Verdict.FAILED, "expected care, got none"),
        (Verdict.FAILED, f"{told} signal 9 (Killed)"),
        (Verdict.FAILED, f"{told} exit code 4"),
        (Verdict.FAILED, f"{told} exit code 3"),
        (Verdict.PASSED, ""),
        (Verdict.PASSED, ""),
    ]
    verdicts = [result.verdict.value for result in report.results]
    assert verdicts == ["passed", "passed", "failed", "blocked", "blocked", "blocked"]


def test_a_process_that_cannot_begin_ends_the_run_and_fails_no_check() -> None:
    """A device that is not there, as one whose memory other processes hold."""
    absent = Device(DeviceKind.CUDA, torch.device("cuda", 97), "no card", (9, 0))
    with (
        closing(
            side_by_side(Brief(absent, Effort.QUICK, (STUB,), BUILDING), [prepared()], BUILDING, 1, Watch())
        ) as run,
        pytest.raises(ConfigError, match="expected a process that can try checks, got "),
    ):
        next(run)


def test_what_a_process_cannot_import_ends_the_run_and_fails_no_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that is in this process alone."""
    here = ModuleType("here_alone")
    exec("def rows(): raise AssertionError", vars(here))
    monkeypatch.setitem(sys.modules, "here_alone", here)
    brief = Brief(CPU, Effort.QUICK, (replace(STUB, rows=here.rows),), BUILDING)
    with (
        closing(side_by_side(brief, [prepared()], BUILDING, 1, Watch())) as run,
        pytest.raises(ConfigError, match=r"expected a process that can try checks, got .*here_alone"),
    ):
        next(run)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's account of processes")
def test_a_check_that_wants_the_device_to_itself_has_it() -> None:
    with closing(side_by_side(Brief(CPU, Effort.QUICK, (STUB,), SHY), [prepared()], SHY, 2, Watch())) as run:
        results = next(run).results
    assert [(result.verdict, result.detail) for result in results] == [(Verdict.PASSED, "")] * 3


def test_sources_that_changed_since_the_run_began_end_it() -> None:
    row = prepared()
    assert row.identity is not None
    with pytest.raises(ConfigError, match=r"expected stub · float32 as it was when the run began, got it changed"):
        alone(BUILDING, replace(row, identity=replace(row.identity, sources="of yesterday")))


def test_a_row_that_is_there_no_more_is_no_row_of_the_run() -> None:
    desk = Desk(Brief(CPU, Effort.QUICK, (STUB,), BUILDING))
    with pytest.raises(ConfigError, match=r"expected stub · float64 as it was when the run began, got it changed"):
        desk.attempt(Errand("stub", "float64", "ground", WHOLE, Samples(), None))


def test_what_cannot_travel_is_refused_with_what_to_do(tmp_path: Path) -> None:
    here = replace(STUB, rows=lambda: (SINGLE,))
    expected = "expected candidates and checks whose functions other processes can import, got .* or leave jobs at 1"
    with pytest.raises(ConfigError, match=expected):
        run_conformance(device="cpu", book=ProofBook(tmp_path), candidates=[here], checks=BUILDING, jobs=2)


def test_checks_of_the_kit_can_be_chosen_for_several_processes(tmp_path: Path) -> None:
    """Some of them hold functions that no process could import by name: the worker finds them in the kit."""
    chosen = [check for check in CHECKS if check.name in ("built", "window")]
    row = run_conformance(device="cpu", book=ProofBook(tmp_path), candidates=[STUB], checks=chosen, jobs=2).outcomes[0]
    assert isinstance(row, TriedRow)
    assert [(result.check, result.verdict) for result in row.report.results] == [
        ("built", Verdict.PASSED),
        ("window", Verdict.PASSED),
    ]


@pytest.mark.parametrize("jobs", [0, -3])
def test_less_than_one_job_is_refused(jobs: int) -> None:
    with pytest.raises(ConfigError, match=f"expected at least 1 job, got {jobs}"):
        run_conformance(device="cpu", jobs=jobs)


def test_more_jobs_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected at most \d+ jobs on \d+ cores, got 5000"):
        run_conformance(device="cpu", jobs=5000)


def is_running(pid: int) -> bool:
    """A process that has ended and that nobody has asked for yet runs no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's account of processes")
@pytest.mark.parametrize("ending", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_processes_end_with_the_command_whether_it_is_interrupted_or_killed(
    ending: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "sightline", "conformance", "--backend", "reference", "--device", "cpu"]
    settings = {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--quick", "--jobs", "2"], stderr=subprocess.PIPE, text=True, env=os.environ | settings
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        process.send_signal(ending)
        said = process.stderr.read()
        process.wait(timeout=20)
    assert "reference · " in first
    assert len(workers) == 2
    deadline = time.monotonic() + 10
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))
    assert "Traceback" not in said
