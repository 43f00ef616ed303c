"""Whatever stands in a model's files, opening it succeeds or raises a `SightlineError`.

Each test replaces one value after another by wrong types, huge and tiny numbers, long and odd names, and deep nesting.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sightline.core.config import EngineConfig, Task
from sightline.core.errors import CheckpointError, SightlineError
from sightline.core.ledger import Ledger
from sightline.models.loading.gguf.config import translate_config
from sightline.models.loading.gguf.file import GgufFile
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.testing.conformance.engine_proof import open_blueprint
from sightline.text.tokenizers.gguf import tokenizer_from_gguf
from sightline.text.tokenizers.gguf_metadata import GgufMetadata
from support.gguf_files import tiny_llama, write_llama
from support.tiny_bert import make_bert, save_embedder, write_tokenizer
from support.tiny_models import make_model

LONG = "x" * 5000
NUM_MUTANTS = 150


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


VALUES: tuple[object, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63), 10**30, 10**308, 10**400, -(10**400)),
    *(0.5, -0.5, 1e-320, 1e300, 1e308, -1e308),
    *("", "x", LONG, "\0", "\ud800", "٣", "../x", "/", "9" * 5000),
    *([], [[]], [None], [0] * 3, ["a", LONG], [10**400], {}, {"a": {}}, {"0": 10**400}, {LONG: 1}, {"\0": 1}),
    *(nested(20), nested(60), nested(900)),
)


def places(value: object, before: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """The path of every value in a document, up to three levels deep."""
    entries: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(entries)[:40]:
        yield (*before, key)
        if len(before) < 2:
            yield from places(each, (*before, key))


def replaced(document: Any, place: tuple[Any, ...], value: object) -> Any:
    found = changed = copy.deepcopy(document)
    for key in place[:-1]:
        found = found[key]
    found[place[-1]] = value
    return changed


def mutants(document: Any) -> Iterator[tuple[object, Any]]:
    for place in places(document):
        for value in VALUES:
            yield (place, str(value)[:30]), replaced(document, place, value)
    for value in VALUES:
        yield ("all", str(value)[:30]), value
        if isinstance(document, dict):
            yield ("more", str(value)[:30]), {**document, "something_else": value}
            for key in (LONG, "\0", "\ud800", "9" * 5000):
                yield ("key", str(value)[:30]), {**document, key: value}


def drawn(document: Any) -> list[tuple[object, Any]]:
    """Some of the mutants: the same in every run, and all of them under `SIGHTLINE_ALL_MUTANTS`."""
    found = list(mutants(document))
    return found if "SIGHTLINE_ALL_MUTANTS" in os.environ else Random(7).sample(found, min(NUM_MUTANTS, len(found)))


def check(path: Path, use: Callable[[], object]) -> None:
    """Mutates a JSON file in every way; `use` must never raise anything but a `SightlineError`."""
    before = path.read_text()
    refused = 0
    for what, mutant in drawn(json.loads(before)):
        path.write_text(json.dumps(mutant))
        try:
            use()
        except SightlineError:
            refused += 1
        except BaseException as error:
            pytest.fail(f"{path.name}: {what} raises {type(error).__name__}: {str(error)[:200]}")
    path.write_text(before)
    use()
    assert refused > 10


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make_model("llama3").save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    return tmp_path


def draw_up(folder: Path) -> None:
    """Everything that is decided from the files before weights are read."""
    open_blueprint(EngineConfig(str(folder), cache_tokens=256), Ledger())


@pytest.mark.prove
@pytest.mark.parametrize("family", ["llama3", "gemma3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_config_json(tmp_path: Path, family: str) -> None:
    make_model(family).save_pretrained(tmp_path)
    check(tmp_path / "config.json", lambda: draw_up(tmp_path))


def test_a_quantization_section(llama: Path) -> None:
    path = llama / "config.json"
    config = json.loads(path.read_text())
    for section in (
        {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head"]},
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"], "dequantize": False},
    ):
        for what, mutant in drawn(section):
            path.write_text(json.dumps({**config, "quantization_config": mutant}))
            try:
                define_model(open_checkpoint(llama, Ledger()).config, Ledger())
            except SightlineError:
                continue
            except BaseException as error:
                pytest.fail(f"{what} raises {type(error).__name__}: {str(error)[:200]}")


def test_generation_config_json(llama: Path) -> None:
    fields = {
        "eos_token_id": [2],
        "do_sample": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_new_tokens": 2,
        "num_beams": 1,
        "bad_words_ids": None,
    }
    (llama / "generation_config.json").write_text(json.dumps(fields))
    check(llama / "generation_config.json", lambda: open_checkpoint(llama, Ledger()))


def test_the_index_of_shards(llama: Path) -> None:
    names = sorted(open_checkpoint(llama, Ledger()).tensors)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names[:6], "model.safetensors")}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    check(llama / "model.safetensors.index.json", lambda: open_checkpoint(llama, Ledger()))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "tokenizer_config.json",
            {
                "bos_token": "[CLS]",
                "eos_token": {"content": "[SEP]"},
                "chat_template": [{"name": "default", "template": "x"}, {"name": "other", "template": "y"}],
                "added_tokens_decoder": {"0": {"content": "[PAD]", "special": True, "lstrip": False}},
                "model_max_length": 10**30,
            },
        ),
        ("special_tokens_map.json", {"bos_token": "[CLS]", "eos_token": {"content": "[SEP]"}}),
        ("added_tokens.json", {"[PAD]": 0}),
        ("chat_template.json", {"chat_template": "x"}),
    ],
)
def test_the_files_beside_the_tokenizer(llama: Path, name: str, fields: dict[str, object]) -> None:
    (llama / name).write_text(json.dumps(fields))
    checkpoint = open_checkpoint(llama, Ledger())
    check(llama / name, checkpoint.load_tokenizer)


@pytest.mark.prove
def test_tokenizer_json(llama: Path) -> None:
    checkpoint = open_checkpoint(llama, Ledger())
    check(llama / "tokenizer.json", checkpoint.load_tokenizer)


def test_a_panic_of_the_tokenizers_library_is_a_checkpoint_error(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panic(path: str) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr("tokenizers.Tokenizer.from_file", panic)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected a tokenizer, got a fault: index out of"):
        open_checkpoint(llama, Ledger()).load_tokenizer()

    def interrupt(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tokenizers.Tokenizer.from_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        open_checkpoint(llama, Ledger()).load_tokenizer()


@pytest.mark.prove
@pytest.mark.parametrize("name", ["config.json", "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"])
def test_the_files_of_an_embedder(tmp_path: Path, name: str) -> None:
    save_embedder(make_bert(), tmp_path, max_tokens=40)
    check(
        tmp_path / name,
        lambda: open_blueprint(EngineConfig(str(tmp_path), task=Task.EMBED.value), Ledger()),
    )


def test_the_metadata_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_llama(path, tiny_llama())
    file = GgufFile(path)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    numbers = (0, -1, 1, 2**64 - 1, -(2**63), 0.5, -0.5, 1e308, float("nan"), float("inf"))
    for key in (*file.metadata, "llama.rope.scaling.type", "llama.rope.scaling.factor", "tokenizer.chat_template"):
        for value in (*numbers, "", "x", LONG, "\0", True, [], ["x"], [1, 2], [0.5], [float("nan")], [[1]]):
            changed = {**file.metadata, key: value}
            for use in (
                lambda found: define_model(translate_config(GgufMetadata(found), shapes, Ledger()), Ledger()),
                tokenizer_from_gguf,
            ):
                try:
                    use(changed)
                except SightlineError:
                    continue
                except BaseException as error:
                    pytest.fail(f"{key} = {str(value)[:30]} raises {type(error).__name__}: {str(error)[:200]}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"rms_norm_eps": 1' + "0" * 400 + "}"),
        ("config.json", '{"rms_norm_eps": 1e400}'),
        ("config.json", '{"model_type": "\\ud800"}'),
        ("config.json", "[" * 33 + "]" * 33),
    ],
)
def test_what_only_python_can_hold_is_no_json_of_a_model(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match="expected valid JSON in"):
        open_checkpoint(tmp_path, Ledger())
