"""Clients say what an answer must be under OpenAI's and vLLM's names, and get that, streamed or not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from support.openai_suite import MODEL, asking, openai_client
from support.serving import ServedProcess
from support.structured import PERSON, holds

FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


class Answer(BaseModel):
    """What the client's own helper asks for."""

    color: Literal["red", "green"]
    count: Literal[1, 2]


@pytest.fixture(scope="module")
def client(server: ServedProcess) -> Iterator[OpenAI]:
    with openai_client(server) as opened:
        yield opened


def test_a_response_format_is_kept_in_a_stream_and_a_whole_answer(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": asking("A person, as JSON."),
        "max_tokens": 60,
        "seed": 4,
        "temperature": 0.7,
        "response_format": FORMAT,
    }
    [choice] = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "stop"
    assert holds(choice.message.content or "", PERSON)
    chunks = [each.choices[0] for each in client.chat.completions.create(**asked, stream=True) if each.choices]
    assert "".join(each.delta.content or "" for each in chunks) == choice.message.content
    assert chunks[-1].finish_reason == "stop"


def test_the_clients_own_parser_gets_its_type(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL, messages=asking("Which color, how many?"), max_tokens=40, temperature=0, response_format=Answer
    )
    assert type(parsed.choices[0].message.parsed) is Answer


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["Paris", "Berlin"]}, "Paris|Berlin"),
        ({"guided_regex": "[a-c]{3}-[0-9]"}, "[a-c]{3}-[0-9]"),
        ({"guided_grammar": 'start: "x" | "yy"'}, "x|yy"),
        ({"guided_json": {"const": [1]}}, r"\[\s*1\s*\]"),
        ({"guided_json": '{"const": 7}', "guided_regex": None}, "7"),
        ({"structured_outputs": {"choice": ["on", "off"]}, "response_format": {"type": "text"}}, "on|off"),
    ],
    ids=str,
)
def test_vllms_names_work_in_completions(client: OpenAI, fields: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=20, extra_body={**fields, "n": 2})
    for choice in answer.choices:
        assert re.fullmatch(pattern, choice.text), choice
        assert choice.finish_reason == "stop"


def test_an_object_that_is_cut_off_says_so(client: OpenAI) -> None:
    [choice] = client.chat.completions.create(
        model=MODEL, messages=asking("JSON"), max_tokens=4, response_format={"type": "json_object"}
    ).choices
    assert choice.finish_reason == "length"
    assert (choice.message.content or "").lstrip().startswith("{")


def test_a_schema_that_cannot_be_held_is_a_400_with_its_keyword_in_a_stream_too(client: OpenAI) -> None:
    schema = {"type": "array", "uniqueItems": True}
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(model=MODEL, messages=asking("x"), response_format=wrong, stream=stream)
        assert "'uniqueItems'" in raised.value.message
        assert json.loads(raised.value.response.content)["error"]["param"] == "structured_outputs"
