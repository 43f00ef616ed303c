"""`conformance --model` and `--prove`: what is accepted and told, and what becomes of an engine that is not proven."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from sightline.attention.proof import ProofBook
from sightline.cli.application import app
from sightline.cli.conformance import proving
from sightline.cli.conformance.proving import _run, prove_first
from sightline.cli.conformance.rows import conformance
from sightline.core.command_line import WITHOUT_ATTENTION, prove_words
from sightline.core.config import EngineConfig
from sightline.testing.conformance import engine_proof
from sightline.testing.conformance.checks import CHECKS
from support.embedding_folder import save_embedder
from support.serving import serving
from support.tiny_models import make_model

SMALL = ["--max-model-len", "40", "--max-num-seqs", "2", "--max-num-batched-tokens", "12", "--page-size", "4"]


@pytest.fixture
def proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sightline" / "proofs"


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit has its own tests."""
    some = tuple(check for check in CHECKS if check.name in ("built", "causal"))
    original = engine_proof.prove_engine
    monkeypatch.setattr(engine_proof, "prove_engine", lambda *given, **more: original(*given, **more, checks=some))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(path)
    return path


def ask(*words: str) -> Result:
    return CliRunner().invoke(app, ["conformance", *words])


def parsed(words: tuple[str, ...]) -> dict[str, Any]:
    """What `conformance` would make of them."""
    context = conformance.make_context("conformance", list(words[1:]))
    return dict(context.params)


OTHERS: dict[str, Any] = {
    "task": "embed",
    "device": "cuda",
    "dtype": "float16",
    "quantization": "keep",
    "max_model_len": 100,
    "max_num_seqs": 7,
    "max_num_batched_tokens": 99,
    "page_size": 32,
    "cache_tokens": 1000,
    "max_state_checkpoints": 5,
    "kv_cache_dtype": "fp8",
    "memory_fraction": 0.25,
    "enable_hisparse": True,
    "hisparse_config": '{"host_to_device_ratio": 3}',
    "prefix_caching": True,
    "attention_backend": "torch",
    "prefill_attention_backend": "triton",
    "decode_attention_backend": "reference",
    "tensor_parallel_size": 3,
}


def test_every_setting_is_known_to_change_attention_or_not_to() -> None:
    names = {field.name for field in fields(EngineConfig)}
    assert names == OTHERS.keys() | set(WITHOUT_ATTENTION)
    assert OTHERS.keys().isdisjoint(WITHOUT_ATTENTION)


@pytest.mark.parametrize("name", OTHERS)
def test_the_command_that_proves_an_engine_says_what_the_engine_was_asked_for(name: str) -> None:
    also: dict[str, Any] = {"enable_hisparse": True} if name == "hisparse_config" else {}
    words = prove_words(replace(EngineConfig(), **{name: OTHERS[name]}, **also), "a/folder")
    assert words[:3] == ("conformance", "--model", "a/folder")
    usual = parsed(("conformance", "--model", "a/folder"))
    value = (OTHERS[name],) if name == "page_size" else OTHERS[name]
    assert parsed(words) == usual | also | {name: value}


