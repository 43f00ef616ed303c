"""Hugging Face folders, as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig

from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.loading.opening import open_checkpoint
from support.gguf_files import tiny_llama

INDEX = "model.safetensors.index.json"


def opened(path: Path) -> Checkpoint:
    ledger = Ledger()
    checkpoint = open_checkpoint(path, ledger)
    assert list(ledger) == []
    return checkpoint


@pytest.mark.parametrize("shard_size", ["10GB", "30KB"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saved_models_come_back_whole(tmp_path: Path, shard_size: str, tied: bool, dtype: torch.dtype) -> None:
    model = tiny_llama(tie_word_embeddings=tied).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX).exists() == (shard_size == "30KB")
    checkpoint = opened(tmp_path)
    expected = {name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    assert set(checkpoint.tensors) == set(expected)
    for name, weight in expected.items():
        loaded = checkpoint.load(name)
        assert loaded.dtype == checkpoint.tensors[name].dtype == dtype
        assert checkpoint.tensors[name].shape == tuple(loaded.shape)
        assert torch.equal(loaded, weight)
    assert dict(checkpoint.config) == json.loads((tmp_path / "config.json").read_text())
    assert AutoConfig.from_pretrained(tmp_path).hidden_size == checkpoint.config["hidden_size"]
    assert (
        checkpoint.tensors["model.norm.weight"].stored_as
        == {
            torch.float32: "F32",
            torch.bfloat16: "BF16",
            torch.float16: "F16",
        }[dtype]
    )
    assert checkpoint.location == tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="30KB")
    return tmp_path


def edit_index(folder: Path, change: Any) -> None:
    content = json.loads((folder / INDEX).read_text())
    change(content)
    (folder / INDEX).write_text(json.dumps(content))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = min(sharded.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        opened(sharded)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", 7, None])
def test_a_shard_outside_of_the_folder_is_refused(sharded: Path, name: object) -> None:
    edit_index(sharded, lambda index: index["weight_map"].update({"model.norm.weight": name}))
    with pytest.raises(CheckpointError, match="same folder"):
        opened(sharded)


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused(sharded: Path) -> None:
    shard = min(sharded.glob("model-*.safetensors")).name
    edit_index(sharded, lambda index: index["weight_map"].update({"model.extra": shard}))
    with pytest.raises(CheckpointError, match=r"'model\.extra'"):
        opened(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_broken_index_is_refused(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match="index"):
        opened(sharded)


def test_several_files_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(CheckpointError, match="index"):
        opened(sharded)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -4])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    tiny_llama().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        opened(tmp_path)


def test_a_file_under_another_name_is_found_if_it_is_the_only_one(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert "model.norm.weight" in opened(tmp_path).tensors


def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match="pickle"):
        opened(tmp_path)


def test_a_folder_without_weights_or_config_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        opened(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"\*\.safetensors"):
        opened(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", "\ud800".encode("utf-16", "surrogatepass"), "[" * 200000])
def test_a_broken_config_is_refused(tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=r"config\.json"):
        opened(tmp_path)


def test_quantised_folders_are_refused(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.complex64, "C64"),
        (torch.int8, "I8"),
        (torch.int64, "I64"),
        (torch.uint8, "U8"),
        (torch.bool, "BOOL"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
    ],
)
def test_stored_types_that_are_not_the_weights_themselves_are_refused_by_name(
    tmp_path: Path, dtype: torch.dtype, name: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": torch.zeros(2).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=f"'x'.*got {name}"):
        opened(tmp_path)


def test_double_precision_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": torch.ones(2, dtype=torch.float64)}, tmp_path / "model.safetensors")
    assert opened(tmp_path).load("x").dtype == torch.float64


@pytest.mark.parametrize("name", ["nothing", "notes.txt"])
def test_other_paths_say_what_was_expected(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"a folder with config\.json and \*\.safetensors, a \.gguf file"):
        opened(tmp_path / name)


def test_end_tokens_fall_back_to_the_tokenizer(tmp_path: Path) -> None:
    tiny_llama(eos_token_id=None).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert opened(tmp_path).generation.eos_token_ids == frozenset()
    backend = Tokenizer(models.BPE(vocab={"a": 0, "<end>": 1}, merges=[]))
    backend.add_special_tokens(["<end>"])
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    checkpoint = opened(tmp_path)
    assert checkpoint.generation.eos_token_ids == {1}
    assert checkpoint.load_tokenizer().encode_prompt("a<end>") == [0, 1]
