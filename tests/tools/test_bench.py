"""Numbers are reported only for right answers, and ratios and floors are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from sightline.cli import app
from sightline.core.errors import ConfigError, SightlineError
from sightline.tools import bench, peers
from sightline.tools.bench import Machine, Prompts, Result, Work
from support.tiny_models import make_model

MACHINE = Machine(read_bytes_per_second=10e9, operations_per_second=100e9)


def fake_engine(answer: int) -> bench.Generate:
    def generate(prompts: Prompts, count: int) -> list[tuple[int, ...]]:
        return [(answer,) * count for _ in prompts]

    return generate


def test_engines_that_disagree_are_not_timed() -> None:
    bench.check_equal({"sightline": fake_engine(1), "other": fake_engine(1)}, [[1, 2]])
    with pytest.raises(SightlineError, match="from sightline and other, got other ones; no speed is reported"):
        bench.check_equal({"sightline": fake_engine(1), "other": fake_engine(2)}, [[1, 2]])


def test_every_engine_is_timed_in_turns_and_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = [9.0, 9.0, 1.0, 2.0, 3.0, 6.0, 2.0, 4.0]
    clock = iter([time for seconds in spent for time in (0.0, seconds)])
    monkeypatch.setattr("sightline.tools.bench.time.perf_counter", lambda: next(clock))
    work = Work("decode", [[1] * 8] * 4, output_len=10, floor_seconds=1.0)
    ours, other = bench.measure({"sightline": fake_engine(1), "other": fake_engine(1)}, work, rounds=3)
    assert list(clock) == []
    assert (ours.median_seconds, ours.slowest_seconds, ours.tokens_per_second) == (2.0, 3.0, 20.0)
    assert (other.median_seconds, other.of_floor) == (4.0, 0.25)


def test_tokens_that_were_not_generated_are_not_counted() -> None:
    short: bench.Generate = lambda prompts, count: [(1,) * (count - 1) for _ in prompts]  # noqa: E731
    with pytest.raises(ConfigError, match="expected 10 tokens of every prompt from short, got fewer"):
        bench.measure({"short": short}, Work("decode", [[1]], 10, 1.0), rounds=1)


def test_prefill_counts_the_tokens_read_and_decode_those_generated() -> None:
    assert Work("prefill", [[1] * 8] * 4, 1, 1.0).num_tokens == 32
    assert Work("decode", [[1] * 8] * 4, 5, 1.0).num_tokens == 20


def test_the_floor_is_bytes_over_bandwidth_or_operations_over_rate() -> None:
    assert bench.decode_floor(MACHINE, num_weights=10**8, num_bytes=4 * 10**8, rows=1) == pytest.approx(0.04)
    assert bench.decode_floor(MACHINE, num_weights=10**8, num_bytes=4 * 10**8, rows=64) == pytest.approx(0.128)
    assert bench.prefill_floor(MACHINE, num_layer_weights=10**8, num_tokens=512) == pytest.approx(1.024)


def test_the_table_says_how_many_times_faster_sightline_is() -> None:
    results = [Result("decode", "sightline", 1, 1, 30.0, 0.5), Result("decode", "other", 2, 2, 20.0, 0.33)]
    assert bench.table(results)[2:] == [
        "| decode | sightline | 30.0 | 1.00× | 50% |",
        "| decode | other | 20.0 | 1.50× | 33% |",
    ]


def test_prompts_are_the_same_for_every_engine_and_within_the_vocabulary() -> None:
    prompts = bench.random_prompts(3, 5, vocab_size=100)
    assert prompts == bench.random_prompts(3, 5, vocab_size=100)
    assert all(50 <= token < 100 for prompt in prompts for token in prompt)


def test_an_engine_that_is_unknown_or_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="out of transformers, got 'engine-x'"):
        peers.peer_engines(("engine-x",), Path(), torch.float32)
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="expected transformers, accelerate to compare with transformers, got none"):
        peers.peer_engines(("transformers",), Path(), torch.float32)


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_the_command_measures_every_engine_on_the_same_work(command: str, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    sizes = {
        "latency": ["--input-len", "9", "--output-len", "4", "--batch-size", "3"],
        "throughput": ["--num-prompts", "3", "--random-input-len", "9", "--random-output-len", "4"],
    }
    saved = tmp_path / "result.json"
    arguments = ["bench", command, *sizes[command], "--model", str(tmp_path), "--num-iters", "1"]
    arguments += ["--compare", "transformers", "--cache-tokens", "512", "--save-result", str(saved)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "| transformers |" in result.output
    report = json.loads(saved.read_text())
    works = {entry["work"] for entry in report["results"]}
    assert len(report["results"]) == 2 * len(works)
    assert all(entry["tokens_per_second"] > 0 and entry["of_floor"] > 0 for entry in report["results"])
