"""`benchmarks/linear_attention.py` runs as it is, on a CPU and over stand-ins for both libraries."""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from sightline.bench.attention.timing import TimingBudget
from sightline.core.device import detect_device
from support import stand_in_recurrences

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "linear_attention.py"
ADAPTERS = ("fla.call", "fla.kimi_prompts", "fla.recurrent_backend", "flashinfer.recurrent_backend")
NUMBER = re.compile(r"[0-9.]+ from the host")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with both libraries in place."""
    stand_in_recurrences.install(monkeypatch)
    for name in ADAPTERS:
        monkeypatch.delitem(sys.modules, f"sightline.attention.backends.{name}", raising=False)
        monkeypatch.setitem(sys.modules, f"sightline.attention.backends.{name}", None)
        monkeypatch.delitem(sys.modules, f"sightline.attention.backends.{name}")
    spec = importlib.util.spec_from_file_location("linear_attention_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def cells(output: str) -> list[list[str]]:
    """The cells of the table's rows, without the shape and the floor."""
    rows = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("| ")]
    return [row[1:-1] for row in rows[1:]]


@pytest.mark.slow
def test_every_contender_is_right_and_timed(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["--dry-run"])
    output = capsys.readouterr().out
    assert "failed" not in output
    rows = cells(output)
    assert len(rows) == 6
    for number, row in enumerate(rows):
        # FlashInfer has no Kimi delta attention with fp32 states, and no engine decodes through the adapters.
        is_gated, is_prefill = number % 2 == 0, number >= 4
        expected = [True, True, is_gated, is_gated and is_prefill, True, is_prefill]
        assert [NUMBER.fullmatch(cell) is not None for cell in row] == expected


def measured(script: ModuleType, only: str, budget: float = 60.0) -> tuple[str, list[str]]:
    device, contender = detect_device("cpu"), script.CONTENDERS[only]
    effort = TimingBudget(rounds=1, sample_seconds=1e-6)
    budgets = {contender.library: script.Budget(budget)}
    bench = script.Bench(device, {only: contender}, budgets, torch.bfloat16, effort)
    case = script.Case.make(script.Shape(2, 3, 1), device.torch_device, torch.bfloat16, channels=False)
    return bench.measure(case)[only], bench.remarks


@pytest.mark.parametrize("name", ["through fla-core", "FlashInfer's operation", "through FlashInfer"])
def test_a_library_is_timed_as_it_comes_and_through_its_backend(script: ModuleType, name: str) -> None:
    found, remarks = measured(script, name)
    assert remarks == []
    assert NUMBER.fullmatch(found)


def test_a_wrong_contender_is_not_timed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["fla.ops.gated_delta_rule"]
    right = vars(module)["chunk_gated_delta_rule"]

    def wrong(**given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, states = right(**given)
        return out, states * 1.1

    monkeypatch.setattr(module, "chunk_gated_delta_rule", wrong)
    assert measured(script, "fla-core's operation")[0].startswith("states wrong by 0.1")


def test_a_library_beyond_its_budget_is_skipped_and_told(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def tunes(**given: torch.Tensor) -> None:
        del given
        try:
            time.sleep(5.0)
        except Exception:  # as a library may that takes any error for an unsupported shape
            return

    monkeypatch.setattr(sys.modules["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", tunes)
    found, [remark] = measured(script, "fla-core's operation", budget=0.05)
    assert found == "skipped"
    assert remark.endswith("the budget of fla is used up")


def test_a_library_that_is_not_there_is_told(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    found, [remark] = measured(script, "fla-core's operation")
    assert found == "not installed"
    assert "fla-core's operation is not there" in remark
