"""A measurement checks first, sends what it says, and a wrong server gets no report; the command end to end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sightline.bench.serving.http_stream import Address, Client
from sightline.bench.serving.measure import ServingBench, check_answers, measure_serving
from sightline.bench.serving.report import ServingReport
from sightline.bench.serving.work import Dataset, Endpoint
from sightline.cli import app
from sightline.core.environment import openai_api_key
from sightline.core.errors import ConfigError, SightlineError
from support.stub_completions import Scripted, StubServer, stub_server

SMALL = Dataset(num_prompts=4, input_len=5, output_len=3)


def measure(server: StubServer, **settings: Any) -> ServingReport:
    return measure_serving(ServingBench(base_url=server.url, **{"dataset": SMALL, **settings}))


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", *arguments])


def test_a_measurement_checks_warms_up_and_sends_what_it_says() -> None:
    with stub_server(Scripted(pieces=("a", "b", "c")), models=("first", "second"), vocab_size=30) as server:
        report = measure(server, num_warmups=2)
    assert (report.completed, report.output_tokens, report.prompt_tokens, report.other_lengths) == (4, 12, 20, 0)
    assert report.sent.model == "first"
    assert report.sent.check == "one greedy prompt gave the same 3 tokens, whole and streamed"
    whole, streamed, *rest = server.asked
    assert whole | {"stream": True, "stream_options": {"include_usage": True}} == streamed
    assert len(rest) == 6
    assert all(max(body["prompt"]) < 30 and body["ignore_eos"] and body["max_tokens"] == 3 for body in rest)
    warm, counted = rest[:2], rest[2:]
    assert sorted(body["prompt"] for body in counted) == sorted([list(ask.prompt) for ask in SMALL.draw(30)])
    assert not any(body["prompt"] in [each["prompt"] for each in counted] for body in warm)
    assert "token ids below 30" in report.sent.dataset


def test_words_are_sent_where_there_is_no_vocabulary_and_to_chats() -> None:
    with stub_server(vocab_size=None) as server:
        assert "English words as text" in measure(server).sent.dataset
        assert isinstance(server.asked[-1]["prompt"], str)
    with stub_server() as server:
        report = measure(server, endpoint=Endpoint.CHAT)
        assert report.completed == 4
        assert len(server.asked[-1]["messages"][0]["content"].split()) == 5


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            Scripted(whole="another"),
            "expected the same text streamed as in the whole body, 'another', got 'Paris, of course'",
        ),
        (Scripted(usage=None), "expected a completion with choices and usage, got"),
        (Scripted(done=False), "expected a stream of one greedy prompt, got none: expected .DONE"),
        (Scripted(status=400), "expected an answer to one greedy prompt, got HTTP 400: scripted 400"),
        (Scripted(raw=b"HTTP/1.1 200 OK\r\n\r\n{}"), "expected a completion, got '{}'"),
    ],
)
def test_nothing_is_reported_of_a_server_whose_answers_are_wrong(script: Scripted, message: str) -> None:
    with stub_server(script) as server:
        with pytest.raises(SightlineError, match=message):
            measure(server)
        assert len(server.asked) <= 2


def test_usage_that_differs_between_the_two_is_seen() -> None:
    def script(body: Mapping[str, Any], _: int) -> Scripted:
        return Scripted(usage={"prompt_tokens": 5, "completion_tokens": 4 if body.get("stream") else 3})

    with (
        stub_server(script) as server,
        pytest.raises(SightlineError, match=r"expected the same number of output tokens .*, 3, got 4"),
    ):
        asyncio.run(check_answers(Client(Address.parse(server.url)), "stub", Endpoint.COMPLETIONS, 5.0))


def test_without_the_check_a_wrong_server_is_measured_and_said_to_be_unchecked() -> None:
    with stub_server(Scripted(whole="another")) as server:
        report = measure(server, check=False, num_warmups=0)
    assert (report.completed, report.sent.check, len(server.asked)) == (4, "not asked for", 4)


def test_a_warm_up_that_fails_is_told() -> None:
    with (
        stub_server(lambda _, number: Scripted(status=500 if number == 2 else 200)) as server,
        pytest.raises(SightlineError, match=r"expected warm-up requests to complete, .* HTTP 500"),
    ):
        measure(server)


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        ({}, "other", "expected one of the models that are served, stub; got other"),
        (
            {"pages": {"/v1/models": b"<html>"}},
            None,
            "expected a list of models at http.*/v1/models, got HTTP 200: '<html>'",
        ),
        ({"pages": {"/v1/models": b'{"data": [{"name": "x"}]}'}}, None, "check that --base-url"),
        ({"models": ()}, None, "expected a list of models"),
    ],
)
def test_a_model_that_is_not_served_and_a_server_of_something_else_are_told(
    settings: dict[str, Any], model: str | None, message: str
) -> None:
    with stub_server(**settings) as server, pytest.raises(SightlineError, match=message):
        measure(server, model=model)


def test_a_server_that_is_not_there_is_named_with_what_to_do() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        result = cli("--base-url", url)
    assert isinstance(result.exception, SightlineError)
    assert f"expected a server at {url}, got" in str(result.exception)
    assert "start one with `sightline serve`, or name another with --base-url" in str(result.exception)


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout": 0.0},
        {"percentiles": (101.0,)},
        {"base_url": "nowhere"},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        measure_serving(ServingBench(**settings))


def test_a_key_of_the_environment_is_read_and_a_malformed_one_is_refused_untold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", " sk-1\n")
    assert openai_api_key() == "sk-1"
    monkeypatch.setenv("OPENAI_API_KEY", "")
    assert openai_api_key() is None
    monkeypatch.setenv("OPENAI_API_KEY", "secret key")
    with pytest.raises(ConfigError, match="in OPENAI_API_KEY, got others") as raised:
        openai_api_key()
    assert "secret" not in str(raised.value)


def test_the_command_sends_refused_requests_again_where_asked() -> None:
    def script(_: Mapping[str, Any], number: int) -> Scripted:
        return Scripted(status=503, headers={"Retry-After": "0.1"}) if number == 3 else Scripted()

    with stub_server(script) as server:
        again = cli("--base-url", server.url, "--num-prompts", "3", "--num-warmups", "0", "--refused", "retry")
    assert "completed 3, refused 0, failed 0, sent again after refusals 1 (1 with 503)" in again.stdout
    assert "refused requests are sent again after Retry-After" in again.stdout


def test_what_does_not_speak_http_is_named() -> None:
    with stub_server(Scripted(raw=b"nonsense")) as server, pytest.raises(SightlineError) as raised:
        measure(server)
    assert f"the response came from {server.url}/v1/completions: check --base-url" in str(raised.value)


def test_the_command_prints_saves_and_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    saved = tmp_path / "result.json"
    flags = ["--num-prompts", "6", "--random-input-len", "5", "--random-output-len", "3", "--request-rate", "200"]
    more = ["--percentiles", "50,90", "--save-result", str(saved), "--num-warmups", "0", "--temperature", "0.5"]
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    with stub_server(Scripted(gap=0.01, usage=usage)) as server:
        result = cli("--base-url", f"{server.url}/v1", *flags, *more)
        as_json = cli("--base-url", server.url, *flags, "--json", "--api-key", "given")
    assert result.exit_code == 0, result.output
    assert "sampling as sent: temperature 0.5, ignore_eos True, seed 0" in result.stdout
    assert "completed 6, refused 0, failed 0" in result.stdout
    assert "6 prompts, 200 per second (Poisson, seed 0)" in result.stdout
    assert "30 prompt tokens, 12 of them cached; 18 output tokens" in result.stdout
    assert "| completed requests | count | mean | p50 | p90 | p99 |" in " ".join(result.stdout.split())
    assert "from-the-environment" not in result.output + saved.read_text()
    found = json.loads(saved.read_text())
    assert (found["completed"], found["output_tokens"], found["sent"]["arrivals"]["request_rate"]) == (6, 18, 200.0)
    assert set(found["ttft"]["percentiles"]) == {"p50", "p90", "p99"}
    assert found["itl"]["count"] == 12
    assert json.loads(as_json.stdout)["completed"] == 6
    keys = [line for head in server.heads for line in head.splitlines() if line.startswith("Authorization")]
    assert set(keys) == {"Authorization: Bearer from-the-environment", "Authorization: Bearer given"}


def test_the_command_exits_with_1_where_a_request_failed_and_with_0_where_they_were_refused() -> None:
    flags = ["--num-prompts", "4", "--num-warmups", "0", "--random-input-len", "5"]
    with stub_server(lambda _, number: Scripted(status=500 if number > 4 else 200)) as server:
        failed = cli("--base-url", server.url, *flags)
    assert failed.exit_code == 1
    assert "completed 3, refused 0, failed 1" in failed.stdout
    assert "  failed: HTTP 500: scripted 500" in failed.stdout
    with stub_server(lambda _, number: Scripted(status=429 if number > 4 else 200)) as server:
        refused = cli("--base-url", server.url, *flags)
    assert refused.exit_code == 0
    assert "completed 3, refused 1 (1 with 429), failed 0" in refused.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--request-rate", "0"], "expected requests per second above 0, or inf, got '0'"),
        (["--request-rate", "fast"], "expected requests per second"),
        (["--percentiles", "50,x"], "expected numbers separated by commas"),
        (["--percentiles", "101"], "expected numbers between 0 and 100"),
        (["--num-prompts", "0"], "expected a whole number of at least 1"),
        (["--max-concurrency", "0"], "expected a whole number of at least 1"),
        (["--dataset-name", "x"], "random"),
        (["--save-result", "/nowhere/x"], "expected a file in a folder that exists"),
    ],
)
def test_flags_that_make_no_sense_are_refused_before_anything_is_sent(flags: list[str], message: str) -> None:
    result = cli(*flags)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_ctrl_c_prints_what_was_measured_and_that_it_was_interrupted() -> None:
    answered = threading.Event()

    def script(_: Mapping[str, Any], number: int) -> Scripted:
        if number == 6:
            answered.set()
        return Scripted(first_delay=30.0 if number > 4 else 0.0)

    flags = ["--num-prompts", "9", "--num-warmups", "0", "--max-concurrency", "2", "--random-input-len", "5"]
    with stub_server(script) as server:
        command = [sys.executable, "-m", "sightline", "bench", "serve", "--base-url", server.url, *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert answered.wait(20)
            time.sleep(0.2)
            os.kill(process.pid, signal.SIGINT)
            told, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert "INTERRUPTED: 2 requests were cut, 4 were not sent" in told
    assert "completed 3, refused 0, failed 0" in told
    assert "Traceback" not in errors
