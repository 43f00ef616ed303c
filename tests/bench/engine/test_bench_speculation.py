"""`bench speculation` counts what the engine counts, and reports nothing if answers differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from sightline.bench.engine import speculation
from sightline.bench.engine.speculation import GuessedWork, measure_speculation
from sightline.cli.application import app
from sightline.core.errors import ConfigError, SightlineError
from sightline.engine.engine import Engine
from support.tiny_models import make_model

PROMPTS = {"repeating": [5, 6, 7, 8] * 4, "short": [9, 3]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    return path


def settings(folder: Path, **changes: object) -> dict[str, object]:
    return {"model": str(folder), "cache_tokens": 256, "speculative_config": {"method": "ngram"}, **changes}


def test_every_prompt_is_measured_at_every_temperature(folder: Path) -> None:
    told: list[GuessedWork] = []
    config = {"method": "ngram", "corpus_tokens": 4096}
    report = measure_speculation(settings(folder, speculative_config=config), 40, 2, told.append, PROMPTS)
    assert report.works == tuple(told)
    assert [(each.name, each.temperature) for each in told] == [(name, heat) for name in PROMPTS for heat in (0.0, 0.8)]
    for work in told:
        assert work.num_tokens == 39, "the first comes with the prompt"
        assert 0 < work.steps_per_token <= 1
        assert len(work.by_position) == 7
        assert work.mean_accepted == pytest.approx(sum(work.by_position))
    greedy = told[0]
    assert greedy.steps_per_token < 1
    assert greedy.mean_accepted > 0
    assert greedy.share > 0
    assert "| repeating | 0 " in "\n".join(report.lines())


def test_a_corpus_knows_a_text_that_was_served(folder: Path) -> None:
    config = {"method": "ngram", "prompt_lookup_max": 8, "prompt_lookup_min": 8, "corpus_tokens": 4096}
    shares = []
    for tokens in (0, 4096):
        chosen = settings(folder, speculative_config={**config, "corpus_tokens": tokens})
        report = measure_speculation(chosen, 40, 1, lambda work: None, {"short": PROMPTS["short"]})
        shares.append(report.works[0].steps_per_token)
    assert shares[1] < shares[0] / 2


def test_answers_that_differ_are_not_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = speculation._answer

    def wrong(engine: Engine, *work: object) -> speculation._Answer:
        found = right(engine, *work)  # type: ignore[arg-type]
        if engine.runtime.config.speculation is not None:
            found.tokens[-1] += 1
        return found

    monkeypatch.setattr(speculation, "_answer", wrong)
    with pytest.raises(SightlineError, match="expected the same greedy tokens with guesses and without"):
        measure_speculation(settings(folder), 8, 1, lambda work: None, PROMPTS)


def test_a_run_without_guesses_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="expected speculative_config, the guesses to measure, got none"):
        measure_speculation(settings(folder, speculative_config=None), 8, 1, lambda work: None)
    result = CliRunner().invoke(app, ["bench", "speculation", "--model", str(folder)])
    assert result.exit_code != 0
    result = CliRunner().invoke(app, ["bench", "speculation", "--output-len", "1"])
    assert "expected at least 2 tokens" in result.output
