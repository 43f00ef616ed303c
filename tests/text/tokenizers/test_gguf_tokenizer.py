"""Tokenizers from GGUF metadata, against transformers and against a plain SentencePiece merge loop."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer

from sightline.core.errors import CheckpointError
from sightline.models.loading.default_model import default_model_path
from sightline.models.loading.gguf.file import GgufFile
from sightline.text.templates.chat_template import Ending
from sightline.text.tokenizers.gguf import MAX_TOKEN_CHARACTERS, tokenizer_from_gguf
from sightline.text.tokenizers.tokenizer import Tokenizer
from support.gguf_checks import mapped_plainly
from support.tiny_tokenizers import (
    CHAT_TEMPLATE,
    SPACE,
    TEXTS,
    byte_level_metadata,
    save_folder,
    sentence_piece_metadata,
    train_byte_level,
    train_sentence_piece,
)

SPACES_BEFORE_DIGIT = re.compile(r"\s\s\d")
DEFAULT_TEXTS = (*TEXTS, "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>x", "1234 + 5678 = 6912")


@pytest.fixture(scope="module")
def default_tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(GgufFile(default_model_path()).metadata)


@pytest.fixture(scope="module")
def default_oracle_as_loaded() -> Any:
    path = default_model_path()
    with mapped_plainly():
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture
def default_oracle(default_oracle_as_loaded: Any) -> Any:
    return copy.deepcopy(default_oracle_as_loaded)


def metadata_of(path: Path) -> dict[str, object]:
    return dict(GgufFile(path).metadata)


def byte_level(tmp_path: Path, pre: str = "gpt-2", **extra: object) -> dict[str, object]:
    byte_level_metadata(train_byte_level(), tmp_path / "tiny.gguf", pre=pre, **extra)
    return metadata_of(tmp_path / "tiny.gguf")


def sentence_piece(tmp_path: Path, **extra: bool) -> dict[str, object]:
    backend = train_sentence_piece(prefix_space=True)
    sentence_piece_metadata(backend, tmp_path / "tiny.gguf", extra=extra)
    return metadata_of(tmp_path / "tiny.gguf")


def test_default_model_encodes_and_decodes_as_its_own_tokenizer_does(
    default_tokenizer: Tokenizer, default_oracle: Any
) -> None:
    for text in DEFAULT_TEXTS:
        ids = default_oracle.encode(text, add_special_tokens=False)
        if not SPACES_BEFORE_DIGIT.search(text):
            assert default_tokenizer.encode_prompt(text) == ids, text
        for skip in (True, False):
            expected = default_oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert default_tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_default_model_cuts_out_each_digit_first_as_its_own_tokenizer_does(
    default_tokenizer: Tokenizer, default_oracle: Any
) -> None:
    # The GGUF loader of transformers does not know the "smollm" rule; the model's own tokenizer.json has it.
    default_oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in DEFAULT_TEXTS:
        assert default_tokenizer.encode_prompt(text) == default_oracle.encode(text, add_special_tokens=False)


def test_default_model_has_the_special_tokens_and_size_of_its_file(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.bos_id == 1
    assert default_tokenizer.eos_ids == {2}
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.special_ids == frozenset(range(17))


def test_default_model_renders_chats_as_transformers_does(default_tokenizer: Tokenizer, default_oracle: Any) -> None:
    messages = [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Yes?"}]
    assert default_tokenizer.chat_template is not None
    for prompt in (True, False):
        rendered = default_tokenizer.chat_template.render(messages, Ending.NEXT_TURN if prompt else Ending.CLOSED)
        assert rendered == default_oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert default_tokenizer.encode_rendered(rendered) == default_oracle.encode(rendered, add_special_tokens=False)


@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_vocabulary_equals_the_transformers_loader(tmp_path: Path, pre: str) -> None:
    metadata = byte_level(tmp_path, pre=pre)
    ours = tokenizer_from_gguf(metadata)
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for text in TEXTS:
        if (pre == "smollm" and any(letter.isdigit() for letter in text)) or (pre == "qwen2" and "\u0301" in text):
            continue  # rules of the model's own tokenizer that the transformers loader leaves out
        ids = oracle.encode(text, add_special_tokens=False)
        assert ours.encode_rendered(text)[-len(ids) :] == ids if ids else True, text
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_a_token_of_absurd_length_is_refused_before_any_work_on_it(tmp_path: Path) -> None:
    metadata = sentence_piece(tmp_path)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[-1] = "a" * MAX_TOKEN_CHARACTERS
    tokenizer_from_gguf(metadata)
    tokens[-1] = "a" * 2_000_000
    start = time.process_time()
    with pytest.raises(CheckpointError, match="at most 1024 characters, got one of 2000000"):
        tokenizer_from_gguf(metadata)
    assert time.process_time() - start < 1


def test_qwen2_rule_composes_characters_as_its_own_tokenizer_does(tmp_path: Path) -> None:
    ours = tokenizer_from_gguf(byte_level(tmp_path, pre="qwen2"))
    assert ours.encode_prompt("e\u0301") == ours.encode_prompt("é")


def test_llama3_rule_takes_a_word_that_is_a_token_whole(tmp_path: Path) -> None:
    metadata = byte_level(tmp_path, pre="llama-bpe", add_bos_token=False)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens.append("Zqx")
    types = metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, list)
    types.append(1)
    assert tokenizer_from_gguf(metadata).encode_prompt("Zqx") == [len(tokens) - 1]
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert len(tokenizer_from_gguf(metadata).encode_prompt("Zqx")) == 3


def test_llama3_rule_groups_digits_by_three(tmp_path: Path) -> None:
    backend = train_byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    ours = tokenizer_from_gguf(byte_level(tmp_path, pre="llama-bpe", add_bos_token=False))
    assert ours.encode_prompt("1234567") == backend.encode("1234567").ids


O200K = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
CASED_TEXTS = (*TEXTS, "HelloWorld fooBAR don't DON'T 12345", "a//\n/b ./c", "ǅungla ʰtest")


@pytest.mark.parametrize(("pre", "pattern"), [("gpt-4o", O200K), ("tekken", TEKKEN)])
def test_cased_rules_equal_a_tokenizer_built_from_the_published_pattern(tmp_path: Path, pre: str, pattern: str) -> None:
    oracle = train_byte_level()
    oracle.model.ignore_merges = True
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    ours = tokenizer_from_gguf(byte_level(tmp_path, pre=pre, add_bos_token=False))
    for text in CASED_TEXTS:
        assert ours.encode_prompt(text) == oracle.encode(text).ids, text
        assert ours.decode(ours.encode_prompt(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-4o", ["Hello", "World", " don't", " ", "123", "45", " ./"]),
        ("tekken", ["Hello", "World", " don", "'t", " ", "1", "2", "3", "4", "5", " ./"]),
    ],
)
def test_cased_rules_cut_where_the_case_turns(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    metadata = byte_level(tmp_path, pre=pre, add_bos_token=False)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    for spelled_piece in dict.fromkeys(piece.replace(" ", "Ġ") for piece in pieces):
        if spelled_piece not in tokens:
            tokens.append(spelled_piece)
            types.append(1)
    ours = tokenizer_from_gguf(metadata)
    ids = ours.encode_prompt("HelloWorld don't 12345 ./")
    assert [ours.decode([token_id]) for token_id in ids] == pieces


def spelled(text: str, *, prefix_space: bool) -> str:
    marked = text.replace(" ", SPACE)
    return SPACE + marked if prefix_space and marked else marked


def merge_by_score(pieces: list[str], ids: Mapping[str, int]) -> list[str]:
    """SentencePiece's rule, spelled out: merge the neighbours whose union scores best, leftmost first."""
    while True:
        unions = [
            (ids[left + right], at)
            for at, (left, right) in enumerate(pairwise(pieces))
            if ids.get(left + right, 0) >= 260
        ]
        if not unions:
            return pieces
        _, at = min(unions)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@pytest.mark.parametrize("prefix_space", [True, False])
