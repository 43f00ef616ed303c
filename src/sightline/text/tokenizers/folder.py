"""Builds a tokenizer from a Hugging Face folder: tokenizer.json and the files beside it. Does not know models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from sightline.core.errors import CheckpointError
from sightline.text.templates.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate
from sightline.text.tokenizers.json_file import read_json_object, read_text
from sightline.text.tokenizers.library import library_faults
from sightline.text.tokenizers.tokenizer import PromptTokens, Tokenizer

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_JSON_FILE = "chat_template.json"
MAX_ID_DIGITS = 9
"""The most digits of a token id."""


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a folder. Raises `CheckpointError` if a file is missing or malformed."""
    with library_faults(folder / TOKENIZER_FILE):
        return _read_folder(folder)


def _read_folder(folder: Path) -> Tokenizer:
    backend = _read_backend(folder / TOKENIZER_FILE)
    config = _read_optional(folder / CONFIG_FILE)
    special = {**_read_optional(folder / SPECIAL_TOKENS_FILE), **config}
    _add_missing_tokens(backend, folder, config)
    bos_token, eos_token = _token_text(special, "bos_token"), _token_text(special, "eos_token")
    bos_id, eos_id = _token_id(backend, bos_token, "bos_token"), _token_id(backend, eos_token, "eos_token")
    prefix, suffix = _surrounding_tokens(backend)
    source = _template_source(folder, config)
    return Tokenizer(
        backend,
        PromptTokens(bos_id, frozenset() if eos_id is None else frozenset({eos_id}), prefix, suffix),
        None if source is None else ChatTemplate(source, bos_token, eos_token),
        response_template=_response_template(config),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointError(
            f"expected {path.name} in {path.parent}, got none. A tokenizer.model or vocab.txt alone is not "
            "read: save the tokenizer once with a current version of transformers."
        )
    backend = tokenizers.Tokenizer.from_file(str(path))
    # Settings left over from training, which would truncate or pad a prompt.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_optional(path: Path) -> dict[str, object]:
    return read_json_object(path) if path.is_file() else {}


def _add_missing_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, object]) -> None:
    """Adds tokens that only the other files list, and checks that each gets the id that they state."""
    listed: dict[int, AddedToken] = {}
    for content, token_id in _read_optional(folder / ADDED_TOKENS_FILE).items():
        if isinstance(token_id, int):
            listed[token_id] = AddedToken(content, special=False, normalized=False)
    decoder = config.get("added_tokens_decoder")
    for token_id_text, fields in decoder.items() if isinstance(decoder, dict) else ():
        if not isinstance(fields, dict) or not isinstance(fields.get("content"), str) or not _is_id(token_id_text):
            raise CheckpointError(
                f"{folder / CONFIG_FILE}: expected ids with an object of 'content' under "
                f"'added_tokens_decoder', got {token_id_text[:80]!r}: {str(fields)[:80]}. Get the file again."
            )
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        stated = {flag: fields[flag] is True for flag in flags if flag in fields}
        listed[int(token_id_text)] = AddedToken(fields["content"], **stated)
    known = backend.get_added_tokens_decoder()
    for token_id, token in sorted(listed.items()):
        if token_id not in known:
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"{folder}: expected the added token {token.content!r} to have id {token_id}, got "
                f"{backend.token_to_id(token.content)} from {TOKENIZER_FILE}. The files are from different "
                "versions."
            )


def _is_id(text: str) -> bool:
    return len(text) <= MAX_ID_DIGITS and text.isascii() and text.isdecimal()


def _token_text(config: Mapping[str, object], name: str) -> str | None:
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value
    raise CheckpointError(f"{CONFIG_FILE}: expected a token's text under {name!r}, got {str(value)[:80]}.")


def _token_id(backend: tokenizers.Tokenizer, token: str | None, name: str) -> int | None:
    if token is None:
        return None
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise CheckpointError(
            f"{CONFIG_FILE}: expected {name} {token!r} in the vocabulary of {TOKENIZER_FILE}, got no such "
            "token. The files are from different versions: get them again."
        )
    return token_id


def _surrounding_tokens(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that tokenizer.json's post-processor puts before and after a prompt.

    The flags `add_bos_token` and `add_eos_token` are ignored, as in transformers: they told an older library how to
    build that post-processor.
    """
    probe, plain = _probe(backend)
    framed = backend.encode(probe, add_special_tokens=True).ids
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return tuple(framed[:start]), tuple(framed[start + len(plain) :])
    raise CheckpointError(
        f"{TOKENIZER_FILE}: expected a post-processor that puts tokens around a text, got one that changes the text."
    )


def _probe(backend: tokenizers.Tokenizer) -> tuple[str, list[int]]:
    """A text that has tokens, none of them special, and those tokens.

    Tries the vocabulary's own tokens too: a vocabulary of few characters silently drops all others.
    """
    special = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    for text in ("a", *backend.get_vocab()):
        ids = backend.encode(text, add_special_tokens=False).ids
        if ids and special.isdisjoint(ids):
            return text, ids
    raise CheckpointError(
        f"{TOKENIZER_FILE}: expected a vocabulary with a token for some text, got none. Get the file again."
    )


def _response_template(config: Mapping[str, object]) -> Mapping[str, object] | None:
    match config.get("response_template"):
        case None:
            return None
        case dict(declared):
            return declared
    raise CheckpointError(f"{CONFIG_FILE}: expected an object under 'response_template', got another value.")


def _template_source(folder: Path, config: Mapping[str, object]) -> str | None:
    if (folder / TEMPLATE_FILE).is_file():
        return read_text(folder / TEMPLATE_FILE, max_bytes=4 * MAX_TEMPLATE_CHARACTERS)
    stated = config.get("chat_template") or _read_optional(folder / TEMPLATE_JSON_FILE).get("chat_template")
    if isinstance(stated, list):
        named = {str(entry.get("name")): entry.get("template") for entry in stated if isinstance(entry, dict)}
        if "default" not in named:
            raise CheckpointError(
                f"{CONFIG_FILE}: expected a chat template named 'default', got {str(sorted(named))[:80]}. "
                "Put the one to use into chat_template.jinja."
            )
        stated = named["default"]
    if stated is None or isinstance(stated, str):
        return stated
    raise CheckpointError(f"{CONFIG_FILE}: expected a template's text under 'chat_template', got {str(stated)[:80]}.")
