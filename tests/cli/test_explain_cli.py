"""`sightline explain`: what is printed, and how wrong questions are answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sightline.cli.application import app
from sightline.cli.explain import ranges
from sightline.core.errors import ConfigError, NoBackendError
from sightline.core.machines import KNOWN
from support.model_configs import ODD_HEADS, PUBLIC, write_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("llama"), PUBLIC["llama"])


def ask(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "140"}).invoke(app, ["explain", *map(str, words)])


def test_the_page_tells_of_device_groups_choices_memory_and_ledger(folder: Path) -> None:
    result = ask(folder, "--device", "h200", "--rows", "300+1,0+200")
    assert result.exit_code == 0, result.output
    for text in (
        "NVIDIA H200, compute capability 9.0  (not this machine)",
        "tokens fit the cache",
        "group0: 32 layers of full attention",
        "flashinfer · row bfloat16#1 · declared",
        "decode, decode of few rows, decode of one row  triton",
        "flashinfer is faster at prefill",
        "→ --prefill-attention-backend triton",
        "paged · pages of 64 · bfloat16 · 131,072 bytes a token",
        "cache pools",
        "workspace",
        "step 1 of 1",
        "triton computes token 0",
        "nothing is degraded",
    ):
        assert text in result.output, text


def test_json_is_one_object_and_nothing_else(folder: Path) -> None:
    data = json.loads(ask(folder, "--device", "b200", "--json").output)
    assert data["compute_capability"] == [10, 0]
    assert data["groups"][0]["choices"][0]["name"] == "triton"


def test_the_picture_is_written(folder: Path, tmp_path: Path) -> None:
    result = ask(folder, "--device", "h200", "--rows", "300+1", "--html", tmp_path / "plan.html")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")


def test_a_picture_without_rows_is_refused(folder: Path, tmp_path: Path) -> None:
    result = ask(folder, "--html", tmp_path / "plan.html")
    assert result.exit_code == 2
    assert "expected --rows with --html" in result.output


def test_two_models_are_refused(folder: Path) -> None:
    assert "expected one model" in ask(folder, "--model", "other").output


def test_an_unknown_device_is_answered_with_the_known_ones(folder: Path) -> None:
    error = ask(folder, "--device", "tpu").exception
    assert isinstance(error, ConfigError)
    assert all(name in str(error) for name in KNOWN)


def test_a_model_that_nothing_serves_ends_in_the_error_of_serving_it(tmp_path: Path) -> None:
    odd = write_config(tmp_path, ODD_HEADS)
    error = ask(odd, "--device", "h200", "--kv-cache-dtype", "float16", "--max-model-len", "4096").exception
    assert isinstance(error, NoBackendError)
    assert "flashinfer: does not read a torch.float16 cache" in str(error)


def test_a_setting_that_changes_nothing_is_degraded_on_the_page_and_refused_under_strict(folder: Path) -> None:
    words = (folder, "--device", "a100", "--dist-timeout", "3")
    assert "degraded  dist_timeout: 3 changes nothing" in ask(*words).output
    assert isinstance(ask(*words, "--strict").exception, ConfigError)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((0,), "0"),
        ((0, 1, 2), "0-2"),
        ((0, 2, 4, 6), "0-6 by 2"),
        ((0, 1, 2, 3, 4, 6, 7, 8), "0-4, 6-8"),
        ((5, 11), "5-11 by 6"),
    ],
)
def test_layers_are_told_as_ranges(layers: tuple[int, ...], text: str) -> None:
    assert ranges(layers) == text
