"""The command line as a person meets it: in its own process, with its own streams and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sightline.cli import app
from sightline.core.config import Quantization
from sightline.version import __version__

QUICK = ["--max-model-len", "1k", "--max-tokens", "6", "--temperature", "0"]


def sightline(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sightline", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
    )


def test_version() -> None:
    assert sightline("version").stdout.strip() == __version__


def test_help_names_every_command() -> None:
    text = sightline("--help").stdout
    for command in ("generate", "chat", "collect-env", "version"):
        assert command in text


def test_collect_env_is_json_on_request() -> None:
    facts = json.loads(sightline("collect-env", "--json").stdout)
    assert facts["sightline"] == __version__
    assert facts["torch"][0].isdigit()
    assert facts["flashinfer-python"] == "not installed" or facts["flashinfer-python"][0].isdigit()


def test_generate_prints_the_text_and_says_the_rest_on_standard_error() -> None:
    result = sightline("generate", "The capital of France is", *QUICK)
    assert result.returncode == 0
    assert result.stdout.startswith("The capital of France is Paris.")
    assert "full attention on torch" in result.stderr
    assert "temperature 0" in result.stderr
    assert "tokens/s" in result.stderr


def test_generate_json_echoes_effective_parameters() -> None:
    result = sightline("generate", "The capital of France is", *QUICK, "--seed", "9", "--json")
    assert result.stderr == ""
    output = json.loads(result.stdout)
    assert output["outputs"][0]["text"].startswith(" Paris")
    assert output["outputs"][0]["finish_reason"] == "length"
    assert output["params"]["temperature"] == 0.0
    assert output["params"]["seed"] == 9
    assert output["params"]["max_tokens"] == 6


def test_generate_json_tells_continuations_stop_reasons_and_logprobs() -> None:
    asked = ["--n", "2", "--logprobs", "2", "--prompt-logprobs", "0", "--stop", "!!", "--stop", "aris", "--json"]
    asked += ["--repetition-penalty", "1.01", "--presence-penalty", "0.1", "--frequency-penalty", "0.1"]
    output = json.loads(sightline("generate", "The capital of France is", *QUICK, *asked, "--min-tokens", "0").stdout)
    assert [each["index"] for each in output["outputs"]] == [0, 1]
    for each in output["outputs"]:
        assert (each["text"], each["finish_reason"], each["stop_reason"]) == (" P", "stop", "aris")
        [told] = each["logprobs"]
        [token] = each["token_ids"]
        assert told[str(token)]["decoded_token"] == " Paris"
        assert told[str(token)]["rank"] == 1
        assert told[str(token)]["logprob"] < 0
    assert output["prompt_logprobs"][0] is None
    assert len(output["prompt_logprobs"]) == len(output["prompt_token_ids"])
    echoed = output["params"]
    assert (echoed["repetition_penalty"], echoed["presence_penalty"], echoed["frequency_penalty"]) == (1.01, 0.1, 0.1)
    assert (echoed["stop"], echoed["n"], echoed["min_tokens"]) == (["!!", "aris"], 2, 0)


def test_chat_stops_at_a_string_and_says_so() -> None:
    result = sightline("chat", "Say hello.", *QUICK, "--stop", "e", "--repetition-penalty", "1.1", "--min-tokens", "1")
    assert result.returncode == 0
    assert "repetition_penalty 1.1 · min_tokens 1 · stop 'e'" in result.stderr
    assert "greedy" in result.stderr


def test_chat_talks_until_the_input_ends_and_remembers() -> None:
    result = sightline("chat", "-q", *QUICK, stdin="My name is Ada.\n\nWhat is my name?\n")
    assert result.returncode == 0
    assert result.stderr == ""
    assert len([line for line in result.stdout.splitlines() if line]) >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--model", "no/such/folder"], "expected a folder with config.json"),
        (["generate", "x", "--attention-backend", "flash"], "expected an attention backend out of torch, reference"),
        (["generate", "x", "--top-p", "3"], "expected top_p between 0 and 1, got 3.0"),
        (["generate", "x", "--min-tokens", "200"], "expected min_tokens of at most max_tokens, 128, got 200"),
        (["generate", "x", "--logprobs", "21", "--json"], "expected logprobs between 0 and 20, got 21"),
        (["generate", "x", "--n", "2"], "expected --json with --n, --logprobs and --prompt-logprobs"),
        (["generate", "x", "--stop", ""], "expected stop strings of at least one character"),
        (["generate", "x", "--dtype", "int7"], "expected dtype auto, float32"),
        (["generate", "x", "--max-model-len", "9k"], "expected max_model_len of at most 8192"),
        (["generate", "x", "--max-model-len", "many"], "expected a whole number such as 4096 or 4k"),
        (["generate", ""], "expected a prompt of at least one token"),
        (["generate", "", "--json"], "expected a prompt of at least one token"),
    ],
)
def test_bad_input_is_one_clear_line_and_a_failing_exit_code(arguments: list[str], message: str) -> None:
    result = sightline(*arguments)
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ["latency", "--num-iters", "0"],
        ["latency", "--batch-size", "0"],
        ["throughput", "--num-prompts", "0"],
        ["growth", "--num-steps", "0"],
        ["growth", "--rows", "1,0"],
        ["profile", "--num-steps", "0"],
    ],
)
def test_a_measurement_of_nothing_is_refused(flags: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", *flags])
    assert result.exit_code == 2
    assert "expected a whole number of at least 1, got '0'" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("flag", ["--save-result", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(flag: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "growth", flag, str(tmp_path / "nowhere" / "file")])
    assert result.exit_code == 2
    assert "expected a file in a folder that exists" in " ".join(result.output.replace("│", " ").split())


def test_the_ways_with_quantised_weights_are_those_of_the_config() -> None:
    [option] = [each for each in app.commands["generate"].params if each.name == "quantization"]
    assert isinstance(option.type, click.Choice)
    assert list(option.type.choices) == [kind.value for kind in Quantization]
