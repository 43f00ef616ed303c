"""Tokenizers from Hugging Face folders, against transformers on the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sightline.core.errors import CheckpointError, RequestError
from sightline.text.tokenizers.folder import tokenizer_from_folder
from support.tiny_tokenizers import CHAT_TEMPLATE, TEXTS, save_folder, train_byte_level, train_sentence_piece


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_folder(train_byte_level(), tmp_path, bos="<|bos|>", eos="<|eos|>", chat_template=CHAT_TEMPLATE)
    return tmp_path


@pytest.mark.parametrize("kind", ["byte-level", "sentence-piece", "sentence-piece without prefix"])
def test_folder_encodes_and_decodes_as_transformers_does(tmp_path: Path, kind: str) -> None:
    if kind == "byte-level":
        save_folder(train_byte_level(), tmp_path, bos="<|bos|>", eos="<|eos|>")
    else:
        backend = train_sentence_piece(prefix_space=kind == "sentence-piece")
        save_folder(backend, tmp_path, bos="<s>", eos="</s>")
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    ours = tokenizer_from_folder(tmp_path)
    assert ours.vocab_size == len(oracle)
    assert ours.bos_id == oracle.bos_token_id
    assert ours.eos_ids == {oracle.eos_token_id}
    for text in TEXTS:
        ids = oracle.encode(text)
        assert ours.encode_prompt(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_decode_keeps_spaces_before_punctuation_even_where_the_config_asks_for_clean_up(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(clean_up_tokenization_spaces=True))
    ours = tokenizer_from_folder(folder)
    ids = ours.encode_prompt("Hello , world ! do n't")
    assert ours.decode(ids) == "Hello , world ! do n't"
    assert ours.decode(ids) == AutoTokenizer.from_pretrained(folder).decode(ids)


def test_bos_of_the_post_processor_comes_once(tmp_path: Path) -> None:
    backend = train_byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    save_folder(backend, tmp_path, bos="<|bos|>", eos="<|eos|>")
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    ours = tokenizer_from_folder(tmp_path)
    assert ours.encode_prompt("hi") == oracle.encode("hi")
    assert ours.encode_prompt("<|bos|>hi") == oracle.encode("hi")
    assert ours.encode_rendered("<|bos|>hi") == oracle.encode("hi")
    assert ours.encode_rendered("hi") == oracle.encode("hi")
    assert ours.encode_prompt("") == [0]


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, False), (True, True), (False, True), (False, False)])
def test_flags_of_the_config_do_not_overrule_the_vocabulary_file(folder: Path, add_bos: bool, add_eos: bool) -> None:
    edit_json(
        folder / "tokenizer_config.json",
        lambda config: config.update(add_bos_token=add_bos, add_eos_token=add_eos),
    )
    oracle = AutoTokenizer.from_pretrained(folder)
    assert tokenizer_from_folder(folder).encode_prompt("hi there") == oracle.encode("hi there")


def test_eos_of_the_post_processor_follows_raw_prompts_only(tmp_path: Path) -> None:
    backend = train_byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
    )
    save_folder(backend, tmp_path, bos="<|bos|>", eos="<|eos|>")
    ours = tokenizer_from_folder(tmp_path)
    assert ours.encode_prompt("hi") == AutoTokenizer.from_pretrained(tmp_path).encode("hi")
    assert ours.encode_rendered("hi") == ours.encode_prompt("hi")[:-1]


def test_truncation_and_padding_saved_with_a_vocabulary_do_not_apply(tmp_path: Path) -> None:
    backend = train_byte_level()
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=50, pad_id=3, pad_token="<|pad|>")
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    ours = tokenizer_from_folder(tmp_path)
    text = "Hello, world! And more than two tokens."
    assert ours.decode(ours.encode_prompt(text)) == text
    assert 3 not in ours.encode_prompt(text)


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("length", [2, 50])
def test_padding_and_truncation_do_not_hide_the_post_processor(tmp_path: Path, direction: str, length: int) -> None:
    backend = train_byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
    )
    backend.enable_truncation(max_length=length)
    backend.enable_padding(length=length, pad_id=3, pad_token="<|pad|>", direction=direction)
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    ours = tokenizer_from_folder(tmp_path)
    ids = ours.encode_prompt("Hello, world!")
    assert (ids[0], ids[-1]) == (0, 1)
    assert ours.decode(ids, skip_special_tokens=False) == "<|bos|>Hello, world!<|eos|>"


def test_prefix_is_found_where_the_vocabulary_lacks_common_letters(tmp_path: Path) -> None:
    backend = Tokenizer(models.BPE(vocab={"<s>": 0, "x": 1}, merges=[]))
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    ours = tokenizer_from_folder(tmp_path)
    assert ours.encode_prompt("xax") == [0, 1, 1]
    assert ours.encode_rendered("x") == [0, 1]


def test_a_vocabulary_without_a_token_for_any_text_is_refused(tmp_path: Path) -> None:
    backend = Tokenizer(models.BPE(vocab={"<s>": 0}, merges=[]))
    backend.add_special_tokens(["<s>"])
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    with pytest.raises(CheckpointError, match="a token for some text"):
        tokenizer_from_folder(tmp_path)


def test_special_tokens_may_be_named_in_the_special_tokens_map_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(train_byte_level().to_str())
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<|bos|>", "lstrip": False}, "eos_token": "<|eos|>"})
    )
    ours = tokenizer_from_folder(tmp_path)
    assert ours.bos_id == 0
    assert ours.eos_ids == {1}


def test_tokens_listed_only_beside_the_vocabulary_are_added(tmp_path: Path) -> None:
    backend = train_byte_level()
    next_id = backend.get_vocab_size()
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "added_tokens_decoder": {
                    str(next_id): {"content": "<tool>", "special": True, "normalized": False},
                    str(next_id + 1): {"content": "<note>", "special": False, "normalized": False},
                },
            }
        )
    )
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    ours = tokenizer_from_folder(tmp_path)
    ids = ours.encode_prompt("a<tool>b<note>c")
    assert ids == oracle.encode("a<tool>b<note>c")
    assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True) == "ab<note>c"


def test_legacy_added_tokens_file_is_read(tmp_path: Path) -> None:
    backend = train_byte_level()
    next_id = backend.get_vocab_size()
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": next_id}))
    assert next_id in tokenizer_from_folder(tmp_path).encode_prompt("a<tool>b")


def test_added_token_with_another_id_than_stated_is_refused(folder: Path) -> None:
    edit_json(
        folder / "tokenizer_config.json",
        lambda config: config.update(added_tokens_decoder={"9999": {"content": "<far>", "special": True}}),
    )
    with pytest.raises(CheckpointError, match="'<far>' to have id 9999"):
        tokenizer_from_folder(folder)


def test_chat_template_equals_transformers(folder: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(folder)
    ours = tokenizer_from_folder(folder)
    messages = [{"role": "system", "content": " Be kind. "}, {"role": "user", "content": "Hi"}]
    assert ours.chat_template is not None
    rendered = ours.chat_template.render(messages)
    assert rendered == oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.encode_rendered(rendered) == oracle.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("place", ["file", "config", "named list", "json file", "nowhere"])
def test_chat_template_is_found_wherever_folders_keep_it(tmp_path: Path, place: str) -> None:
    (tmp_path / "tokenizer.json").write_text(train_byte_level().to_str())
    config: dict[str, object] = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        config["chat_template"] = "the file comes first"
    elif place == "config":
        config["chat_template"] = CHAT_TEMPLATE
    elif place == "named list":
        config["chat_template"] = [
            {"name": "rag", "template": "x"},
            {"name": "default", "template": CHAT_TEMPLATE},
        ]
    elif place == "json file":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = tokenizer_from_folder(tmp_path).chat_template
    assert (template is None) == (place == "nowhere")
    assert template is None or template.source == CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{", "expected a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "NoSuch"}}', "expected a tokenizer"),
        ("tokenizer_config.json", "[]", "JSON object"),
        ("tokenizer_config.json", "{", "valid JSON"),
        ("tokenizer_config.json", "[" * 100000, "valid JSON"),
        ("tokenizer_config.json", '{"bos_token": "<nope>"}', "'<nope>'"),
        ("tokenizer_config.json", '{"bos_token": 7}', "bos_token"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": "x"}]}', "'default'"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder"),
        ("chat_template.jinja", "{% for %}", "Jinja"),
    ],
)
def test_broken_files_say_what_is_wrong(folder: Path, file: str, content: str, message: str) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_folder(folder)


def test_folder_without_tokenizer_json_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        tokenizer_from_folder(tmp_path)


def test_text_that_is_not_unicode_is_a_request_error(folder: Path) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer_from_folder(folder).encode_prompt("a\ud800b")


def test_ids_beyond_the_vocabulary_have_no_text_and_negative_ones_are_a_request_error(folder: Path) -> None:
    ours = tokenizer_from_folder(folder)
    assert ours.decode([*ours.encode_prompt("hi"), 10**6]) == "hi"
    with pytest.raises(RequestError, match="from 0"):
        ours.decode([-1])


def test_special_tokens_with_their_own_rules_survive_saving(tmp_path: Path) -> None:
    backend = train_byte_level()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    ids = tokenizer_from_folder(tmp_path).encode_prompt("a   <mask>b")
    assert ids == AutoTokenizer.from_pretrained(tmp_path).encode("a   <mask>b")
