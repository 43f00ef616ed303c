"""Every file in examples/ runs as its page says. tests/server/test_examples_over_http.py has the one with a server."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from support.pinned import ROOT
from support.tiny_served_model import save_tiny_served_model

EXAMPLES = ROOT / "examples"
TESTED_ELSEWHERE = {"server_client.py"}


def run_example(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_every_example_is_on_the_page_and_run_by_a_test() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    page = (EXAMPLES / "README.md").read_text()
    assert [name for name in sorted(names) if f"examples/{name}" not in page] == []
    tested = {name for name in names if f'run_example("{name}"' in Path(__file__).read_text()}
    assert tested | TESTED_ELSEWHERE == names


def test_offline_continues_prompts_and_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("offline.py", monkeypatch=monkeypatch)
    *continued, answer = capsys.readouterr().out.splitlines()
    assert "The capital of France is Paris." in continued
    assert answer == "The capital of France is Paris. (stop)"


def test_streaming_prints_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("streaming.py", "Tell me about Paris.", "--max-tokens", "8", monkeypatch=monkeypatch)
    assert len(capsys.readouterr().out.split()) > 2


def test_search_finds_the_nearest_text_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("search.py", "a young cat", "--top", "2", monkeypatch=monkeypatch)
    [first, _] = capsys.readouterr().out.splitlines()
    assert first.endswith("A kitten is asleep on the sofa.")


def test_a_batch_file_keeps_its_order_and_its_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [{"id": "b", "prompt": "one two"}, {"id": "a", "prompt": "word " * 3000}, {"id": "c", "prompt": "three"}]
    given, written = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    given.write_text("".join(json.dumps(each) + "\n" for each in asked))
    model = save_tiny_served_model(tmp_path / "model")
    run_example("batch_file.py", str(given), str(written), "--model", str(model), monkeypatch=monkeypatch)
    answers = [json.loads(line) for line in written.read_text().splitlines()]
    assert [each["id"] for each in answers] == ["b", "a", "c"]
    assert [("error" in each, "text" in each) for each in answers] == [(False, True), (True, False), (False, True)]


@pytest.mark.prove
def test_a_backend_of_ones_own_is_tried_and_answers_as_the_default(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_example("own_backend.py", monkeypatch=monkeypatch)
    assert "rowwise: The capital of France is Paris" in capfd.readouterr().out
