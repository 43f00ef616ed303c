"""What the chat could reuse is counted apart from the cache, and nothing is told of answers that the cache changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from sightline.bench.engine import multiturn, stepping
from sightline.bench.engine.measure import Agreement, Prompts, random_prompts
from sightline.bench.engine.multiturn import (
    Chat,
    ComparedTurn,
    count_reusable,
    measure_multiturn,
    tally,
)
from sightline.bench.engine.stepping import TimedAnswer, TimeSpread
from sightline.bench.engine.work import load_subject
from sightline.cli import app
from sightline.core.errors import ConfigError, SightlineError
from sightline.engine.engine import Engine
from support.hybrids import make_hybrid
from support.tiny_models import VOCAB, make_model

CHAT = Chat(users=2, turns=3, system_len=6, question_len=3, answer_len=4)
LENGTHS = ["--users", "2", "--turns", "3", "--system-len", "6", "--question-len", "3", "--answer-len", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    return path


def settings(folder: Path, **changes: object) -> dict[str, object]:
    return {"model": str(folder), "page_size": 4, "cache_tokens": 256, "paranoid": True, **changes}


def run(folder: Path, *arguments: str) -> Result:
    given = ["bench", "multiturn", "--model", str(folder), "--page-size", "4", *arguments]
    return CliRunner().invoke(app, given)


def exchange(reusable: int, reused: int, with_cache: float, without_cache: float) -> ComparedTurn:
    return ComparedTurn(10, reusable, TimedAnswer((1,), with_cache, reused), TimedAnswer((1,), without_cache, 0))


@pytest.mark.parametrize(
    ("prompt", "computed", "reusable"),
    [
        ([1, 2, 3, 4, 5], [], 0),
        ([1, 2, 3, 4, 5], [[1, 2, 3, 4, 9]], 4),
        ([1, 2, 3, 4, 5], [[1, 2, 3, 9, 5]], 2),
        ([1, 2, 3, 4, 5], [[9, 2, 3, 4, 5], [1, 2, 9], [1, 2, 3, 4]], 4),
        ([1, 2, 3, 4], [[1, 2, 3, 4]], 2),
        ([1, 2], [[1, 2, 3, 4]], 0),
    ],
)
def test_reusable_are_whole_pages_of_the_longest_common_beginning_but_for_the_last_token(
    prompt: list[int], computed: Prompts, reusable: int
) -> None:
    assert count_reusable(prompt, computed, page_size=2) == reusable


def test_the_chat_reuses_exactly_what_a_count_by_hand_says(folder: Path) -> None:
    told: list[int] = []
    report = measure_multiturn(settings(folder), CHAT, told.append)
    # Prompts of 9, 16 and 23 tokens. Before the second 9 + 3 were computed, before the third 16 + 3: the last token of
    # an answer never is. In pages of 4 that makes 12 and 16, for each of 2 users.
    counted = [(turn.prompt_tokens, turn.reusable_tokens, turn.reused_tokens, turn.share) for turn in report.turns]
    assert counted == [(18, 0, 0, None), (32, 24, 24, 1.0), (46, 32, 32, 1.0)]
    in_all = report.all_turns
    assert (in_all.prompt_tokens, in_all.reusable_tokens, in_all.reused_tokens, in_all.share) == (96, 56, 56, 1.0)
    assert report.agreement == Agreement(equal_first=6, num_prompts=6, equal_tokens=24, num_tokens=24)
    assert told == [1, 2, 3]
    assert all(0 < turn.with_cache.median_seconds <= turn.with_cache.largest_seconds for turn in report.turns)


def test_a_hybrid_reuses_what_any_other_model_does(tmp_path: Path) -> None:
    make_hybrid("qwen3_next").save_pretrained(tmp_path)
    chat = Chat(users=3, turns=4, system_len=32, question_len=6, answer_len=5)
    report = measure_multiturn(settings(tmp_path, cache_tokens=512), chat, lambda turn: None)
    assert [turn.share for turn in report.turns] == [None, 1.0, 1.0, 1.0]
    assert report.all_turns.reused_tokens >= 0.6 * report.all_turns.prompt_tokens


def test_random_weights_can_be_asked_for(folder: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "multiturn", "--model-config", "qwen3-next-small", *LENGTHS])
    assert "expected --model-config with --dummy-weights" in result.output
    result = run(folder, "--dummy-weights", "--model-config", "qwen3-next-small", *LENGTHS)
    assert "expected --model or --dummy-weights, got both" in result.output


def test_the_system_prompt_is_found_where_steps_are_short_too(folder: Path) -> None:
    chat = replace(CHAT, users=5, system_len=32)
    report = measure_multiturn(
        settings(folder, cache_tokens=512, max_num_batched_tokens=16, max_num_seqs=5), chat, lambda turn: None
    )
    assert [turn.share for turn in report.turns] == [None, 1.0, 1.0]
    assert report.turns[0].reusable_tokens == 0


def test_a_chat_that_just_fits_the_cache_is_reused_whole(folder: Path) -> None:
    # 27 tokens at the end of each history: 7 pages of 4 for each of 2 users.
    report = measure_multiturn(settings(folder, cache_tokens=56), CHAT, lambda turn: None)
    assert report.all_turns.share == 1.0
    with pytest.raises(ConfigError, match="at most 52 tokens in the cache at once, got 56"):
        measure_multiturn(settings(folder, cache_tokens=52), CHAT, lambda turn: None)


def test_what_one_request_reuses_beyond_the_reusable_does_not_make_up_for_another() -> None:
    counted = tally([exchange(0, 8, 1.0, 2.0), exchange(8, 4, 2.0, 6.0), exchange(8, 8, 4.0, 20.0)])
    assert (counted.prompt_tokens, counted.reusable_tokens, counted.reused_tokens) == (30, 16, 20)
    assert counted.share == 12 / 16
    assert counted.with_cache == TimeSpread(median_seconds=2.0, largest_seconds=4.0)
    assert counted.without_cache == TimeSpread(median_seconds=6.0, largest_seconds=20.0)
    assert counted.speedup == 3.0


def test_a_first_token_is_timed_at_the_end_of_the_step_that_gave_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_subject(settings(folder, max_num_batched_tokens=12, max_num_seqs=2)).llm.engine
    now, step = [0.0], Engine.step

    def timed_step(stepped: Engine) -> None:
        step(stepped)
        now[0] += 1.0

    monkeypatch.setattr(Engine, "step", timed_step)
    monkeypatch.setattr(stepping, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    # The first step reads 12 tokens, the second the other 8 of the long prompt, and the short one.
    answers = stepping.answer(engine, random_prompts([20, 3], VOCAB), 3)
    assert [each.first_token_seconds for each in answers] == [2.0, 2.0]
    answers = stepping.answer(engine, random_prompts([3, 20], VOCAB), 3)
    assert [each.first_token_seconds for each in answers] == [1.0, 2.0]
    assert [len(each.token_ids) for each in answers] == [3, 3]
    assert not engine.has_work


def spoil(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    """Changes one token of every answer that was given with the cache, but for the warm-up's."""
    right = stepping.answer

    def wrong(engine: Engine, prompts: Prompts, answer_len: int) -> list[TimedAnswer]:
        answers = right(engine, prompts, answer_len)
        if not engine.prefixes or answer_len != CHAT.answer_len:
            return answers
        return [replace(each, token_ids=_changed(each.token_ids, index)) for each in answers]

    monkeypatch.setattr(multiturn, "answer", wrong)


