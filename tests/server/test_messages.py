"""/v1/messages as Anthropic's own client reads it: blocks, streams, tools and errors in its shape."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic import AsyncAnthropic

from sightline.core.conversation import AnswerEvent
from sightline.core.request import SamplingParams
from support.faces import EVERYTHING, TEXT, named_events, prompt_of, run
from support.local_front_end import LocalFrontEnd, Script, local_front_end

PATH = "/v1/messages"
SAID: list[Any] = [{"role": "user", "content": "Hi"}]
KEYS = ("first-key-1", "second-key-2")


def client_of(transport: Any) -> AsyncAnthropic:
    return AsyncAnthropic(base_url="http://localhost", api_key=KEYS[0], http_client=transport, max_retries=0)


async def sent(front_end: LocalFrontEnd, **fields: Any) -> str:
    """The prompt of a request."""
    answer = await front_end.ask(PATH, {"messages": SAID, "max_tokens": 1, **fields}).answer()
    assert answer.status == 200, answer.body
    return prompt_of(front_end)


def test_a_stream_has_anthropics_events_in_order_and_the_blocks_of_a_whole_answer() -> None:
    async def work() -> None:
        async with local_front_end(api_keys=KEYS) as front_end, front_end.transport() as transport:
            front_end.engine.script, client = EVERYTHING, client_of(transport)
            streamed = await front_end.ask(PATH, {"messages": SAID, "max_tokens": 9, "stream": True}, KEYS[0]).answer()
            kinds = [event["type"] for event in named_events(streamed.body)]
            assert kinds == [
                *("message_start", "ping"),
                *["content_block_start", *["content_block_delta"] * 2, "content_block_stop"] * 3,
                *("message_delta", "message_stop"),
            ]
            async with client.messages.stream(model="m", messages=SAID, max_tokens=9) as stream:
                final = await stream.get_final_message()
            whole = await client.messages.create(model="m", messages=SAID, max_tokens=9)
            told = [[block.model_dump(exclude_none=True) for block in each.content] for each in (final, whole)]
            assert told[0] == told[1]
            thought, text, call = whole.content
            assert (thought.type, text.type, call.type) == ("thinking", "text", "tool_use")
            assert thought.type == "thinking"
            assert thought.thinking == "Let me see."
            assert call.type == "tool_use"
            assert (call.id, call.name, call.input) == ("call_1", "look", {"at": 1})
            assert whole.stop_reason == final.stop_reason == "tool_use"
            assert whole.usage == final.usage
            assert (whole.usage.cache_read_input_tokens, whole.usage.output_tokens) == (2, 4)
            counted = await client.messages.count_tokens(model="m", messages=SAID)
            assert whole.usage.input_tokens == counted.input_tokens - 2

    run(work)


@pytest.mark.parametrize(
    ("reason", "stop", "told"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", None, ("tool_use", None)),
        ("abort", None, ("pause_turn", None)),
    ],
)
def test_the_reason_of_an_end_has_anthropics_name(reason: str, stop: str | None, told: tuple[str, str | None]) -> None:
    async def work() -> None:
        async with local_front_end() as front_end:
            front_end.engine.script = Script([[AnswerEvent(TEXT, "a")]], reason, stop)
            fields = {"messages": SAID, "max_tokens": 9}
            whole = (await front_end.ask(PATH, fields).answer()).value
            assert (whole["stop_reason"], whole["stop_sequence"]) == told
            events = named_events((await front_end.ask(PATH, {**fields, "stream": True}).answer()).body)
            assert tuple(events[-2]["delta"].values()) == told

    run(work)


def test_an_answer_that_fails_is_an_error_in_anthropics_shape() -> None:
    async def work() -> None:
        async with local_front_end() as front_end, front_end.transport() as transport:
            front_end.engine.script = Script([[AnswerEvent(TEXT, "a")]], "error", error="broken")
            client = client_of(transport)
            with pytest.raises(anthropic.InternalServerError):
                await client.messages.create(model="m", messages=SAID, max_tokens=9)
            with pytest.raises(anthropic.APIStatusError):
                async with client.messages.stream(model="m", messages=SAID, max_tokens=9) as stream:
                    await stream.get_final_message()
            assert front_end.is_at_rest, front_end.held

    run(work)


def test_blocks_become_turns() -> None:
    async def work() -> None:
        async with local_front_end() as front_end:
            text = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
            call = {"type": "tool_use", "id": "c", "name": "look", "input": {"at": 1}}
            result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "Found"}]}
            thought = {"type": "thinking", "thinking": "T", "signature": "s"}
            messages = [
                {"role": "user", "content": text},
                {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes"}, call]},
                {"role": "user", "content": [result, {"type": "text", "text": "Go on"}]},
            ]
            expected = "system:a;user:a;assistant:YesT;tool:Found;user:Go on;"
            assert await sent(front_end, system=text, messages=messages) == expected

    run(work)


def test_an_assistants_last_turn_is_continued() -> None:
    async def work() -> None:
        async with local_front_end() as front_end:
            messages = [*SAID, {"role": "assistant", "content": "The best answer is ("}]
            assert (await sent(front_end, messages=messages)).endswith("assistant:The best answer is (")

    run(work)


def test_parameters_reach_the_engine() -> None:
    async def work() -> None:
        async with local_front_end() as front_end:
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
            config = {"format": {"type": "json_schema", "schema": schema}}
            fields = {"stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.25, "top_k": 7, "output_config": config}
            await sent(front_end, **fields)
            params = msgspec.msgpack.decode(front_end.engine.submitted[-1].params or b"", type=SamplingParams)
            assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (1, 0.5, 0.25, 7)
            assert params.stop_strings == ("x",)
            assert params.structured_outputs is not None

    run(work)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 'got "image"'),
        ({"tools": [{"type": "bash_20250124", "name": "bash", "input_schema": {}}]}, 'got "bash_20250124"'),
        ({"max_tokens": None}, "max_tokens"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]},
            "tool_result",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "T"}]}]}, "thinking"),
        ({"messages": [*SAID, {"role": "user", "content": []}]}, "expected a block"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name_in_anthropics_shape(fields: dict[str, Any], named: str) -> None:
    async def work() -> None:
        async with local_front_end() as front_end:
            answer = await front_end.ask(PATH, {"messages": SAID, "max_tokens": 1, **fields}).answer()
            assert answer.status == 400
            assert answer.value["type"] == "error"
            assert answer.value["error"]["type"] == "invalid_request_error"
            assert named in answer.message, answer.message
            assert answer.value["request_id"] == answer.headers["x-request-id"]
            assert front_end.is_at_rest, front_end.held

    run(work)


def test_errors_have_the_types_that_the_client_knows() -> None:
    async def work() -> None:
        async with local_front_end(api_keys=KEYS) as front_end, front_end.transport() as transport:
            client = client_of(transport)
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.messages.create(model="other", messages=SAID, max_tokens=1)
            assert json.loads(missing.value.response.content)["error"]["type"] == "not_found_error"
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                await client.with_options(api_key="another-key").messages.create(model="m", messages=SAID, max_tokens=1)
            assert json.loads(unknown.value.response.content)["error"]["type"] == "authentication_error"

    run(work)


def test_tokens_are_counted_as_a_request_counts_them() -> None:
    async def work() -> None:
        async with local_front_end() as front_end, front_end.transport() as transport:
            client = client_of(transport)
            counted = await client.messages.count_tokens(model="m", messages=SAID, system="Be brief.")
            answer = await client.messages.create(model="m", messages=SAID, system="Be brief.", max_tokens=1)
            assert counted.input_tokens == answer.usage.input_tokens
            assert len(front_end.engine.submitted) == 1

    run(work)


def test_a_failed_result_is_named_as_without_effect() -> None:
    async def work() -> None:
        async with local_front_end() as front_end:
            result = {"type": "tool_result", "tool_use_id": "c", "content": "No", "is_error": True}
            fields = {"messages": [{"role": "user", "content": [result]}], "max_tokens": 1}
            answer = await front_end.ask(PATH, fields).answer()
            assert answer.headers["x-sightline-unused"] == "messages[].content[].is_error"

    run(work)
