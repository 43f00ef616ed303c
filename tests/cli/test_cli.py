"""The command line as a person meets it: in its own process, with its own streams and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sightline.attention.backends import registry
from sightline.attention.coverage import Coverage
from sightline.attention.kinds import SpecKind
from sightline.attention.proof import Proof, ProofBook, utc_now
from sightline.cache.table import PageTable
from sightline.cli import app, main
from sightline.core.config import EngineConfig, Quantization
from sightline.core.ledger import Ledger
from sightline.testing.conformance import report
from sightline.testing.conformance.engine_proof import list_duties, open_blueprint
from sightline.testing.conformance.trial import Check, CheckFailed, Trial
from sightline.version import __version__
from support.whole_coverage import coverage_of

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


def invoke(*arguments: str) -> Result:
    """Runs a command in this process, which has imported torch already."""
    return CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(app, arguments)


def test_version() -> None:
    assert sightline("version").stdout.strip() == __version__


def test_help_names_every_command() -> None:
    text = sightline("--help").stdout
    for command in [
        "bench",
        "capabilities",
        "chat",
        "collect-env",
        "conformance",
        "embed",
        "generate",
        "serve",
        "simulate",
        "version",
    ]:
        assert f"  {command} " in text


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'tokenizers', 'gguf', 'pytest', 'asyncio', 'ssl', 'http.client', 'rich.progress'}"
    code = f"import sys, sightline.cli; print({heavy} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "set()"


def test_collect_env_is_json_on_request() -> None:
    facts = json.loads(invoke("collect-env", "--json").stdout)
    assert facts["sightline"] == __version__
    assert facts["torch"][0].isdigit()
    assert facts["flashinfer-python"] == "not installed" or facts["flashinfer-python"][0].isdigit()


def test_generate_prints_the_text_and_says_the_rest_on_standard_error() -> None:
    result = sightline("generate", "The capital of France is", *QUICK)
    assert result.returncode == 0
    assert result.stdout.startswith("The capital of France is Paris.")
    assert "full attention on numba" in result.stderr
    assert "temperature 0" in result.stderr
    assert "tokens/s" in result.stderr


def test_generate_json_echoes_effective_parameters() -> None:
    result = invoke("generate", "The capital of France is", *QUICK, "--seed", "9", "--json")
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
    output = json.loads(invoke("generate", "The capital of France is", *QUICK, *asked, "--min-tokens", "0").stdout)
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
    result = invoke("chat", "Say hello.", *QUICK, "--stop", "e", "--repetition-penalty", "1.1", "--min-tokens", "1")
    assert result.exit_code == 0
    assert "repetition_penalty 1.1 · min_tokens 1 · stop 'e'" in result.stderr
    assert "greedy" in result.stderr


@pytest.mark.prove
def test_chat_talks_until_the_input_ends_and_remembers() -> None:
    result = sightline("chat", "-q", *QUICK, stdin="My name is Ada.\n\nWhat is my name?\n")
    assert result.returncode == 0
    assert result.stderr == ""
    assert len([line for line in result.stdout.splitlines() if line]) >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--model", "no/such/folder"], "expected a folder with config.json"),
        (
            ["generate", "x", "--attention-backend", "flash"],
            "expected attention_backend out of triton, triton-latent, ",
        ),
        (["generate", "x", "--top-p", "3"], "expected top_p in (0, 1], got 3.0"),
        (["generate", "x", "--min-tokens", "200"], "expected min_tokens of at most max_tokens, 128, got 200"),
        (["generate", "x", "--logprobs", "21", "--json"], "expected logprobs between 0 and 20, got 21"),
        (["generate", "x", "--n", "2"], "expected --json with --n, --logprobs and --prompt-logprobs"),
        (["generate", "x", "--stop", ""], "expected stop strings of at least one character"),
        (["generate", "x", "--dtype", "int7"], "expected dtype auto, float32"),
        (["generate", "x", "--kv-cache-dtype", "fp8_e5m2"], "expected kv_cache_dtype fp8_e4m3, got 'fp8_e5m2'"),
        (
            ["generate", "x", "--kv-cache-dtype", "bfloat16", "--attention-backend", "torch"],
            "torch: does not read a torch.bfloat16 cache",
        ),
        (["generate", "x", "--max-model-len", "9k"], "expected max_model_len of at most 8192"),
        (["generate", "x", "--max-model-len", "many"], "expected a whole number such as 4096 or 4k"),
        (["generate", ""], "expected a prompt of at least one token"),
        (["generate", "", "--json"], "expected a prompt of at least one token"),
        (["conformance", "--backend", "flash"], "expected an attention backend out of triton, triton-latent, "),
    ],
)
def test_bad_input_is_one_clear_line_and_a_failing_exit_code(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sightline", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code in (1, 2)
    assert message in capsys.readouterr().err


def test_bad_input_ends_the_process_with_a_message_and_no_traceback() -> None:
    result = sightline("generate", "x", "--dtype", "int7")
    assert result.returncode == 1
    assert "expected dtype auto, float32" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ["latency", "--num-iters", "0"],
        ["latency", "--batch-size", "0"],
        ["throughput", "--num-prompts", "0"],
        ["growth", "--num-steps", "0"],
        ["growth", "--rows", "1,0"],
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
    assert option.metavar == f"[{'|'.join(kind.value for kind in Quantization)}]"


@pytest.fixture
def proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of proofs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sightline" / "proofs"


def conformance(monkeypatch: pytest.MonkeyPatch, checks: tuple[Check, ...], *arguments: str) -> Result:
    monkeypatch.setattr(report, "CHECKS", checks)
    return CliRunner().invoke(app, ["conformance", "--device", "cpu", *arguments])


def passes(trial: Trial) -> None:
    trial.progress.num_steps += 1


def fails(trial: Trial) -> None:
    raise CheckFailed("expected light, got darkness\nand rain")


PASSING = (Check("ground", "there is ground", passes),)
FAILING = (
    Check("ground", "there is ground", fails),
    Check("house", "a house stands", passes, ("ground",)),
    Check("sky", "there is a sky", passes, excused=lambda subject: "no sky is declared"),
)


def test_conformance_tells_progress_and_then_a_report(monkeypatch: pytest.MonkeyPatch, proofs: Path) -> None:
    result = conformance(monkeypatch, PASSING, "--backend", "reference", "--page-size", "48")
    assert result.exit_code == 0
    [counts, proven] = result.stdout.splitlines()
    assert counts.startswith("reference · float32+bfloat16+float16 on cpu: 1 passed (1 steps, ")
    assert proven == "  proven on this device with these versions"
    assert "ground: passed" in result.stderr
    [file] = proofs.iterdir()
    assert json.loads(file.read_text())["checks"] == ["ground"]


def test_conformance_tells_what_failed_what_is_blocked_and_what_is_excused(
    monkeypatch: pytest.MonkeyPatch, proofs: Path
) -> None:
    conformance(monkeypatch, PASSING, "--backend", "reference")
    result = conformance(monkeypatch, FAILING, "--backend", "reference")
    assert result.exit_code == 1
    assert "1 failed, 1 blocked, 1 excused" in result.stdout
    assert "): expected light, got darkness and rain" in " ".join(result.stderr.split())
    assert result.stdout.splitlines()[1:] == [
        "  FAILED ground, which proves: there is ground",
        "    expected light, got darkness",
        "    and rain",
        "  blocked by what failed: house",
        "  excused sky: no sky is declared",
        "  not proven; the earlier proof is void",
    ]
    assert list(proofs.iterdir()) == []


def test_conformance_of_what_cannot_be_tried_here_is_no_success(monkeypatch: pytest.MonkeyPatch, proofs: Path) -> None:
    result = conformance(monkeypatch, PASSING, "--backend", "triton")
    assert result.exit_code == 1
    assert "nothing was tried" in result.stdout
    assert "runs on cuda, not cpu" in result.stdout


def test_conformance_needs_a_tried_row_of_every_backend_that_is_named(
    monkeypatch: pytest.MonkeyPatch, proofs: Path
) -> None:
    named = ["--backend", "reference", "--backend", "triton", "--backend", "triton-latent"]
    result = conformance(monkeypatch, PASSING, *named)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "asked for by name and not tried: triton, triton-latent"
    assert "reference · float32+bfloat16+float16 on cpu: 1 passed" in result.stdout
    assert json.loads(conformance(monkeypatch, PASSING, *named, "--json").stdout)["untried"] == [
        "triton",
        "triton-latent",
    ]
    assert conformance(monkeypatch, PASSING, "--backend", "reference", "--backend", "torch").exit_code == 0


def test_conformance_of_all_backends_needs_no_row_of_each(monkeypatch: pytest.MonkeyPatch, proofs: Path) -> None:
    result = conformance(monkeypatch, PASSING)
    assert result.exit_code == 0
    assert "triton · " in result.stdout
    assert "asked for by name" not in result.stdout


def test_conformance_by_a_check_of_another_kind_of_attention_is_no_success(proofs: Path) -> None:
    result = CliRunner().invoke(app, ["conformance", "--device", "cpu", "--backend", "torch", "--check", "heads"])
    assert result.exit_code == 1
    assert "nothing was tried" in result.stdout
    assert result.stdout.splitlines()[-1] == "asked for by name and not tried: torch, heads"


def test_conformance_by_a_check_that_is_excused_everywhere_is_no_success(proofs: Path) -> None:
    result = CliRunner().invoke(
        app, ["conformance", "--device", "cpu", "--backend", "torch-latent", "--check", "window"]
    )
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "asked for by name and not tried: torch-latent, window"


@pytest.mark.parametrize("checks", [["ways"], ["ways", "ground"]], ids=" ".join)
def test_conformance_by_a_check_that_no_row_has_is_no_success(
    monkeypatch: pytest.MonkeyPatch, proofs: Path, checks: list[str]
) -> None:
    ways = Check("ways", "there are ways", passes, kinds=frozenset({SpecKind.LATENT}))
    softmax = tuple(each for each in registry.BUILT_IN if not each.name.endswith("-latent"))
    monkeypatch.setattr(registry, "installed", lambda: softmax)
    result = conformance(monkeypatch, (*PASSING, ways), *(word for name in checks for word in ("--check", name)))
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "asked for by name and not tried: ways"
    assert ("nothing was tried" in result.stdout) == (checks == ["ways"])
    for others in (["--check", "ground"], ["--backend", "torch"]):
        assert conformance(monkeypatch, (*PASSING, ways), *others).exit_code == 0


def test_conformance_says_that_a_quick_run_proves_nothing(monkeypatch: pytest.MonkeyPatch, proofs: Path) -> None:
    result = conformance(monkeypatch, PASSING, "--backend", "reference", "--quick")
    assert result.stdout.splitlines()[1] == "  a quick run proves nothing; leave out --quick for a proof"
    assert not proofs.exists()


def test_conformance_of_all_backends_is_one_json_object_on_request(
    monkeypatch: pytest.MonkeyPatch, proofs: Path
) -> None:
    result = conformance(monkeypatch, FAILING, "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["failed"] is True
    assert {row["backend"] for row in told["rows"]} >= {"torch", "reference"}


@pytest.mark.prove
def test_conformance_side_by_side_is_one_json_object_and_names_the_row_of_each_check(proofs: Path) -> None:
    asked = ["--device", "cpu", "--backend", "reference", "--quick", "--check", "built", "--check", "cache-write"]
    result = CliRunner().invoke(app, ["conformance", *asked, "--jobs", "2", "--json"])
    assert result.exit_code == 0
    [row] = json.loads(result.stdout)["rows"]
    assert [(check["check"], check["verdict"]) for check in row["checks"]] == [
        ("built", "passed"),
        ("cache-write", "passed"),
    ]
    assert "reference · float32+bfloat16+float16: cache-write: passed (" in result.stderr


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ("0", "expected a whole number of at least 1, got '0'"),
        ("-2", "expected a whole number such as 4096 or 4k, got '-2'"),
        ("many", "expected a whole number such as 4096 or 4k, got 'many'"),
    ],
)
def test_conformance_in_no_process_is_refused(jobs: str, message: str) -> None:
    result = CliRunner().invoke(app, ["conformance", "--jobs", jobs])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_files_that_are_no_proofs_are_named(monkeypatch: pytest.MonkeyPatch, proofs: Path) -> None:
    proofs.mkdir(parents=True)
    (proofs / "foreign.json").write_text("{}")
    for result in (
        conformance(monkeypatch, PASSING, "--backend", "reference"),
        CliRunner().invoke(app, ["capabilities"]),
    ):
        assert result.exit_code == 0
        assert "foreign.json: expected a proof, got something else" in result.stderr.replace("\n", "")


@pytest.mark.prove
def test_generation_that_asks_for_proof_is_refused_without_and_runs_with_it(proofs: Path) -> None:
    asked = ["generate", "The capital of France is", *QUICK, "--cache-tokens", "4k", "--require-proof"]
    refused = sightline(*asked)
    assert refused.returncode == 1
    reason = "torch: not proven on this device with these versions; run: sightline conformance --model "
    assert reason in refused.stderr
    config = EngineConfig(max_model_len=1024, cache_tokens=4096)
    for duty in list_duties(open_blueprint(config, Ledger()), registry.installed()):
        coverage = reduce(Coverage.joined, map(coverage_of, duty.demands))
        ProofBook(proofs).record(Proof(duty.identity, coverage, ("causal",), utc_now()))
    assert sightline(*asked).stdout.startswith("The capital of France is Paris.")
    uncovered = sightline(*asked, "--page-size", "48")
    assert uncovered.returncode == 1
    assert "page size 48 (proven: 16)" in uncovered.stderr
    assert "--page-size 48" in uncovered.stderr.split("run: sightline conformance --model ")[1]


def test_capabilities_of_one_backend_alone(proofs: Path) -> None:
    result = CliRunner().invoke(app, ["capabilities", "--backend", "triton", "--json"])
    rows = json.loads(result.stdout)["rows"]
    assert {row["backend"] for row in rows} == {"triton"}
    assert rows[0]["ranks"]["decode of few rows"] > rows[0]["ranks"]["prefill"]
    assert "40 for decode of one row" in CliRunner().invoke(app, ["capabilities", "--backend", "triton"]).stdout
    unknown = CliRunner().invoke(app, ["capabilities", "--backend", "none"]).exception
    assert "expected an attention backend out of" in str(unknown)


@pytest.mark.parametrize(
    "other", [["--backend", "triton"], ["--device", "cpu"], ["--json"]], ids=lambda other: other[0]
)
def test_the_page_of_capabilities_is_what_it_is(other: list[str]) -> None:
    result = CliRunner().invoke(app, ["capabilities", "--markdown", *other])
    assert result.exit_code == 2
    assert f"expected --markdown alone, got {other[0]} too" in " ".join(result.output.split())


def test_capabilities_are_told_as_text_json_and_markdown(proofs: Path) -> None:
    text, data, page = (CliRunner().invoke(app, ["capabilities", *flags]) for flags in ([], ["--json"], ["--markdown"]))
    assert "torch · float32 (sightline)" in text.stdout
    assert "any · declared" in text.stdout
    assert {row["backend"] for row in json.loads(data.stdout)["rows"]} >= {"torch", "reference"}
    assert page.stdout.startswith("# What attention backends can do")


def test_simulate_says_what_was_played() -> None:
    result = CliRunner().invoke(app, ["simulate", "--seed", "3", "--seeds", "2", "--steps", "30"])
    assert result.exit_code == 0
    assert result.stdout.startswith("2 seeds, ")
    assert "nothing wrong" in result.stdout


def test_simulate_tells_the_seed_in_which_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    clear = PageTable.clear
    monkeypatch.setattr(PageTable, "clear", lambda table, row: clear(table, row)[:-1])
    result = CliRunner().invoke(app, ["simulate", "--seeds", "20", "--steps", "60"])
    assert result.exit_code == 1
    assert "run it again: sightline simulate --seed " in result.stdout
