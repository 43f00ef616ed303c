"""`sightline doctor`: what is printed, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sightline.cli.application import app
from sightline.diagnose import doctor
from sightline.diagnose.doctor import Diagnosis, Fitness


def ask(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "140"}).invoke(app, ["doctor", *map(str, words)])


def planted(*found: Diagnosis) -> Any:
    def examine(*given: Any, **more: Any) -> Iterator[Diagnosis]:
        yield from found

    return examine


def test_without_the_self_test_device_versions_and_proofs_are_told() -> None:
    result = ask("--no-self-test", "--device", "cpu", "--max-model-len", "256", "--cache-tokens", "512")
    assert result.exit_code == 0, result.output
    for topic in ("device", "versions", "proofs"):
        assert topic in result.output
    assert "self-test" not in result.output
    assert result.output.rstrip().splitlines()[-1].startswith("fit, of ")


def test_a_failure_is_the_exit_code_and_names_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Diagnosis("device", Fitness.FIT, "a card")
    failed = Diagnosis("self-test: page size", Fitness.FAILED, "this and that differ: prompt 1", "report it")
    monkeypatch.setattr(doctor, "examine", planted(fit, failed))
    result = ask()
    assert result.exit_code == 1
    assert "✗ self-test: page size" in result.output
    assert "this and that differ" in result.output
    assert "→ report it" in result.output
    assert "1 failed, of 2 findings" in result.output


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", planted(Diagnosis("device", Fitness.FAILED, "none", "buy one")))
    result = ask("--json")
    assert result.exit_code == 1
    assert json.loads(result.output) == {
        "fit": False,
        "findings": [{"topic": "device", "verdict": "failed", "text": "none", "remedy": "buy one"}],
    }


def test_a_model_that_is_not_there_is_a_finding(tmp_path: Path) -> None:
    result = ask(tmp_path / "nothing", "--no-self-test", "--device", "cpu")
    assert result.exit_code == 1
    assert "✗ engine" in result.output
