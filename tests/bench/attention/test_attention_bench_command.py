"""`sightline bench attention` as a person meets it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner

from sightline.attention.backends import registry
from sightline.bench.attention import measure as attention_bench
from sightline.bench.attention.measure import Field, measure_attention
from sightline.bench.attention.results import AttentionReport
from sightline.bench.attention.shapes import Shape, find_shapes
from sightline.cli import app
from sightline.core.device import detect_device
from sightline.core.errors import SightlineError
from support.attention_contenders import (
    QUICK,
    TORCH,
    TORCH_LATENT,
    give_garbage,
    planted,
    text_of,
)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "attention", "--rounds", "1", *arguments])


def test_the_command_prints_a_table_and_writes_its_files(tmp_path: Path) -> None:
    saved, drawn = tmp_path / "attention.json", tmp_path / "attention.svg"
    result = run("--shapes", "tiny-gqa-3x21", "--peers", "--json", str(saved), "--plot", str(drawn))
    assert result.exit_code == 0, result.output
    assert "* numba" in result.stdout
    assert "tiny-gqa-3x21: numba " in result.stderr
    assert "\x1b[" not in result.stdout
    assert json.loads(saved.read_text())["shapes"][0]["shape"] == "tiny-gqa-3x21"
    assert ElementTree.parse(drawn).getroot().tag.endswith("svg")


def test_json_without_a_file_takes_the_place_of_the_table() -> None:
    result = run("--shapes", "tiny-mla-3x21", "--json", "--backends", "reference-latent")
    assert result.exit_code == 0, result.output
    contenders = json.loads(result.stdout)["shapes"][0]["contenders"]
    assert [(each["name"], each["selected"]) for each in contenders] == [("reference-latent", False)]


def test_the_command_fails_where_an_answer_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "installed", lambda: (TORCH, TORCH_LATENT, planted("wrong", give_garbage)))
    result = run("--shapes", "tiny-gqa-3x21", "--backends", "torch,wrong")
    assert result.exit_code == 1
    assert "WRONG" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shapes", "tiny,none"], "got 'none'"),
        (["--backends", "torch,none"], "expected an attention backend out of triton, triton-latent"),
        (["--device", "cuda"], "expected a CUDA device for --device cuda, got none"),
        (["--device", "tpu"], "expected --device auto, cpu or cuda, got 'tpu'"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(*arguments)
    assert isinstance(result.exception, SightlineError)
    assert text in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shapes", ""], "expected names with commas between them, got ''; leave the option out for all"),
        (["--backends", " ,"], "expected names with commas between them"),
        (["--plot", "curves.png"], "expected a file that ends in .svg, got 'curves.png'"),
        (["--json", "none/file.json"], "Invalid value for '--json': expected a file in a folder that exists"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


def test_a_run_that_measures_nothing_fails() -> None:
    result = run("--shapes", "tiny-gqa-3x21", "--backends", "torch-latent")
    assert result.exit_code == 1
    assert "nothing was measured" in result.stderr


@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt(), 130), (SystemExit(9), 9)], ids=["interrupted", "dead"])
def test_what_was_measured_is_kept_whatever_ends_the_run(
    end: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure, saved = attention_bench.measure_shape, tmp_path / "saved.json"

    def ended(shape: Any, *rest: Any) -> Any:
        if shape.name == "tiny-mla-3x21":
            raise end
        return measure(shape, *rest)

    monkeypatch.setattr(attention_bench, "measure_shape", ended)
    names = ["tiny-gqa-3x21", "tiny-mla-3x21", "prefill-tiny-gqa-2x10"]
    result = run("--shapes", ",".join(names), "--backends", "torch,torch-latent", "--json", str(saved))
    assert result.exit_code == code
    told = json.loads(saved.read_text())
    assert [each["shape"] for each in told["shapes"]] == names[:1]
    assert told["skipped_shapes"] == dict.fromkeys(names[1:], "interrupted")
    assert told["is_interrupted"]


def test_what_broke_is_on_disk_before_the_process_dies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved, names = tmp_path / "saved.json", ["tiny-gqa-3x21", "tiny-mla-3x21"]

    def broken(shape: Shape, *rest: Any) -> Any:
        raise RuntimeError("the device is sick") if shape.name == names[0] else SystemExit(9)

    monkeypatch.setattr(attention_bench, "measure_shape", broken)
    result = run("--shapes", ",".join(names), "--backends", "torch", "--json", str(saved))
    assert result.exit_code == 9
    assert "tiny-gqa-3x21: " in result.output
    told = json.loads(saved.read_text())
    assert "the device is sick" in told["broken_shapes"][names[0]]
    assert told["skipped_shapes"] == {names[1]: "interrupted"}
    assert [*tmp_path.iterdir()] == [saved]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's file that is always full")
def test_a_file_that_cannot_be_written_costs_no_measurement() -> None:
    result = run("--shapes", "tiny-gqa-3x21", "--backends", "torch", "--json", "/dev/full", "--device", "cpu")
    assert result.exit_code == 1
    assert "could not write /dev/full" in " ".join(result.output.split())
    assert "layer eager" in result.output


def test_ctrl_c_while_a_result_is_told_keeps_it() -> None:
    def interrupted(report: AttentionReport, shape: Shape, seconds: float) -> None:
        raise KeyboardInterrupt

    candidates = (registry.find("torch", registry.BUILT_IN),)
    everybody = Field(detect_device("cpu"), candidates, candidates, (), QUICK)
    names = ["tiny-gqa-3x21", "prefill-tiny-gqa-2x10"]
    report = measure_attention(find_shapes(names), everybody, interrupted)
    assert [result.shape.name for result in report.shapes] == names[:1]
    assert report.skipped_shapes == {names[1]: "interrupted"}
    assert report.is_interrupted


@pytest.mark.prove
def test_a_sweep_on_a_cpu_is_of_tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Shape] = []
    measure = attention_bench.measure_shape

    def first_of_all(shape: Shape, *rest: Any) -> Any:
        asked.append(shape)
        return replace(measure(find_shapes(["tiny-gqa-3x21"])[0], *rest), shape=shape)

    monkeypatch.setattr(attention_bench, "measure_shape", first_of_all)
    assert run("--sweep", "--backends", "torch", "--device", "cpu").exit_code == 0
    assert any(shape.is_swept for shape in asked)
    assert max(shape.num_rows * shape.length for shape in asked) <= 4096


def test_a_file_in_no_folder_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    result = run("--json", str(tmp_path / "none" / "file.json"))
    assert result.exit_code == 2
    assert "expected a file in a folder that exists" in result.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_tiny_shapes_are_right_on_a_gpu() -> None:
    device = detect_device("cuda")
    candidates = tuple(candidate for candidate in registry.installed() if candidate.by_default)
    shapes = tuple(replace(shape, dtype=torch.bfloat16) for shape in find_shapes(["tiny"]))
    everybody = Field(device, candidates, candidates, (), QUICK)
    report = measure_attention(shapes, everybody, lambda report, shape, seconds: None)
    assert not report.is_red, text_of(report)
