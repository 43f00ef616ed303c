"""Numbers are reported only for right answers, and ratios and floors are what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from sightline.bench.engine import measure as bench
from sightline.bench.engine.measure import Agreement, MeasuredWork, Prompts, Result, TimedPart
from sightline.bench.engine.work import checked_prompts, latency_works
from sightline.bench.floor import Floor, Machine, ModelSize
from sightline.cli import app
from sightline.core.errors import ConfigError, SightlineError
from sightline.core.ledger import Ledger
from sightline.models.loading.default_model import default_model_path
from sightline.models.loading.opening import open_checkpoint
from support.case_marks import proofs
from support.tiny_models import make_model


def fake_engine(answer: int) -> bench.Generate:
    def generate(prompts: Prompts, count: int) -> list[tuple[int, ...]]:
        return [(answer,) * count for _ in prompts]

    return generate


def script(*answers: tuple[int, ...]) -> bench.Generate:
    """An engine that gives these tokens, whatever it is asked."""
    return lambda prompts, count: list(answers)


def test_engines_that_disagree_are_not_timed() -> None:
    prompts = [[1, 2]] * 2
    equal = bench.compare_tokens({"sightline": fake_engine(1), "other": fake_engine(1)}, prompts, frozenset())
    equal["other"].check("from sightline and other", exact=True)
    assert str(equal["other"]) == "2 of 2 first tokens and 32 of 32 leading tokens equal"
    unequal = bench.compare_tokens({"sightline": fake_engine(1), "other": fake_engine(2)}, prompts, frozenset())
    for exact, expected in ((True, "the same"), (False, "mostly the same")):
        with pytest.raises(SightlineError, match=f"expected {expected} greedy tokens a and b, .* nothing is reported"):
            unequal["other"].check("a and b", exact=exact)


def test_tokens_may_part_after_a_while_only_where_roundings_differ() -> None:
    engines = {"sightline": script((1, 2, 3), (4, 5, 6)), "other": script((1, 2, 3), (4, 9, 6))}
    found = bench.compare_tokens(engines, [[1]] * 2, frozenset())
    assert found["other"] == Agreement(equal_first=2, num_prompts=2, equal_tokens=4, num_tokens=6)
    found["other"].check("from both", exact=False)
    with pytest.raises(SightlineError, match="4 of 6 leading tokens equal"):
        found["other"].check("from both", exact=True)


def test_what_follows_an_end_token_is_not_compared() -> None:
    engines = {"sightline": script((1, 2, 0, 3), (0, 1, 1, 1)), "other": script((1, 2, 7, 8), (9, 9, 9, 9))}
    assert bench.compare_tokens(engines, [[1]] * 2, frozenset({0}))["other"] == Agreement(1, 1, 2, 2)
    with pytest.raises(SightlineError, match="got an end token at once for all"):
        bench.compare_tokens({"sightline": script((0, 1)), "other": script((0, 1))}, [[1]], frozenset({0}))


def timed(monkeypatch: pytest.MonkeyPatch, *spent: float) -> Iterator[float]:
    """A clock by which the runs take these times."""
    clock = iter([time for seconds in spent for time in (0.0, seconds)])
    monkeypatch.setattr("sightline.bench.engine.measure.time.perf_counter", lambda: next(clock))
    return clock


def test_every_engine_is_timed_in_turns_and_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = timed(monkeypatch, 9.0, 9.0, 1.0, 2.0, 3.0, 6.0, 2.0, 4.0)
    work = MeasuredWork("whole", TimedPart.WHOLE, [[1] * 8] * 4, output_len=10, floor_seconds=1.0)
    engines = {"sightline": fake_engine(1), "other": fake_engine(1)}
    ours, other = bench.summarise(work, bench.measure(engines, work, rounds=3))
    assert list(clock) == []
    assert (ours.median_seconds, ours.slowest_seconds, ours.tokens_per_second) == (2.0, 3.0, 20.0)
    assert (other.median_seconds, other.of_floor) == (4.0, 0.25)


def test_decoding_is_a_run_of_all_tokens_less_a_run_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 9.0, 9.0, 1.0, 4.0, 2.0, 3.0, 1.0, 6.0)
    work = MeasuredWork("decode", TimedPart.DECODE, [[1] * 8] * 4, output_len=4, floor_seconds=1.5)
    [ours] = bench.summarise(work, bench.measure({"sightline": fake_engine(1)}, work, rounds=3))
    assert (ours.median_seconds, ours.slowest_seconds) == (3.0, 5.0)
    assert (ours.tokens_per_second, ours.of_floor) == (4.0, 0.5)


def test_a_run_of_all_tokens_that_is_shorter_than_one_of_one_is_not_reported() -> None:
    with pytest.raises(SightlineError, match="expected sightline to take longer for 4 tokens than for one"):
        bench.summarise(MeasuredWork("decode", TimedPart.DECODE, [[1]], 4, 1.0), {"sightline": [-1.0]})


def test_tokens_that_were_not_generated_are_not_counted() -> None:
    short: bench.Generate = lambda prompts, count: [(1,) * (count - 1) for _ in prompts]  # noqa: E731
    with pytest.raises(ConfigError, match="expected 10 tokens for every prompt from short, got fewer"):
        bench.measure({"short": short}, MeasuredWork("whole", TimedPart.WHOLE, [[1]], 10, 1.0), rounds=1)


def test_prefill_counts_the_tokens_read_and_decode_those_after_the_first() -> None:
    assert MeasuredWork("prefill", TimedPart.PREFILL, [[1] * 8] * 4, 1, 1.0).num_tokens == 32
    assert MeasuredWork("decode", TimedPart.DECODE, [[1] * 8] * 4, 5, 1.0).num_tokens == 16
    assert MeasuredWork("whole", TimedPart.WHOLE, [[1] * 8] * 4, 5, 1.0).num_tokens == 20


def test_rows_take_the_contexts_in_turns() -> None:
    floor = Floor(Machine(1e9, 1e9), ModelSize(10, 5, 60), ())
    prefill, decode = latency_works(floor, 100, (9, 4), contexts=(4, 6, 8), rows=4)
    assert [len(prompt) for prompt in prefill.prompts] == [9]
    assert [len(prompt) for prompt in decode.prompts] == [4, 6, 8, 4]
    assert decode.name == "decode 4 × 3 at 4+6+8"


def test_the_table_says_how_many_times_faster_sightline_is() -> None:
    results = [Result("decode", "sightline", 1, 1, 30.0, 0.5), Result("decode", "other", 2, 2, 20.0, 0.33)]
    assert [" ".join(line.split()) for line in bench.table(results)[2:]] == [
        "| decode | sightline | 30.0 | 1.00× | 50% |",
        "| decode | other | 20.0 | 1.50× | 33% |",
    ]


def test_prompts_are_the_same_for_every_engine_and_within_the_vocabulary() -> None:
    prompts = bench.random_prompts([5, 6], vocab_size=100)
    assert prompts == bench.random_prompts([5, 6], vocab_size=100)
    assert [len(prompt) for prompt in prompts] == [5, 6]
    assert all(50 <= token < 100 for prompt in prompts for token in prompt)


def test_engines_are_checked_on_text_where_there_is_a_tokenizer() -> None:
    checked_on, prompts = checked_prompts(open_checkpoint(default_model_path(), Ledger()), vocab_size=49152)
    assert checked_on == "starts of a text"
    assert [len(prompt) for prompt in prompts] == [12, 24, 36, 48]
    assert prompts[0] == prompts[3][:12]


@pytest.mark.parametrize("command", [*proofs("latency"), "throughput"])
def test_the_command_measures_every_engine_on_the_same_work(command: str, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    sizes = {
        "latency": ["--input-len", "9", "--output-len", "32", "--batch-size", "3", "--contexts", "4,8"],
        "throughput": ["--num-prompts", "3", "--random-input-len", "9", "--random-output-len", "32"],
    }
    saved = tmp_path / "result.json"
    arguments = ["bench", command, *sizes[command], "--model", str(tmp_path), "--num-iters", "3"]
    arguments += ["--compare", "transformers", "--cache-tokens", "512", "--save-result", str(saved)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "| transformers | " in result.output
    assert "Same tokens as Sightline on random tokens, because there is no tokenizer" in result.output
    report = json.loads(saved.read_text())
    assert report["agreement"]["transformers"]["equal_tokens"] == report["agreement"]["transformers"]["num_tokens"] > 0
    assert report["conditions"] == {
        "model": tmp_path.name,
        "dtype": "float32",
        "quantization": "dequantise",
        "threads": torch.get_num_threads(),
        "degradations": [],
    }
    works = {entry["work"] for entry in report["results"]}
    assert len(report["results"]) == 2 * len(works)
    assert all(entry["tokens_per_second"] > 0 and entry["of_floor"] > 0 for entry in report["results"])


def test_contexts_that_no_row_would_have_are_refused() -> None:
    floor = Floor(Machine(1e9, 1e9), ModelSize(10, 10, 80), ())
    with pytest.raises(ConfigError, match="expected at most 2 contexts, one per row, got 3; raise --batch-size"):
        latency_works(floor, 100, (8, 8), [1, 2, 3], rows=2)


def test_a_config_alone_is_measured_with_random_weights(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    arguments = [
        "bench",
        "throughput",
        "--num-prompts",
        "2",
        "--dummy-weights",
        "--model-config",
        str(tmp_path / "config.json"),
    ]
    result = CliRunner().invoke(app, [*arguments, "--num-iters", "1", "--cache-tokens", "1k", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["conditions"]["model"] == "config with random weights"
    assert all(measured["tokens_per_second"] > 0 for measured in report["results"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dummy-weights", "expected --model-config with --dummy-weights, got none"),
        ("--model-config llama-8b", "expected --model-config with --dummy-weights, got it alone"),
        ("--dummy-weights --model-config llama-8b --model x", "expected --model or --dummy-weights, got both"),
        (
            "--dummy-weights --model-config llama-8b --compare transformers",
            "expected no --compare with --dummy-weights, got transformers",
        ),
        (
            "--dummy-weights --model-config llama-9b",
            "expected --model-config deepseek-v2-lite, deepseek-v32-4-layers, deepseek-v32-small, "
            "deepseek-v4-4-layers, deepseek-v4-small, gpt-oss-20b, llama-8b, qwen3-0.6b, qwen3-next-12-layers, "
            "qwen3-next-small or a config.json",
        ),
    ],
)
def test_random_weights_need_a_config_and_nothing_else(words: str, message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "throughput", *words.split()])
    assert result.exit_code != 0
    assert message in " ".join(f"{result.output} {result.exception}".split())
