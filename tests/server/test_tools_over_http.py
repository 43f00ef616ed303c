"""OpenAI's client asks for tools, reasoning and formats, and gets them in OpenAI's shapes, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from support.answer_templates import TEMPLATES
from support.openai_suite import asking, openai_client
from support.serving import ServedProcess, serving
from support.tool_model import save_tool_model

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "get_time", "description": "The time."}},
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
OPENED = TEMPLATES["hermes"] + "{% if add_generation_prompt and enable_thinking is not false %}<think>\n{% endif %}"
"""Opens the reasoning in the prompt."""


class GetWeather(BaseModel):
    """What the client's own parser gets."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    folder = save_tool_model(tmp_path_factory.mktemp("tools"), OPENED)
    with serving("--model", str(folder), "--served-model-name", "tools", "--max-model-len", "1024") as running:
        assert running.url
        yield running


@pytest.fixture(scope="module")
def client(tool_server: ServedProcess) -> Iterator[OpenAI]:
    with openai_client(tool_server) as opened:
        yield opened


def _asked(**more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tools", "messages": asking("The weather in Rome?"), "max_tokens": 500, "seed": 1}
    return body | {"tools": TOOLS, "extra_body": {"thinking_token_budget": 3}} | more


def test_the_format_is_told_at_start_and_in_server_info(tool_server: ServedProcess) -> None:
    told = "calls of tools: hermes, as the chat template writes; reasoning: think, as the chat template writes"
    assert any(told in str(event["message"]) for event in tool_server.events)
    info = json.loads(tool_server.get("/server_info")[1])
    assert any(told in note for note in info["notes"])
    assert info["tools_refusal"] is None


def test_a_named_tool_is_called_with_arguments_that_satisfy_its_schema(client: OpenAI) -> None:
    answer = client.chat.completions.create(**_asked(tool_choice=NAMED, parallel_tool_calls=False, n=2))
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        [call] = choice.message.tool_calls or []
        assert (call.type, call.function.name, call.id[:5]) == ("function", "get_weather", "call_")
        assert set(json.loads(call.function.arguments)) == {"city", "days"}
        assert (choice.message.model_extra or {})["reasoning_content"]
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    # Three tokens, and the one that closes, for each of the two.
    assert usage.completion_tokens_details.reasoning_tokens == 8


def test_a_stream_tells_the_same_and_its_arguments_are_the_beginning_of_json(client: OpenAI) -> None:
    asked = _asked(tool_choice="required", temperature=0, parallel_tool_calls=False)
    [whole] = client.chat.completions.create(**asked).choices
    [call] = whole.message.tool_calls or []
    said, names, reasoning, reasons = "", list[str](), "", list[str]()
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
            assert not choice.delta.content
            for piece in choice.delta.tool_calls or []:
                assert piece.index == 0
                assert piece.function is not None
                names += [piece.function.name] if piece.function.name else []
                said += piece.function.arguments or ""
                assert call.function.arguments.startswith(said)
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert (said, names, reasons) == (call.function.arguments, [call.function.name], ["tool_calls"])
    assert reasoning == (whole.message.model_extra or {})["reasoning_content"]


def test_the_clients_streaming_helper_and_parser_put_it_together(client: OpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    asked = _asked(tools=[tool], tool_choice="required", parallel_tool_calls=False)
    parsed = client.chat.completions.parse(**asked)
    [call] = parsed.choices[0].message.tool_calls or []
    assert type(call.function.parsed_arguments) is GetWeather
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert type(streamed.function.parsed_arguments) is GetWeather
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


def test_tools_and_a_response_format_go_together(client: OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "count", "schema": {"enum": [1, 2]}}}
    kinds = set()
    for seed in range(4):
        [choice] = client.chat.completions.create(
            **_asked(response_format=schema, seed=seed, parallel_tool_calls=False, max_tokens=900)
        ).choices
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "stop":
            assert json.loads(choice.message.content or "") in (1, 2)
        elif choice.finish_reason == "tool_calls":
            assert choice.message.content is None
    assert kinds & {"stop", "tool_calls"}


def test_a_schema_begins_behind_the_reasoning(client: OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "count", "schema": {"enum": [1, 2]}}}
    [choice] = client.chat.completions.create(**_asked(tools=openai.omit, response_format=schema)).choices
    assert json.loads(choice.message.content or "") in (1, 2)
    assert (choice.message.model_extra or {})["reasoning_content"]
    # Turned off, the prompt opens no reasoning.
    off = _asked(tools=openai.omit, response_format=schema, reasoning_effort="none", logprobs=True)
    [choice] = client.chat.completions.create(**off | {"extra_body": {"thinking_token_budget": 0}}).choices
    assert json.loads(choice.message.content or "") in (1, 2)
    assert not (choice.message.model_extra or {}).get("reasoning_content")
    assert choice.logprobs is not None


def test_earlier_calls_and_results_reach_the_prompt(tool_server: ServedProcess) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "CET"}'}}
    messages = [
        *asking("What time?"),
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": "Noon."},
    ]
    tokens = json.loads(tool_server.post("/tokenize", {"messages": messages, "tools": TOOLS})[1])["tokens"]
    prompt = json.loads(tool_server.post("/detokenize", {"tokens": tokens})[1])["prompt"]
    assert '<think>\nHm.\n</think>\n\n\n<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}' in prompt
    assert '"description": "The time."' in prompt
    assert "Noon." in prompt


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "twice"),
        ({"tools": openai.omit, "tool_choice": "required"}, "tool_choice", "got none"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "'other'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "another shape"),
        ({"extra_body": {"functions": [{"name": "f"}]}}, "functions", "send tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
            "tools",
            "'f' with strict true",
        ),
    ],
    ids=["one name twice", "no tools", "another tool", "another shape", "functions", "a schema that is not held"],
)
def test_what_does_not_agree_is_refused_by_name(client: OpenAI, fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        client.chat.completions.create(**_asked(**fields))
    assert refused.value.param == param


def test_a_model_without_tools_refuses_them_unless_they_are_not_to_be_called(server: ServedProcess) -> None:
    with openai_client(server) as plain:
        body: dict[str, Any] = {"model": "SmolLM2-135M-Instruct.Q4_1", "messages": asking("Hi"), "max_tokens": 1}
        with pytest.raises(openai.BadRequestError, match="does not list tools") as refused:
            plain.chat.completions.create(**body, tools=TOOLS)
        assert refused.value.param == "tools"
        assert json.loads(server.get("/server_info")[1])["tools_refusal"] in str(refused.value)
        answer = plain.chat.completions.with_raw_response.create(
            **body, tools=TOOLS, tool_choice="none", reasoning_effort="low"
        )
        assert answer.headers["x-sightline-unused"] == "reasoning_effort"
