"""Steps that are timed are decode steps of all rows, and the commands tell what they measured."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from sightline.bench.engine.growth import time_steps
from sightline.bench.engine.stepping import WARM_STEPS, decoding_rows
from sightline.bench.engine.work import MeasuredEngine, load_subject
from sightline.cli import app
from sightline.core.errors import ConfigError, SightlineError
from support.tiny_models import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def subject(folder: Path) -> MeasuredEngine:
    return load_subject({"model": str(folder), "cache_tokens": 512, "max_num_batched_tokens": 16, "max_num_seqs": 4})


def test_rows_are_read_and_warm_before_the_timed_steps(subject: MeasuredEngine) -> None:
    engine = subject.llm.engine
    with decoding_rows(engine, rows=3, context=20, num_steps=2) as held:
        assert min(held) == 20 + WARM_STEPS
        engine.step()
        engine.step()
    assert not engine.has_work
    assert engine.runtime.store.num_free_pages == engine.runtime.store.num_usable_pages


def test_steps_that_did_not_run_every_row_are_not_reported(subject: MeasuredEngine) -> None:
    with (
        pytest.raises(SightlineError, match="expected 3 rows to gain 2 tokens each, got 3 in all"),
        decoding_rows(subject.llm.engine, rows=3, context=20, num_steps=2),
    ):
        subject.llm.engine.step()
    assert not subject.llm.engine.has_work


@pytest.mark.parametrize(
    ("rows", "context", "remedy"),
    [(5, 8, "--max-num-seqs"), (1, 255, "--max-model-len"), (4, 150, "--cache-tokens")],
)
def test_rows_that_cannot_run_at_once_are_refused(
    subject: MeasuredEngine, rows: int, context: int, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        time_steps(subject.llm.engine, rows, context, num_steps=2)


def test_growth_tells_every_point_and_draws_it(folder: Path, tmp_path: Path) -> None:
    drawn, saved = tmp_path / "growth.svg", tmp_path / "growth.json"
    arguments = ["bench", "growth", "--model", str(folder), "--rows", "1,3", "--contexts", "8,16,32"]
    arguments += ["--num-steps", "2", "--cache-tokens", "2k", "--plot", str(drawn), "--save-result", str(saved)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "quantization dequantise" in result.stdout
    report = json.loads(saved.read_text())
    assert [(point["rows"], point["context"]) for point in report["by_rows"]] == [(1, 8), (3, 8)]
    by_context = [(point["rows"], point["context"]) for point in report["by_context"]]
    assert by_context == [(rows, context) for rows in (1, 8) for context in (8, 16, 32)]
    assert all(point["step_seconds"] > 0 and point["floor_seconds"] > 0 for point in report["by_context"])
    circles = ElementTree.parse(drawn).getroot().iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(circles)) == 2 + 6