def test_the_command_names_nothing_that_is_as_usual() -> None:
    assert prove_words(EngineConfig(seed=3, strict=True, paranoid=True), "m") == ("conformance", "--model", "m")
    off = prove_words(EngineConfig(prefix_caching=False), "m")
    assert parsed(off)["prefix_caching"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-model-len", "40"], "expected --max-model-len with --model alone, got it without"),
        (["--context-length", "40"], "expected --context-length with --model alone, got it without"),
        (["--task", "embed"], "expected --task with --model alone"),
        (["--again"], "expected --again with --model alone"),
        (["--model", "m", "--backend", "torch"], "expected --backend without --model alone, got it with one"),
        (["--model", "m", "--quick"], "expected --quick without --model"),
        (["--model", "m", "--check", "causal"], "expected --check without --model"),
        (["--model", "m", "--jobs", "2"], "expected --jobs without --model"),
        (["--model", "m", "--page-size", "4", "--page-size", "8"], "expected one --page-size with --model, got 2"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(words: list[str], message: str) -> None:
    result = ask(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.prove
@pytest.mark.usefixtures("few_checks")
def test_conformance_of_a_model_tells_what_runs_and_what_is_covered(proofs: Path, folder: Path) -> None:
    result = ask("--model", str(folder / "config.json"), *SMALL, "--attention-backend", "torch")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(
        "cpu · generate · float32, cache float32 · up to 2 rows, 12 tokens a step, 40 a sequence"
    )
    assert "note: weights: their sizes are those that config.json describes" in result.stdout
    assert "group0: 3 layers of full attention, 6 query heads, 3 on a key head, head dimension 8" in lines
    assert any(
        line.startswith("torch · float32 for prefill, decode of few rows, decode of one row of ") for line in lines
    )
    assert "  covered: rows 1 to 2; new tokens of a row 1 to 12; context of a row 0 to 39" in result.stdout
    assert lines[-1] == "proven for this engine"
    assert len(list(proofs.iterdir())) == 1
    again = ask("--model", str(folder), *SMALL, "--attention-backend", "torch", "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["duties"][0]["status"] == "proven before"


@pytest.mark.prove
@pytest.mark.usefixtures("few_checks")
def test_conformance_of_a_model_fails_with_what_is_not_covered(proofs: Path, folder: Path) -> None:
    result = ask("--model", str(folder), *SMALL, "--budget", "0.05")
    assert result.exit_code == 1
    assert "  not covered: " in result.stdout
    assert result.stdout.splitlines()[-1] == "not proven for this engine"


def test_a_model_that_is_not_there_is_an_error_like_any_other(tmp_path: Path) -> None:
    result = ask("--model", str(tmp_path / "nothing"))
    assert result.exit_code == 1
    assert "expected a folder with config.json" in str(result.exception)


def replaced_run(monkeypatch: pytest.MonkeyPatch, code: int) -> list[list[str]]:
    """The commands that would have been run, each of which ends with the code."""
    commands: list[list[str]] = []

    def run(command: list[str]) -> int:
        commands.append(command)
        return code

    monkeypatch.setattr(proving, "_run", run)
    return commands


def test_prove_first_starts_conformance_with_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = replaced_run(monkeypatch, 0)
    settings = {"model": "m", "max_num_seqs": 3, "strict": True}
    assert prove_first(settings, task="embed") == {**settings, "require_proof": True}
    [command] = ran
    assert command[:4] == [sys.executable, "-P", "-m", "sightline"]
    assert command[4:] == ["conformance", "--model", "m", "--task", "embed", "--max-num-seqs", "3"]


@pytest.mark.parametrize(("code", "told"), [(1, 1), (2, 2), (-9, 137)])
def test_an_engine_that_is_not_proven_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, told: int
) -> None:
    monkeypatch.setattr(proving, "_run", lambda command: code)
    with pytest.raises(SystemExit) as left:
        prove_first({"model": "m"})
    assert left.value.code == told
    assert "not started: attention is not proven for this engine" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "words",
    [["generate", "a"], ["chat", "a"], ["embed", "a", "--model", "m"], ["serve", "m"]],
    ids=lambda words: str(words[0]),
)
def test_every_command_that_has_an_engine_can_have_it_proven(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    asked = replaced_run(monkeypatch, 3)
    result = CliRunner().invoke(app, [*words, "--prove", "--max-model-len", "40"])
    assert result.exit_code == 3
    [command] = asked
    assert "--max-model-len" in command
    assert ("--task" in command) == (words[0] == "embed")


def test_what_the_process_says_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    assert _run([sys.executable, "-c", "print('said'); raise SystemExit(5)"]) == 5
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "said\n")


STARTED = "import time; open({!r}, 'w').close(); time.sleep(60)"
# A test run in the background may ignore signals, which processes inherit.
HEEDING = (
    "from signal import *; signal(SIGTERM, SIG_DFL); signal(SIGHUP, SIG_DFL); signal(SIGINT, default_int_handler); "
)
RUNNING = HEEDING + "from sightline.cli.conformance.proving import _run; import sys; _run([sys.executable, '-c', {!r}])"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_proof_that_is_interrupted_leaves_nothing_running(tmp_path: Path, number: signal.Signals, code: int) -> None:
    started = tmp_path / "started"
    inner = f"import os; open({str(started)!r} + '.pid', 'w').write(str(os.getpid())); " + STARTED.format(str(started))
    command = [sys.executable, "-c", RUNNING.format(inner)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        child = int(Path(f"{started}.pid").read_text())
        process.send_signal(number)
        assert process.wait(30) == code
    finally:
        process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


WRONG = """
from sightline.attention.backends.torch.backend import TorchBackend


class Wrong(TorchBackend):
    def plan(self, step, buffers):
        plan = super().plan(step, buffers)
        run = plan.run
        object.__setattr__(plan, "run", lambda layer, inputs, out: (run(layer, inputs, out), out.zero_())[0])
        return plan
"""


@pytest.fixture
def wrong_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend that another package brings, for this process's children."""
    package = tmp_path / "packages"
    (package / "wrong-1.0.dist-info").mkdir(parents=True)
    (package / "wrong_backend.py").write_text(WRONG)
    (package / "wrong-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n")
    (package / "wrong-1.0.dist-info" / "entry_points.txt").write_text(
        "[sightline.attention_backends]\nwrong = wrong_backend:Wrong\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")]))
    return "wrong"


@pytest.mark.prove
def test_a_server_with_a_wrong_backend_does_not_start(proofs: Path, wrong_backend: str) -> None:
    asked = ["serve", "--port", "0", "--prove", "--attention-backend", wrong_backend, *SMALL]
    result = subprocess.run(
        [sys.executable, "-m", "sightline", *asked], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 1
    assert "FAILED first-read" in result.stderr
    assert "not started: attention is not proven for this engine" in result.stderr
    assert '"listening"' not in result.stderr
    assert not ProofBook(proofs).folder.exists() or list(proofs.iterdir()) == []


@pytest.mark.prove
@pytest.mark.usefixtures("few_checks")
def test_a_server_whose_engine_is_proven_starts_with_the_proof_required(proofs: Path, tmp_path: Path) -> None:
    embedder = str(save_embedder(tmp_path / "embedder"))
    limits = ["--task", "embed", "--max-num-seqs", "2", "--max-num-batched-tokens", "20"]
    proven = ask("--model", embedder, *limits)
    assert proven.exit_code == 0, proven.output
    with serving(embedder, "--prove", *limits) as served:
        assert served.get("/health")[0] == 200
        assert any("proven before" in line for line in served.lines)
    for proof in proofs.iterdir():
        proof.unlink()
    result = subprocess.run(
        [sys.executable, "-m", "sightline", "serve", embedder, "--port", "0", "--require-proof", *limits],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 1
    assert f"not proven on this device with these versions; run: sightline conformance --model {embedder} --task" in (
        " ".join(result.stderr.split())
    )


def test_help_names_both(proofs: Path) -> None:
    assert "--prove" in CliRunner().invoke(app, ["serve", "--help"]).output
    assert isinstance(conformance, click.Command)
    assert "--model" in ask("--help").output