def test_sentence_piece_vocabulary_merges_by_score_with_byte_fallback(tmp_path: Path, prefix_space: bool) -> None:
    metadata = sentence_piece(tmp_path, add_space_prefix=prefix_space, add_bos_token=False)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    ours = tokenizer_from_gguf(metadata)
    for text in TEXTS:
        if "<s>" in text:
            continue
        expected: list[int] = []
        for piece in merge_by_score(list(spelled(text, prefix_space=prefix_space)), ids):
            expected += [ids[piece]] if piece in ids else [4 + byte for byte in piece.encode()]
        assert ours.encode_prompt(text) == expected, text
        assert ours.decode(expected) == text


def test_sentence_piece_vocabulary_equals_the_folder_it_came_from(tmp_path: Path) -> None:
    backend = train_sentence_piece(prefix_space=True)
    oracle = save_folder(backend, tmp_path / "folder", bos="<s>", eos="</s>")
    ours = tokenizer_from_gguf(sentence_piece(tmp_path, add_bos_token=False))
    for text in TEXTS:
        ids = oracle.encode(text, add_special_tokens=False)
        assert ours.encode_prompt(text) == ids, text
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_gemma_vocabulary_equals_the_transformers_loader(tmp_path: Path) -> None:
    backend = train_sentence_piece(prefix_space=False)
    sentence_piece_metadata(
        backend,
        tmp_path / "tiny.gguf",
        architecture="gemma3",
        extra={"add_space_prefix": False, "add_bos_token": False},
    )
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    ours = tokenizer_from_gguf(metadata_of(tmp_path / "tiny.gguf"))
    for text in TEXTS:
        ids = oracle.encode(text, add_special_tokens=False)
        assert ours.encode_prompt(text) == ids, text
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_user_defined_tokens_are_matched_whole_and_are_not_special(tmp_path: Path) -> None:
    metadata = sentence_piece(tmp_path, add_space_prefix=False, add_bos_token=False)
    tokens, types, scores = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores"))
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    assert isinstance(scores, list)
    for content in ("    ", "<think>"):
        tokens.append(content)
        types.append(4)
        scores.append(-1000.0)
    ours = tokenizer_from_gguf(metadata)
    ids = ours.encode_prompt("<think>    x")
    assert ids[:2] == [len(tokens) - 1, len(tokens) - 2]
    assert ours.decode(ids) == "<think>    x"


@pytest.mark.parametrize(("add_bos", "expected"), [(True, [1]), (False, []), (None, [1])])
def test_bos_comes_exactly_once_where_the_model_wants_it(
    tmp_path: Path, add_bos: bool | None, expected: list[int]
) -> None:
    extra = {} if add_bos is None else {"add_bos_token": add_bos}
    ours = tokenizer_from_gguf(sentence_piece(tmp_path, **extra))
    assert ours.encode_prompt("") == expected
    assert ours.encode_prompt("hi")[: len(expected)] == expected
    assert ours.encode_prompt("hi").count(1) == len(expected)
    assert ours.encode_prompt("<s>hi").count(1) == 1
    assert ours.encode_rendered("<s>hi").count(1) == 1
    assert ours.encode_rendered("hi").count(1) == len(expected)


def test_eos_is_added_to_raw_prompts_only_and_only_where_the_file_says_so(tmp_path: Path) -> None:
    ours = tokenizer_from_gguf(sentence_piece(tmp_path, add_eos_token=True))
    assert ours.encode_prompt("hi")[-1] == 2
    assert ours.encode_rendered("hi")[-1] != 2


def test_turn_and_message_ends_are_end_tokens(tmp_path: Path) -> None:
    ours = tokenizer_from_gguf(byte_level(tmp_path, eot_token_id=2, eom_token_id=3))
    assert ours.eos_ids == {1, 2, 3}


@pytest.mark.parametrize(
    ("name", "token_type", "ends"),
    [("<end_of_turn>", 3, True), ("<|call|>", 3, True), ("<|im_end|>", 1, False), ("<|end|>", 3, False)],
)
def test_control_tokens_that_only_end_turns_are_end_tokens(
    tmp_path: Path, name: str, token_type: int, ends: bool
) -> None:
    metadata = byte_level(tmp_path)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    tokens.append(name)
    types.append(token_type)
    assert tokenizer_from_gguf(metadata).eos_ids == ({1, len(tokens) - 1} if ends else {1})


def test_chat_template_gets_the_special_tokens_of_the_file(tmp_path: Path) -> None:
    ours = tokenizer_from_gguf(byte_level(tmp_path, chat_template=CHAT_TEMPLATE, add_bos_token=True))
    assert ours.chat_template is not None
    rendered = ours.chat_template.render([{"role": "user", "content": "x"}])
    assert rendered == "<|bos|><|user|>user: x<|eos|><|user|>assistant:"
    assert ours.encode_rendered(rendered).count(0) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "'klingon'"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "each token once"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "array of strings"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["no such"]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id"),
        ({"tokenizer.ggml.eos_token_id": -1}, "eos_token_id"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id"),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "bos_token_id"),
        ({"tokenizer.chat_template": "{% if %}"}, "Jinja"),
    ],
)
def test_incomplete_metadata_says_what_is_wrong(tmp_path: Path, change: Mapping[str, object], message: str) -> None:
    metadata = {**byte_level(tmp_path), **change}
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_gguf({key: value for key, value in metadata.items() if value is not None})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.scores": None}, "scores"),
        ({"tokenizer.ggml.scores": [0.0]}, "scores"),
    ],
)
def test_sentence_piece_without_scores_says_so(tmp_path: Path, change: Mapping[str, object], message: str) -> None:
    metadata = {**sentence_piece(tmp_path), **change}
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_gguf({key: value for key, value in metadata.items() if value is not None})


def test_decoder_without_prefix_space_keeps_a_leading_space(tmp_path: Path) -> None:
    ours = tokenizer_from_gguf(sentence_piece(tmp_path, add_space_prefix=False, add_bos_token=False))
    assert ours.decode(ours.encode_prompt(" x")) == " x"
