"""A model's own files say how states become a vector; what they say that is not known is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sightline.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.loading.pooling import Pooling, PoolingKind, read_pooling
from support.tiny_bert import write_modules

TYPES = "sentence_transformers.models."
OLD = {"word_embedding_dimension": 8, "pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False}


def read(folder: Path) -> Pooling:
    return read_pooling(folder, PoolingKind.LAST, Ledger(strict=True))


def write_pooling(folder: Path, config: object) -> None:
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


def write_list(folder: Path, modules: object) -> None:
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_modules(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", PoolingKind, ids=[kind.value for kind in PoolingKind])
@pytest.mark.parametrize("normalise", [True, False])
def test_both_forms_of_the_file_say_the_same(tmp_path: Path, kind: PoolingKind, normalise: bool) -> None:
    write_modules(tmp_path, pooling=kind.value, normalise=normalise)
    assert read(tmp_path) == Pooling(kind, normalise)
    for stated in (kind.value, [kind.value]):
        write_pooling(tmp_path, {"embedding_dimension": 8, "pooling_mode": stated, "include_prompt": True})
        assert read(tmp_path) == Pooling(kind, normalise)


def test_modules_are_known_by_the_last_part_of_their_type(folder: Path) -> None:
    newer = "sentence_transformers.sentence_transformer.modules."
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    write_list(folder, [{"idx": 0, "name": "x", "type": newer + kind, "path": path} for kind, path in kinds])
    assert read(folder) == Pooling(PoolingKind.MEAN, normalise=True)


@pytest.mark.parametrize("length", [1, 256, 8192])
def test_the_length_that_it_was_trained_for_is_read(tmp_path: Path, length: int) -> None:
    write_modules(tmp_path, max_tokens=length)
    assert read(tmp_path).max_tokens == length


@pytest.mark.parametrize("stated", [{}, {"max_seq_length": None}, {"max_seq_length": 0}, {"max_seq_length": True}])
def test_a_length_that_is_none_is_not_taken(folder: Path, stated: object) -> None:
    (folder / "sentence_bert_config.json").write_text(json.dumps(stated))
    assert read(folder).max_tokens is None


@pytest.mark.parametrize(
    ("file", "stated", "said"),
    [
        (
            "config_sentence_transformers.json",
            {"prompts": {"query": "search: "}, "default_prompt_name": "query"},
            "'query' of config_sentence_transformers.json is not put before texts: 'search: '",
        ),
        ("sentence_bert_config.json", {"do_lower_case": True}, "of sentence_bert_config.json is not supported"),
    ],
    ids=["prompt", "lower case"],
)
def test_what_the_files_would_do_to_a_text_is_recorded(
    folder: Path, file: str, stated: dict[str, object], said: str
) -> None:
    (folder / file).write_text(json.dumps(stated))
    ledger = Ledger()
    read_pooling(folder, PoolingKind.LAST, ledger)
    assert [entry.outcome for entry in ledger.degradations] == [said]


@pytest.mark.parametrize("default", [None, "document", "unknown"])
def test_prompts_that_change_nothing_by_themselves_are_none_to_speak_of(folder: Path, default: str | None) -> None:
    stated = {"prompts": {"query": "search: ", "document": ""}, "default_prompt_name": default}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(stated))
    assert read(folder) == Pooling(PoolingKind.MEAN, normalise=True)


def test_without_modules_the_default_is_taken_and_recorded(tmp_path: Path) -> None:
    ledger = Ledger()
    assert read_pooling(tmp_path, PoolingKind.LAST, ledger) == Pooling(PoolingKind.LAST, normalise=True)
    [entry] = ledger.degradations
    assert entry.subject == "pooling"
    assert "lasttoken, normalised, is used" in entry.outcome
    with pytest.raises(ConfigError, match="refused under --strict: pooling"):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["Dense", "LayerNorm", "WeightedLayerPooling", "Router", "Dropout"])
def test_a_module_that_changes_the_vector_is_refused(folder: Path, kind: str) -> None:
    listed = json.loads((folder / "modules.json").read_text())
    write_list(folder, [*listed, {"idx": 3, "name": "3", "path": "3_X", "type": TYPES + kind}])
    with pytest.raises(UnsupportedModelError, match=f"expected modules Transformer, Pooling and Normalize, got {kind}"):
        read(folder)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (OLD, "got none"),
        (OLD | {"pooling_mode_max_tokens": True}, "got max_tokens"),
        (OLD | {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "got cls, mean"),
        (OLD | {"pooling_mode_weightedmean_tokens": True}, "got weightedmean_tokens"),
        ({"pooling_mode": "max"}, "got max"),
        ({"pooling_mode": ["mean", "cls"]}, "got cls, mean"),
        ({"pooling_mode": []}, "got none"),
        ({"pooling_mode": 3}, "got 3"),
    ],
)
def test_a_pooling_that_is_not_known_or_not_one_is_refused(folder: Path, config: dict[str, object], said: str) -> None:
    write_pooling(folder, config)
    with pytest.raises(UnsupportedModelError, match=f"expected one pooling of cls, lasttoken, mean, {said}"):
        read(folder)


def test_modules_without_a_pooling_are_refused(folder: Path) -> None:
    write_list(folder, [{"type": TYPES + "Transformer", "path": ""}, {"type": TYPES + "Normalize", "path": "1_N"}])
    with pytest.raises(UnsupportedModelError, match="expected a module Pooling, got none"):
        read(folder)


@pytest.mark.parametrize("path", ["../outside", "1_Pooling/../../outside", "/etc", "..", "a/../../b"])
def test_a_module_outside_the_folder_is_refused(folder: Path, path: str) -> None:
    outside = folder.parent / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    write_list(folder, [{"type": TYPES + "Pooling", "path": path}])
    with pytest.raises(CheckpointError, match="expected modules with a type and a path"):
        read(folder)


@pytest.mark.parametrize(
    "modules",
    [{}, "text", 3, [3], [{}], [{"type": TYPES + "Pooling"}], [{"type": 1, "path": ""}], [{"type": "x", "path": None}]],
    ids=str,
)
def test_a_list_of_modules_that_is_none_is_refused(folder: Path, modules: object) -> None:
    write_list(folder, modules)
    with pytest.raises(CheckpointError, match=r"expected a list of modules|expected modules with a type and a path"):
        read(folder)


@pytest.mark.parametrize("file", ["modules.json", "1_Pooling/config.json", "sentence_bert_config.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"", b"[" * 100_000], ids=["cut", "bytes", "empty", "deep"])
def test_a_file_that_cannot_be_read_is_named(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=file):
        read(folder)


def test_a_file_that_is_missing_is_named(folder: Path) -> None:
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json"):
        read(folder)
