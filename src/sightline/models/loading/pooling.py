"""How an embedding model turns the states of a text's tokens into one vector.

Owns the reading of `modules.json`, `1_Pooling/config.json`, `sentence_bert_config.json` and
`config_sentence_transformers.json`. Does not know networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.text.tokenizers.json_file import read_json, read_json_object

MODULES_FILE = "modules.json"
LENGTH_FILE = "sentence_bert_config.json"
PROMPTS_FILE = "config_sentence_transformers.json"


class PoolingKind(Enum):
    """Which states are combined to a text's vector."""

    MEAN = "mean"
    CLS = "cls"
    """The state of the first token."""
    LAST = "lasttoken"


@dataclass(frozen=True)
class Pooling:
    """How states become a vector."""

    kind: PoolingKind
    normalise: bool
    """True if vectors are scaled to length 1."""
    max_tokens: int | None = None
    """The longest text that the model was trained on; None if the files do not say."""


def read_pooling(location: Path, default: PoolingKind, ledger: Ledger) -> Pooling:
    """Reads the pooling from a model's folder. If the files do not say, `default` is used and recorded."""
    modules = location / MODULES_FILE
    if not modules.is_file():
        ledger.degrade(
            "pooling",
            f"{location.name} has no {MODULES_FILE} that says how tokens' states become a vector: {default.value}, "
            "normalised, is used",
            f"add {MODULES_FILE} and 1_Pooling/config.json, as the model's publisher has them",
        )
        return Pooling(default, normalise=True)
    kind: PoolingKind | None = None
    normalise = False
    for name, folder in _modules(modules):
        match name:
            case "Transformer":
                pass
            case "Pooling":
                kind = _kind(location / folder / "config.json")
            case "Normalize":
                normalise = True
            case _:
                raise UnsupportedModelError(
                    f"{modules}: expected modules Transformer, Pooling and Normalize, got {name}: it changes the vector"
                )
    if kind is None:
        raise UnsupportedModelError(f"{modules}: expected a module Pooling, got none")
    _note_changes_of_text(location, ledger)
    return Pooling(kind, normalise, _max_tokens(location / LENGTH_FILE))


def _modules(path: Path) -> list[tuple[str, str]]:
    """The last part of each module's type, and its folder."""
    listed = read_json(path)
    if not isinstance(listed, list):
        raise CheckpointError(f"{path}: expected a list of modules, got {type(listed).__name__}. Get the file again.")
    modules = []
    for module in listed:
        match module:
            case {"type": str(kind), "path": str(folder)} if ".." not in Path(folder).parts and not folder.startswith(
                "/"
            ):
                modules.append((kind.rpartition(".")[2], folder))
            case _:
                raise CheckpointError(f"{path}: expected modules with a type and a path, got {str(module)[:80]}.")
    return modules


def _kind(path: Path) -> PoolingKind:
    config = read_json_object(path)
    asked = _asked(config)
    known = {kind.value for kind in PoolingKind}
    if len(asked) != 1 or not asked <= known:
        raise UnsupportedModelError(
            f"{path}: expected one pooling of {', '.join(sorted(known))}, got {', '.join(sorted(asked)) or 'none'}"
        )
    return PoolingKind(asked.pop())


def _asked(config: Mapping[str, object]) -> set[str]:
    """The kinds of pooling that are switched on, from the newer or older form of the file."""
    named = config.get("pooling_mode")
    if named is not None:
        return {str(name) for name in named} if isinstance(named, list) else {str(named)}
    prefix = "pooling_mode_"
    on = {name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value is True}
    return {{"mean_tokens": "mean", "cls_token": "cls"}.get(name, name) for name in on}


def _note_changes_of_text(location: Path, ledger: Ledger) -> None:
    """Records changes to the text that the files ask for. They are left to the caller."""
    prompts = _read_optional(location / PROMPTS_FILE)
    default, texts = prompts.get("default_prompt_name"), prompts.get("prompts")
    if isinstance(default, str) and isinstance(texts, dict) and texts.get(default):
        ledger.degrade(
            "default prompt",
            f"{default!r} of {PROMPTS_FILE} is not put before texts: {str(texts[default])[:80]!r}",
            "put it before texts of that kind",
        )
    if _read_optional(location / LENGTH_FILE).get("do_lower_case") is True:
        ledger.degrade("do_lower_case", f"of {LENGTH_FILE} is not supported", "give texts in lower case")


def _read_optional(path: Path) -> dict[str, object]:
    return read_json_object(path) if path.is_file() else {}


def _max_tokens(path: Path) -> int | None:
    length = _read_optional(path).get("max_seq_length")
    return length if isinstance(length, int) and not isinstance(length, bool) and length > 0 else None
