"""`sightline embed` as a person meets it: what goes in, what comes out, and what is refused before any work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

from sightline import LLM
from sightline.cli import app
from sightline.cli.options import embedding_options
from sightline.core.config import EngineConfig
from sightline.core.embedding import EmbeddingRequestOutput
from sightline.core.errors import SightlineError
from sightline.engine.text_embedder import TextEmbedder
from sightline.offline import embedding_run
from sightline.offline.embedding_files import InputFormat, OutputFormat
from support.embedding_folder import CLS, HIDDEN_SIZE, MAX_TOKENS, SEP, save_embedder
from support.tiny_models import make_model

TEXTS = ["the cat sat on the mat", "a dog", "the sky is blue and the sun is red", "x", "the sun"]
LONG = "the cat and the dog " * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), task="embed", device="cpu")


def embed(folder: Path, *arguments: str | Path, stdin: str | bytes = "") -> Result:
    given = ["embed", "--model", str(folder), "--device", "cpu", *map(str, arguments)]
    return CliRunner().invoke(app, given, input=stdin)


def vectors(outputs: Sequence[EmbeddingRequestOutput]) -> list[list[float]]:
    return [output.outputs.embedding for output in outputs]


def printed(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def printed_vectors(result: Result) -> list[object]:
    return [each["embedding"] for each in printed(result)]


def refused(result: Result) -> str:
    """The message of an error that is raised on purpose, with nothing printed."""
    assert isinstance(result.exception, SightlineError), result.output
    assert result.stdout == ""
    return str(result.exception)


def misused(result: Result) -> str:
    """The message about options that do not go together, as one line."""
    assert result.exit_code == 2
    return " ".join(result.output.replace("│", " ").split())


def test_texts_of_the_command_line_are_printed_in_order_as_llm_embeds_them(folder: Path, llm: LLM) -> None:
    expected = llm.embed(TEXTS)
    result = embed(folder, *TEXTS)
    assert printed(result) == [
        {"embedding": vector, "num_tokens": len(output.prompt_token_ids), "num_truncated_tokens": 0}
        for vector, output in zip(vectors(expected), expected, strict=True)
    ]


def test_lines_of_a_file_and_of_standard_input_are_texts(folder: Path, llm: LLM, tmp_path: Path) -> None:
    expected, content = vectors(llm.embed(TEXTS)), "".join(f"{text}\n" for text in TEXTS)
    (tmp_path / "texts.txt").write_text(content)
    assert printed_vectors(embed(folder, "--input", tmp_path / "texts.txt")) == expected
    assert printed_vectors(embed(folder, stdin=content)) == expected
    assert printed_vectors(embed(folder, "-i", "-", stdin=content)) == expected
    as_json = "".join(json.dumps(text) + "\n" for text in TEXTS)
    assert printed_vectors(embed(folder, "--input-format", "jsonl", stdin=as_json)) == expected


def test_jsonl_takes_objects_strings_and_ids_and_carries_other_fields(folder: Path, llm: LLM, tmp_path: Path) -> None:
    ids = [CLS, 7, 9, SEP]
    lines = [{"id": "a", "text": TEXTS[0], "tags": [1, {"é": None}]}, TEXTS[1], ids, {"text": ids, "id": 2**70}]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = printed(embed(folder, "--input", path))
    tokens = {"prompt_token_ids": ids}
    expected = vectors(llm.embed([TEXTS[0], TEXTS[1], tokens, tokens]))  # type: ignore[list-item]
    assert [each.pop("embedding") for each in found] == expected
    counts = {"num_truncated_tokens": 0, "num_tokens": 4}
    assert found[0] == {"id": "a", "tags": [1, {"é": None}], **counts, "num_tokens": 8}
    assert found[2:] == [counts, {"id": 2**70, **counts}]


def test_the_text_is_found_under_the_field_that_is_named(folder: Path, llm: LLM) -> None:
    line = json.dumps({"text": "another", "body": TEXTS[0]})
    [found] = printed(embed(folder, "--input-format", "jsonl", "--field", "body", stdin=line))
    assert (found["text"], found["embedding"]) == ("another", llm.embed(TEXTS[0])[0].outputs.embedding)


@pytest.mark.parametrize(("name", "flags"), [("v.npy", []), ("v.bin", ["--format", "npy"])])
def test_numpy_files_hold_the_same_vectors(folder: Path, llm: LLM, tmp_path: Path, name: str, flags: list[str]) -> None:
    result = embed(folder, *TEXTS, "--output", tmp_path / name, *flags)
    assert (result.exit_code, result.stdout) == (0, "")
    matrix = np.load(tmp_path / name)
    assert (matrix.dtype, matrix.shape) == (np.float32, (len(TEXTS), HIDDEN_SIZE))
    assert matrix.tolist() == vectors(llm.embed(TEXTS))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_safetensors_files_hold_the_same_vectors_and_counts(folder: Path, llm: LLM, tmp_path: Path) -> None:
    assert embed(folder, *TEXTS, "-o", tmp_path / "v.safetensors").exit_code == 0
    found, expected = load_file(tmp_path / "v.safetensors"), llm.embed(TEXTS)
    assert found["embeddings"].dtype == np.float32
    assert found["embeddings"].tolist() == vectors(expected)
    assert found["num_tokens"].tolist() == [len(output.prompt_token_ids) for output in expected]


def test_jsonl_files_hold_what_would_be_printed(folder: Path, tmp_path: Path) -> None:
    embed(folder, *TEXTS, "--output", tmp_path / "v.jsonl")
    assert (tmp_path / "v.jsonl").read_text() == embed(folder, *TEXTS, "--output", "-").stdout


@pytest.mark.parametrize("name", ["v.jsonl", "v.npy", "v.safetensors"])
def test_a_large_input_goes_in_slices_and_keeps_its_order(
    folder: Path, llm: LLM, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, whole = list[int](), TextEmbedder.embed

    def counted(embedder: TextEmbedder, texts: Sequence[str], **how: object) -> list[EmbeddingRequestOutput]:
        sizes.append(len(texts))
        return whole(embedder, texts, **how)  # type: ignore[arg-type]

    texts = [f"the cat {number}" for number in range(301)]
    expected = vectors(llm.embed(texts))
    monkeypatch.setattr(TextEmbedder, "embed", counted)
    monkeypatch.setattr(embedding_run, "SLICE_TEXTS", 50)
    assert embed(folder, "-o", tmp_path / name, stdin="\n".join(texts)).exit_code == 0
    assert sizes == [50] * 6 + [1]
    match name:
        case "v.npy":
            found = np.load(tmp_path / name)
        case "v.safetensors":
            found = load_file(tmp_path / name)["embeddings"]
        case _:
            found = np.array([json.loads(line)["embedding"] for line in (tmp_path / name).read_text().splitlines()])
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_texts_that_are_too_long_are_cut_only_where_that_is_asked_for(folder: Path, llm: LLM) -> None:
    message = refused(embed(folder, stdin=f"a dog\n{LONG}\n"))
    assert message.startswith(f"standard input, line 2: expected a text of 1 to {MAX_TOKENS} tokens, got 27")
    result = embed(folder, "--truncate", stdin=f"a dog\n{LONG}\n")
    assert printed_vectors(result) == vectors(llm.embed(["a dog", LONG.strip()], truncate=True))
    counts = [(each["num_tokens"], each["num_truncated_tokens"]) for each in printed(result)]
    assert counts == [(4, 0), (MAX_TOKENS, 11)]
    assert f"1 text cut to {MAX_TOKENS} tokens: 11 tokens left out" in result.stderr


def test_dimensions_shorten_vectors_in_every_form(folder: Path, llm: LLM, tmp_path: Path) -> None:
    expected = vectors(llm.embed(TEXTS, dimensions=5))
    assert printed_vectors(embed(folder, *TEXTS, "--dimensions", "5")) == expected
    embed(folder, *TEXTS, "--dimensions", "5", "-o", tmp_path / "v.npy")
    assert np.load(tmp_path / "v.npy").tolist() == expected
    embed(folder, *TEXTS, "--dimensions", "5", "-o", tmp_path / "v.safetensors")
    assert load_file(tmp_path / "v.safetensors")["embeddings"].tolist() == expected
    message = refused(embed(folder, "x", "--dimensions", "25", "-o", tmp_path / "w.npy"))
    assert f"expected dimensions from 1 to {HIDDEN_SIZE}" in message
    assert not (tmp_path / "w.npy").exists()


def test_what_was_done_is_said_on_standard_error(folder: Path) -> None:
    said = embed(folder, *TEXTS).stderr
    assert f"{folder} · cpu · float32 · attention on numba" in said.replace("\n", "")
    assert f"{HIDDEN_SIZE} dimensions · mean pooling, normalised · texts of up to {MAX_TOKENS} tokens" in said
    assert "5 texts, 30 tokens in " in said
    assert " texts/s · " in said
    assert " tokens/s" in said
    assert "cut to" not in said
    assert embed(folder, *TEXTS, "--quiet").stderr == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected at least one text, got none: standard input is empty"),
        ('"a"\n{"id": 1}\n', "standard input, line 2: expected a JSON object with the text"),
        ('"a"\n[1, 500]\n', "standard input, line 2: expected token ids from 0 to "),
        ('"a"\n\n"b"\n', "standard input, line 2: expected a JSON object"),
    ],
)
def test_a_bad_line_is_an_error_before_any_work(
    folder: Path, content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(TextEmbedder, "embed")
    outputs: list[list[str]] = [[], ["-o", str(tmp_path / "v.npy")]]
    for output in outputs:
        assert refused(embed(folder, "--input-format", "jsonl", *output, stdin=content)).startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_text_of_the_command_line_is_named_by_its_place(folder: Path) -> None:
    assert refused(embed(folder, "a dog", LONG)).startswith("TEXT 2: expected a text of 1 to 16 tokens")


def test_an_input_that_changes_while_it_is_read_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, check = tmp_path / "texts.txt", embedding_run.check_texts
    path.write_text("a\nb\n")

    def checked(*given: object) -> None:
        check(*given)  # type: ignore[arg-type]
        path.write_text("a\nb\nc\n")

    monkeypatch.setattr(embedding_run, "check_texts", checked)
    message = refused(embed(folder, "-i", path, "-o", tmp_path / "v.npy"))
    assert "expected 2 texts" in message
    assert "it changed while it was read" in message
    assert not (tmp_path / "v.npy").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--input", __file__], "expected TEXT or --input"),
        (["x", "--field", "body"], "expected TEXT or --input"),
        (["x", "--input-format", "text"], "expected TEXT or --input"),
        (["--input", __file__, "--field", "body"], "expected JSONL with --field, got plain text"),
        (["x", "--format", "npy"], "expected --output with --format npy, got none"),
        (["x", "--format", "safetensors", "-o", "-"], "expected --output with --format safetensors"),
        (["x", "--output", "no/such/folder/v.npy"], "expected a file in a folder that exists"),
        (["--input", "no/such/file"], "does not exist"),
        (["x", "--dimensions", "0"], "expected a whole number of at least 1"),
        (["x", "--temperature", "0"], "--temperature is a sampling parameter, not an option of embed"),
        (["x", "--chat-template", "f"], "--chat-template is a setting of the engine, not an option of embed"),
        (["x", "--async-scheduling"], "--async-scheduling is a setting of the engine, not an option of embed"),
    ],
)
def test_options_that_would_be_ignored_or_cannot_work_are_refused(
    folder: Path, arguments: list[str], message: str
) -> None:
    assert message in misused(embed(folder, *arguments))


def test_a_model_must_be_named() -> None:
    assert "expected --model, got none" in misused(CliRunner().invoke(app, ["embed", "x"]))


def test_an_unknown_suffix_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "ends in .jsonl, .npy, .safetensors, got v.csv" in refused(embed(folder, "x", "-o", tmp_path / "v.csv"))
    (tmp_path / "texts.json").write_text("[]")
    assert "say which with --input-format" in refused(embed(folder, "-i", tmp_path / "texts.json"))


@pytest.mark.parametrize(
    "flags",
    [
        *(["--page-size", "8"], ["--block-size", "8"], ["--cache-tokens", "64"]),
        *(["--memory-fraction", "0.2"], ["--mem-fraction-static", "0.2"], ["--memory-fraction", "0.5"]),
    ],
    ids=" ".join,
)
def test_flags_of_a_cache_are_refused_where_there_is_none(folder: Path, flags: list[str]) -> None:
    assert f"expected no {flags[0]}, got it: {folder} embeds without a cache" in refused(embed(folder, "x", *flags))


def test_flags_of_the_engine_reach_it(folder: Path) -> None:
    assert "expected no prefix caching" in refused(embed(folder, "x", "--enable-prefix-caching"))
    assert "max_num_batched_tokens of at least 16" in refused(embed(folder, "x", "--max-num-batched-tokens", "4"))
    assert "of 1 to 8 tokens" in refused(embed(folder, TEXTS[2], "--max-model-len", "8"))
    assert "expected dtype auto" in refused(embed(folder, "x", "--dtype", "int7"))
    said = embed(folder, "x", "--dtype", "bfloat16", "--attention-backend", "reference", "--paranoid").stderr
    assert "bfloat16 · attention on reference" in said.replace("\n", "")


def test_a_decoder_embeds_through_pages_where_the_flags_ask_for_it(tmp_path: Path) -> None:
    make_model("qwen3").save_pretrained(tmp_path / "model")
    save_embedder(tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").rename(tmp_path / "model" / "tokenizer.json")
    flags = ["--enable-prefix-caching", "--page-size", "4", "--cache-tokens", "512", "--max-num-seqs", "1"]
    lines = "".join(f"{[5, 6, 7, 8, 9, 10, 11, 12, last]}\n" for last in (13, 14))
    result = embed(tmp_path / "model", *flags, "--input-format", "jsonl", stdin=lines)
    plain = embed(tmp_path / "model", "--input-format", "jsonl", stdin=lines)
    np.testing.assert_allclose(
        np.array(printed_vectors(result), dtype=float), np.array(printed_vectors(plain), dtype=float), atol=1e-5
    )
    assert "cache of 512 tokens" in result.stderr
    assert "8 tokens found in the prefix cache" in result.stderr


def test_the_options_are_those_of_the_config_with_its_defaults() -> None:
    options = {each.name: each for each in app.commands["embed"].params}
    forms = [options["output_format"].type, options["input_format"].type]
    assert all(isinstance(each, click.Choice) for each in forms)
    assert [list(each.choices) for each in forms if isinstance(each, click.Choice)] == [
        [each.value for each in OutputFormat],
        [each.value for each in InputFormat],
    ]

    @click.command()
    @embedding_options
    def command(settings: dict[str, object]) -> None:
        given = {name: value for name, value in settings.items() if value is not None}
        click.echo(EngineConfig(**given) == EngineConfig(model="m"))  # type: ignore[arg-type]

    assert CliRunner().invoke(command, ["--model", "m"]).stdout == "True\n"


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_an_interruption_leaves_no_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, code: int
) -> None:
    def interrupted(*given: object, **how: object) -> None:
        assert len(list(tmp_path.iterdir())) == 1
        signal.raise_signal(sent)

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(TextEmbedder, "embed", interrupted)
    result = embed(folder, *TEXTS, "-o", tmp_path / "v.npy")
    assert (result.exit_code, result.stdout) == (code, "")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == handler


ENVIRONMENT = os.environ | {"NO_COLOR": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


@pytest.mark.prove
def test_ctrl_c_between_slices_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("the cat sat on the mat\n" * 100_000)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-m", "sightline", "embed", "-m", str(folder), "--device", "cpu"]
    with subprocess.Popen(
        [*command, "-i", str(tmp_path / "texts.txt"), "-o", str(tmp_path / "out" / "v.npy")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        while process.poll() is None and not any(path.stat().st_size for path in (tmp_path / "out").iterdir()):
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert b"Traceback" not in said
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.prove
def test_errors_and_degradations_are_said_in_a_process_of_its_own(folder: Path, tmp_path: Path) -> None:
    bare = save_embedder(tmp_path / "bare", with_modules=False)
    command = [sys.executable, "-m", "sightline", "embed", "--device", "cpu", "-m", str(bare)]
    shown = subprocess.run([*command, "a dog"], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert shown.stderr.count("degraded: pooling: bare has no modules.json") == 1
    assert len(json.loads(shown.stdout)["embedding"]) == HIDDEN_SIZE
    failed = subprocess.run(command, input="a dog\n\n", capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "error: standard input, line 2: expected a text, got an empty line" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert "refused under --strict: pooling" in refused(embed(bare, "a dog", "--strict"))


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, sightline.cli\n"
        "try: sightline.cli.app.main(['embed', '--help'])\n"
        "except SystemExit: print({'torch', 'numpy', 'tokenizers', 'safetensors'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.splitlines()[-1] == "set()"
