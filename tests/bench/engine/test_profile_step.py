"""A profile says where the whole of a step goes: phases of the host, operations, and a device without work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sightline.bench.engine.profile_step import (
    COPIES,
    GROUPS,
    IDLE,
    KERNELS,
    OTHER,
    OUTSIDE,
    DeviceSpan,
    OperationTime,
    StepProfile,
    busy_seconds,
    card_groups,
    group_of,
    kernel_times,
)
from sightline.cli import app
from sightline.core.metrics import PhaseTimes, StepPhase
from support.tiny_models import make_model

SPANS = [
    DeviceSpan("product", 0.0, 2.0),
    DeviceSpan("attention", 1.0, 3.0),
    DeviceSpan("Memcpy HtoD (Pinned -> Device)", 2.0, 4.0),
    DeviceSpan("product", 6.0, 7.0),
]


def test_latency_is_reported_with_its_profile(tmp_path: Path) -> None:
    model = make_model("llama")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    arguments = ["bench", "latency", "--dummy-weights", "--model-config", str(tmp_path / "config.json"), "--profile"]
    sizes = ["--batch-size", "2", "--input-len", "8", "--contexts", "8", "--output-len", "3", "--cache-tokens", "1k"]
    saved = tmp_path / "report.json"
    result = CliRunner().invoke(app, [*arguments, *sizes, "--num-iters", "1", "--save-result", str(saved)])
    assert result.exit_code == 0, result.output
    assert "| schedule " in result.stdout
    assert "| aten::" in result.stdout
    report = json.loads(saved.read_text())
    assert [each["work"] for each in report["results"]] == ["prefill 8", "decode 2 × 2 at 8"]
    profile = report["profile"]
    assert list(profile["groups"]) == [*GROUPS, OTHER, OUTSIDE]
    assert min(profile["groups"]["matrix products"], profile["groups"]["attention kernel"]) > 0
    inside = sum(each["seconds"] for each in profile["operations"])
    assert inside == pytest.approx(sum(profile["groups"].values()) - profile["groups"][OUTSIDE])
    assert list(profile["phases"]) == [phase.value for phase in StepPhase]
    assert all(seconds > 0 for seconds in profile["phases"].values())
    assert sum(profile["phases"].values()) > profile["step_seconds"] / 2
    assert profile["calls_per_layer"] > 3


def test_a_profile_of_mixed_contexts_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "latency", "--profile", "--contexts", "8,16"])
    assert result.exit_code == 2
    assert "expected one of --contexts with --profile, got 2" in " ".join(result.output.split())


def test_a_device_is_busy_while_anything_runs_on_it() -> None:
    assert busy_seconds(SPANS) == 5.0
    assert busy_seconds(reversed(SPANS)) == 5.0
    assert busy_seconds([DeviceSpan("long", 0.0, 9.0), *SPANS]) == 9.0
    assert busy_seconds([]) == 0.0


def test_a_step_of_a_card_is_kernels_copies_and_nothing() -> None:
    assert card_groups(SPANS, num_steps=2, plain=3.5) == {KERNELS: 2.0, COPIES: 0.5, IDLE: 1.0}
    assert card_groups(SPANS, num_steps=2, plain=2.0)[IDLE] == 0.0


def test_kernels_are_counted_by_name_and_copies_are_no_kernels_of_a_layer() -> None:
    operations = kernel_times(SPANS, num_steps=2)
    assert operations[0] == OperationTime("product", calls=1.0, seconds=1.5)
    profile = StepProfile(1, 8, 2, 3, 3.5, {"plan": 0.1}, card_groups(SPANS, 2, 3.5), tuple(operations))
    assert profile.calls_per_layer == pytest.approx(1.5 / 3)
    assert any(line.startswith("| idle ") and "28.6%" in line for line in profile.lines())


def test_a_phase_lasts_from_the_end_of_the_one_before() -> None:
    times = iter([0.0, 10.0, 11.0, 13.0, 20.0, 24.0])
    phases = PhaseTimes(lambda: next(times))
    phases.begin()
    phases.end(StepPhase.SCHEDULE)
    phases.end(StepPhase.PLAN)
    phases.begin()
    phases.end(StepPhase.SCHEDULE)
    assert phases.seconds == dict.fromkeys(StepPhase, 0.0) | {StepPhase.SCHEDULE: 5.0, StepPhase.PLAN: 2.0}


@pytest.mark.parametrize(
    ("operation", "group"),
    [
        ("aten::mm", "matrix products"),
        ("aten::_dyn_quant_matmul_4bit", "matrix products"),
        ("aten::_weight_int8pack_mm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention kernel"),
        ("aten::index_select", "cache gathers and writes"),
        ("aten::index_copy_", "cache gathers and writes"),
        ("aten::mul_", "element-wise and norms"),
        ("aten::_fused_rms_norm", "element-wise and norms"),
        ("aten::empty_strided", OTHER),
        ("detach_", OTHER),
    ],
)
def test_operations_are_counted_where_they_belong(operation: str, group: str) -> None:
    assert group_of(operation) == group
