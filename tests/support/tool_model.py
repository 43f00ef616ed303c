"""A model with random weights whose template knows tools and reasoning, and whose markers are special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

from support.answer_templates import TEMPLATES
from support.swift_model import save_swift_model

_MARKERS = MappingProxyType(
    {
        "<reponame>": "<think>",
        "<file_sep>": "</think>",
        "<filename>": "<tool_call>",
        "<gh_stars>": "</tool_call>",
    }
)
"""Special tokens of the default model, and what they are called here."""


def save_tool_model(folder: Path, template: str = TEMPLATES["hermes"]) -> Path:
    """Makes the folder."""
    save_swift_model(folder)
    path = folder / "tokenizer.json"
    text = path.read_text()
    for old, new in _MARKERS.items():
        assert f'"{old}"' in text, old
        text = text.replace(f'"{old}"', f'"{new}"')
    path.write_text(text)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder
