"""Turns as templates read them, whatever a client says that an earlier answer was."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sightline.core.conversation import Conversation, ToolCall, Turn
from sightline.text.answers.opening import render_conversation
from sightline.text.templates.chat_template import Ending
from sightline.text.templates.turns import template_turn
from support.answer_checks import byte_tokenizer


def _arguments(text: str) -> object:
    message: Any = template_turn(Turn("assistant", None, calls=(ToolCall("c", "look", text),)))
    return message["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize("text", ["", '{"a": 1', "[" * 100_000, '{"a": NaN}', '{"a": -1e999}', "1" * 5000])
def test_arguments_that_are_no_json_are_repeated_as_they_are(text: str) -> None:
    assert _arguments(text) == text


@pytest.mark.parametrize("depth", [64, 800, 990, 100_000])
def test_arguments_of_any_depth_reach_the_prompt(depth: int) -> None:
    text = '{"a":' + depth * "[" + depth * "]" + "}"
    turns = (Turn("user", "Hi"), Turn("assistant", None, calls=(ToolCall("c", "look", text),)))
    rendered = render_conversation(byte_tokenizer(), Conversation(turns), Ending.NEXT_TURN)
    assert depth * "[" + depth * "]" in rendered


def test_other_arguments_are_parsed() -> None:
    arguments = {"a": [1.5, None, "ö"]}
    assert _arguments(json.dumps(arguments)) == arguments