def _changed(tokens: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*tokens[:index], (tokens[index] + 1) % VOCAB, *tokens[index + 1 :])


def test_nothing_is_reported_where_the_cache_changes_an_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, index=2)
    result = run(folder, *LENGTHS, "--cache-tokens", "256", "--json")
    assert isinstance(result.exception, SightlineError)
    assert str(result.exception) == (
        "expected the same greedy tokens with the prefix cache and without, got 2 of 2 first tokens and 4 of 8 leading "
        "tokens equal; nothing is reported"
    )
    assert result.stdout == ""


def test_rounded_answers_may_part_after_their_first_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = settings(folder, dtype="bfloat16")
    with monkeypatch.context() as patched:
        spoil(patched, index=1)
        report = measure_multiturn(rounded, CHAT, lambda turn: None)
        assert report.agreement.equal_tokens == report.agreement.equal_first > 3
        assert f"{report.agreement.equal_first} of 24 leading tokens equal" in report.lines()[2]
    spoil(monkeypatch, index=0)
    with pytest.raises(SightlineError, match=r"expected mostly the same greedy tokens .* nothing is reported"):
        measure_multiturn(rounded, CHAT, lambda turn: None)


def test_the_command_prints_a_table_or_one_json_object(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    result = run(folder, *LENGTHS, "--cache-tokens", "256", "--save-result", str(saved))
    assert result.exit_code == 0, result.output
    table = " ".join(result.stdout.split())
    assert "| 2 | 32 | 24 | 24 | 0 | 100.0% |" in table
    assert "| all | 96 | 56 | 56 | 0 | 100.0% |" in table
    assert "Reused 100.0% of the reusable tokens (aim: 95%); first tokens of turn 3 come" in result.stdout
    report = json.loads(saved.read_text())
    printed = json.loads(run(folder, *LENGTHS, "--cache-tokens", "256", "--json").stdout)
    assert printed.keys() == report.keys()
    assert [turn["reused_tokens"] for turn in printed["turns"]] == [0, 24, 32]
    assert printed["turns"][0]["share"] is None
    assert printed["chat"] == {"users": 2, "turns": 3, "system_len": 6, "question_len": 3, "answer_len": 4}
    assert printed["all_turns"]["with_cache"]["median_seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--users", "9", "--max-num-seqs", "8"], "at most 8 sequences at once, got 9; raise --max-num-seqs"),
        (["--turns", "40"], "at most 256 tokens, got 286 .*raise --max-model-len"),
        (["--max-model-len", "26"], "at most 26 tokens, got 27 .*raise --max-model-len"),
        (["--users", "40"], "at most 1024 tokens in the cache at once, got 1120.* raise --cache-tokens"),
        (["--memory-fraction", "1.5"], "memory_fraction in .* got 1.5"),
    ],
)
def test_a_chat_that_does_not_fit_is_refused_before_it_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], remedy: str
) -> None:
    monkeypatch.setattr(Engine, "step", lambda engine: pytest.fail("a step was made"))
    result = run(folder, *LENGTHS, "--cache-tokens", "1k", *arguments)
    assert isinstance(result.exception, ConfigError)
    with pytest.raises(ConfigError, match=remedy):
        raise result.exception


def test_a_chat_of_one_turn_is_refused(folder: Path) -> None:
    result = run(folder, "--turns", "1")
    assert result.exit_code == 2
    assert "expected at least 2 turns, got 1" in result.output


def test_a_cache_for_one_user_reuses_everything_with_a_host_tier(folder: Path) -> None:
    asked = settings(folder, cache_tokens=32, max_model_len=32, max_num_seqs=2, host_cache_gib=1 / 1024)
    report = measure_multiturn(asked, CHAT, lambda turn: None)
    last = report.turns[-1]
    assert (last.reusable_tokens, last.reused_tokens, last.share) == (32, 32, 1.0)
    assert last.host_tokens > 0
    assert last.reused_without < 32
    assert "reused without the host tier" in " ".join(report.lines())
