"""Gaps come from the rows' tokens alone, a row that waits is seen, and nothing is told of answers that differ."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from sightline.bench.engine import interference, stepping
from sightline.bench.engine.interference import (
    STEPS_BEFORE,
    TOKENS_AFTER,
    Round,
    Traffic,
    measure_interference,
    run_together,
)
from sightline.bench.engine.measure import Agreement, Conditions, Prompts, random_prompts
from sightline.bench.engine.stepping import TimeSpread, Watched
from sightline.bench.engine.work import load_subject
from sightline.cli import app
from sightline.core.errors import ConfigError, SightlineError
from sightline.core.request import TextDelta
from sightline.engine.engine import Engine
from support.tiny_models import VOCAB, make_model

TRAFFIC = Traffic(rows=3, row_len=4, prompt_len=40)
LENGTHS = ["--rows", "3", "--row-len", "4", "--prompt-len", "40", "--num-iters", "1"]
STEPS = 4
"""Chunks of 13 beside 3 rows, in steps of 16: three are full, one token is left."""
RIGHT = run_together


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    return path


def settings(folder: Path, **changes: object) -> dict[str, object]:
    small = {"page_size": 4, "cache_tokens": 512, "max_num_batched_tokens": 16, "max_num_seqs": 5, "paranoid": True}
    return {"model": str(folder), **small, **changes}


def run(folder: Path, *arguments: str) -> Result:
    steps = ["--max-num-batched-tokens", "16", "--max-num-seqs", "5", "--page-size", "4", "--cache-tokens", "512"]
    return CliRunner().invoke(app, ["bench", "interference", "--model", str(folder), *steps, *LENGTHS, *arguments])


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still but for steps, which take a second each."""
    now, step = [0.0], Engine.step

    def timed_step(engine: Engine) -> None:
        step(engine)
        now[0] += 1.0

    monkeypatch.setattr(Engine, "step", timed_step)
    monkeypatch.setattr(stepping, "time", SimpleNamespace(perf_counter=lambda: now[0]))


def measured(folder: Path) -> Round:
    engine = load_subject(settings(folder)).llm.engine
    prompts = random_prompts([4, 4, 4, 40], VOCAB)
    tokens, found = run_together(engine, prompts, TRAFFIC)
    assert len(tokens[-1]) == 1 + TOKENS_AFTER
    assert not engine.has_work
    return found


@pytest.mark.usefixtures("ticking")
def test_rows_that_get_a_token_in_every_step_wait_for_one_step(folder: Path) -> None:
    a_second = TimeSpread(median_seconds=1.0, largest_seconds=1.0)
    assert measured(folder) == Round(
        step_seconds=1.0,
        before=a_second,
        during=a_second,
        ratio=1.0,
        first_token_seconds=float(STEPS),
        num_steps=STEPS,
    )


@pytest.mark.usefixtures("ticking")
def test_a_row_that_waits_until_the_prompt_is_read_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take, steps = Engine.take_delta, {"made": 0}
    made = Engine.step

    def counted(engine: Engine) -> None:
        made(engine)
        steps["made"] += 1

    first = 1 + STEPS_BEFORE
    held_back: list[str] = []

    def late(engine: Engine, request: str) -> TextDelta | None:
        if not held_back:
            held_back.append(request)
        waits = request in held_back and first < steps["made"] <= first + STEPS
        return None if waits else take(engine, request)

    monkeypatch.setattr(Engine, "step", counted)
    monkeypatch.setattr(Engine, "take_delta", late)
    found = measured(folder)
    assert found.during.largest_seconds == found.ratio == STEPS + 1
    assert found.before == TimeSpread(1.0, 1.0)
    assert found.during.median_seconds == 1.0


@pytest.mark.parametrize(
    ("start", "end", "gaps"),
    [
        (0.0, 10.0, [1.0, 2.0, 5.0, 1.0]),
        (2.0, 4.0, [2.0]),
        (4.0, 9.0, [5.0]),
        (3.0, 5.0, [2.0, 5.0]),
        (9.0, 15.0, [6.0]),
    ],
)
def test_gaps_lie_in_a_span_or_reach_into_it_and_an_open_one_ends_with_it(
    start: float, end: float, gaps: list[float]
) -> None:
    assert Watched("row", times=[1.0, 2.0, 4.0, 9.0]).gaps(start, end) == gaps


def test_a_row_without_a_token_since_the_arrival_has_waited_all_along() -> None:
    assert Watched("row", times=[1.0, 2.0]).gaps(2.0, 12.0) == [10.0]


