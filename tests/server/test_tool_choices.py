"""Every interface asks the engine for the same tools, choices and limits of reasoning, under its own names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from sightline.core.answer_format import ChosenFormat
from sightline.core.conversation import ToolMode
from sightline.core.request import SamplingParams
from support import local_front_end as local
from support.answer_checks import HERMES
from support.faces import prompt_of, run
from support.fake_engine import tokenizer_data

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SAID = [{"role": "user", "content": "Hi"}]
STRICT = {"type": "object", "properties": {}, "additionalProperties": False}
A, B = {"name": "a", "parameters": STRICT, "strict": True}, {"name": "b", "parameters": STRICT}
TOOLS: dict[str, Any] = {
    CHAT: {"messages": SAID, "max_tokens": 1, "tools": [{"type": "function", "function": each} for each in (A, B)]},
    RESPONSES: {"input": "Hi", "max_output_tokens": 1, "tools": [{"type": "function", **each} for each in (A, B)]},
    MESSAGES: {
        "messages": SAID,
        "max_tokens": 1,
        "tools": [{"name": "a", "input_schema": STRICT, "strict": True}, {"name": "b", "input_schema": STRICT}],
    },
}
AUTO, REQUIRED = ToolMode.AUTO, ToolMode.REQUIRED
ONLY_B: dict[str, Any] = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]}
CHAT_ONLY_B: dict[str, Any] = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "b"}}]},
}


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {}, (AUTO, "ab", True, None)),
        (RESPONSES, {}, (AUTO, "ab", True, None)),
        (MESSAGES, {}, (AUTO, "ab", True, None)),
        (CHAT, {"parallel_tool_calls": False, "tool_choice": "required"}, (REQUIRED, "ab", False, None)),
        (RESPONSES, {"parallel_tool_calls": False, "tool_choice": "required"}, (REQUIRED, "ab", False, None)),
        (
            MESSAGES,
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            (REQUIRED, "ab", False, None),
        ),
        (CHAT, {"tool_choice": CHAT_ONLY_B}, (AUTO, "b", True, None)),
        (RESPONSES, {"tool_choice": ONLY_B}, (AUTO, "b", True, None)),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "b"}}}, (REQUIRED, "b", True, None)),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "b"}}, (REQUIRED, "b", True, None)),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "b"}}, (REQUIRED, "b", True, None)),
        (CHAT, {"tool_choice": "none", "thinking_token_budget": 7}, (ToolMode.NONE, "", True, 7)),
        (RESPONSES, {"tool_choice": "none"}, (ToolMode.NONE, "", True, None)),
        (
            MESSAGES,
            {"tool_choice": {"type": "none"}, "thinking": {"type": "enabled", "budget_tokens": 7}},
            (ToolMode.NONE, "", True, 7),
        ),
    ],
    ids=str,
)
def test_a_choice_reaches_the_engine(
    path: str, fields: dict[str, Any], expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = replace(tokenizer_data(), answers=ChosenFormat(HERMES))
    monkeypatch.setattr(local, "tokenizer_data", lambda: data)

    async def work() -> None:
        async with local.local_front_end() as front_end:
            answer = await front_end.ask(path, TOOLS[path] | fields).answer()
            assert answer.status == 200, answer.message
            params = msgspec.msgpack.decode(front_end.engine.submitted[-1].params or b"", type=SamplingParams)
            reading = params.reading
            assert reading is not None
            names = "".join(tool.name for tool in reading.tools)
            assert (reading.mode, names, reading.parallel_calls, reading.reasoning_budget) == expected
            assert [tool.strict for tool in reading.tools] == [tool.name == "a" for tool in reading.tools]

    run(work)


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (CHAT, {"type": "function", "function": {"name": "c"}}),
        (RESPONSES, {"type": "function", "name": "c"}),
        (MESSAGES, {"type": "tool", "name": "c"}),
    ],
)
def test_a_choice_of_a_tool_that_is_not_offered_is_refused(path: str, choice: dict[str, Any]) -> None:
    async def work() -> None:
        async with local.local_front_end() as front_end:
            answer = await front_end.ask(path, {**TOOLS[path], "tool_choice": choice}).answer()
            assert answer.status == 400
            assert "'c'; add it to tools" in answer.message

    run(work)


def test_turns_are_told_apart_and_counted_as_they_are_sent() -> None:
    async def work() -> None:
        async with local.local_front_end() as front_end:
            items = [
                {"role": "user", "content": "Hi"},
                {"type": "function_call", "call_id": "c", "name": "a", "arguments": "{}"},
                {"role": "assistant", "content": "Said."},
            ]
            await front_end.ask(RESPONSES, {"input": items, "max_output_tokens": 1}).answer()
            assert prompt_of(front_end) == "user:Hi;assistant:;assistant:Said.;"
            # A last turn of the assistant is continued, and counted so.
            body = {"messages": [*SAID, {"role": "assistant", "content": "Well"}]}
            answer = await front_end.ask(MESSAGES, {**body, "max_tokens": 1}).answer()
            counted = await front_end.ask(f"{MESSAGES}/count_tokens", body).answer()
            assert counted.value["input_tokens"] == answer.value["usage"]["input_tokens"]
            assert prompt_of(front_end) == "user:Hi;assistant:Well"

    run(work)