@pytest.mark.parametrize(
    ("prompt_len", "least", "full"), [(39, 3, 3), (40, 4, 3), (13, 1, 1), (5, 1, 1)], ids=["even", "odd", "one", "less"]
)
def test_steps_hold_the_rows_tokens_and_a_chunk(prompt_len: int, least: int, full: int) -> None:
    traffic = Traffic(rows=3, row_len=4, prompt_len=prompt_len)
    assert (traffic.num_steps(16), traffic.num_full_steps(16)) == (least, full)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_the_report_tells_of_every_round(folder: Path, async_scheduling: bool) -> None:
    told: list[tuple[int, Round]] = []
    report = measure_interference(
        settings(folder, async_scheduling=async_scheduling), TRAFFIC, 2, lambda *each: told.append(each)
    )
    assert told == list(enumerate(report.rounds, 1))
    assert [each.num_steps for each in report.rounds] == [STEPS + async_scheduling] * 2
    assert report.least_steps == STEPS
    assert report.ratio == max(each.ratio for each in report.rounds)
    assert report.cost == report.first_token_seconds / report.alone_seconds > 0
    assert report.agreement.is_full
    assert report.agreement.num_prompts == 4
    assert report.limits["async_scheduling"] is async_scheduling


def test_a_prompt_that_fills_no_step_is_measured_too(folder: Path) -> None:
    report = measure_interference(settings(folder), Traffic(3, 4, 2), 1, lambda *each: None)
    assert report.rounds[0].num_steps == report.least_steps == 1


def test_nothing_is_reported_where_company_changes_an_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(engine: Engine, prompts: Prompts, traffic: Traffic) -> tuple[list[list[int]], Round]:
        tokens, found = RIGHT(engine, prompts, traffic)
        tokens[1][2] = (tokens[1][2] + 1) % VOCAB
        return tokens, found

    monkeypatch.setattr(interference, "run_together", spoiled)
    result = run(folder, "--json")
    assert isinstance(result.exception, SightlineError)
    assert str(result.exception).startswith("expected the same greedy tokens together and alone, got 4 of 4 first")
    assert str(result.exception).endswith("nothing is reported")
    assert result.stdout == ""


def test_rounded_answers_may_part_after_their_first_token() -> None:
    rounded, kept = Conditions("m", "bfloat16", "dequantise", 1, ()), Conditions("m", "float32", "keep", 1, ())
    assert not rounded.is_exact
    assert not kept.is_exact
    assert Conditions("m", "float32", "dequantise", 1, ()).is_exact
    Agreement(equal_first=3, num_prompts=4, equal_tokens=3, num_tokens=40).check("here and there", exact=False)
    with pytest.raises(SightlineError, match=r"mostly the same greedy tokens here and there.* nothing is reported"):
        Agreement(equal_first=2, num_prompts=4, equal_tokens=30, num_tokens=40).check("here and there", exact=False)


@pytest.mark.usefixtures("ticking")
def test_the_command_prints_a_table_or_one_json_object(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "gaps.json"
    result = run(folder, "--save-result", str(saved))
    assert result.exit_code == 0, result.output
    assert "40 tokens of prompt arrive among 3 rows that decode from 4; max_num_batched_tokens 16" in result.stdout
    assert "| 1 | 1000 | 1000, 1000 | 1000, 1000 | 1.00× | 4.00 | 4 |" in " ".join(result.stdout.split())
    assert "The largest gap is 1.00× one budgeted step (bar: 2×)." in result.stdout
    report = json.loads(saved.read_text())
    printed = json.loads(run(folder, "--json").stdout)
    assert printed.keys() == report.keys()
    assert printed["traffic"] == {"rows": 3, "row_len": 4, "prompt_len": 40}
    assert printed["limits"]["max_num_batched_tokens"] == 16
    assert printed["rounds"][0]["num_steps"] == STEPS


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--rows", "5"], "at most 5 sequences at once, got 6; raise --max-num-seqs"),
        (["--rows", "16"], "at most 5 sequences at once, got 17; raise --max-num-seqs"),
        (["--max-model-len", "44"], "at most 44 tokens, got 45 with the generated ones; raise --max-model-len"),
        (["--cache-tokens", "144"], r"at most 144 tokens in the cache at once, got \d+.* raise --cache-tokens"),
    ],
)
def test_traffic_that_does_not_fit_is_refused_before_it_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], remedy: str
) -> None:
    monkeypatch.setattr(Engine, "step", lambda engine: pytest.fail("a step was made"))
    result = run(folder, *arguments)
    assert isinstance(result.exception, ConfigError), result.output
    with pytest.raises(ConfigError, match=remedy):
        raise result.exception
