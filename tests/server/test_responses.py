"""/v1/responses as OpenAI's own client reads it: streams, items, stored responses and who may use them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from sightline.core.conversation import AnswerEvent, EventKind
from sightline.core.request import SamplingParams
from sightline.server.http.limits import Limits
from support.faces import CALL, CALL_REST, EVERYTHING, TEXT, named_events, prompt_of, run
from support.local_front_end import LocalFrontEnd, Script, local_front_end

KEYS = ("first-key-1", "second-key-2")
PATH = "/v1/responses"


@asynccontextmanager
async def opened(script: Script | None = None, **config: Any) -> AsyncIterator[tuple[LocalFrontEnd, AsyncOpenAI]]:
    async with local_front_end(**config) as front_end:
        front_end.engine.script = script
        async with front_end.transport() as transport:
            yield front_end, client_of(transport, KEYS[0])


def client_of(transport: Any, key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://localhost/v1", api_key=key, http_client=transport, max_retries=0)


def without_ids(response: Response) -> dict[str, Any]:
    """A response without what differs between two of the same."""
    told = json.loads(response.to_json().replace(response.id.removeprefix("resp_"), "ID"))
    del told["created_at"]
    return dict(told)


# --- items and events ---


def test_a_stream_has_openais_events_in_order_and_ends_with_the_whole_response() -> None:
    async def work() -> None:
        async with opened(EVERYTHING) as (_, client):
            stream = await client.responses.create(model="m", input="Hi", stream=True)
            events = [event async for event in stream]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            added, done = "response.output_item.added", "response.output_item.done"
            part_added, part_done = "response.content_part.added", "response.content_part.done"
            assert [event.type for event in events] == [
                "response.created",
                "response.in_progress",
                *(added, part_added, *["response.reasoning_text.delta"] * 2, "response.reasoning_text.done"),
                *(part_done, done),
                *(added, part_added, *["response.output_text.delta"] * 2, "response.output_text.done", part_done, done),
                *(added, *["response.function_call_arguments.delta"] * 2, "response.function_call_arguments.done"),
                *(done, "response.completed"),
            ]
            last: Any = events[-1]
            whole = await client.responses.create(model="m", input="Hi")
            assert without_ids(last.response) == without_ids(whole)
            assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
            assert whole.output_text == "I look."
            thought, _, call = whole.output
            assert thought.type == "reasoning"
            assert thought.content
            assert thought.content[0].text == "Let me see."
            assert call.type == "function_call"
            assert (call.name, call.call_id, call.arguments) == ("look", "call_1", '{"at": 1}')
            assert whole.usage
            assert whole.usage.output_tokens_details.reasoning_tokens == 2
            assert whole.usage.input_tokens_details.cached_tokens == 2

    run(work)


def test_the_clients_streaming_helper_puts_the_same_response_together() -> None:
    async def work() -> None:
        async with opened(EVERYTHING) as (_, client):
            async with client.responses.stream(model="m", input="Hi") as stream:
                final = await stream.get_final_response()
            assert final.output_text == "I look."
            [call] = [item for item in final.output if item.type == "function_call"]
            assert call.arguments == '{"at": 1}'

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off_is_incomplete_and_so_is_its_call(stream: bool) -> None:
    async def work() -> None:
        async with opened(Script([[AnswerEvent(TEXT, "a")], CALL], "length")) as (front_end, _):
            answer = await front_end.ask(PATH, {"input": "Hi", "stream": stream}).answer()
            told = named_events(answer.body)[-1] if stream else {"response": answer.value}
            assert told.get("type", "response.incomplete") == "response.incomplete"
            response = told["response"]
            assert response["status"] == "incomplete"
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
            assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]

    run(work)


def test_a_stream_that_fails_ends_with_a_failed_response() -> None:
    async def work() -> None:
        script = Script([[AnswerEvent(TEXT, "a")], [AnswerEvent(TEXT, "b")]], "error", error="broken")
        async with opened(script) as (front_end, client):
            events = [each async for each in await client.responses.create(model="m", input="Hi", stream=True)]
            last: Any = events[-1]
            assert last.type == "response.failed"
            assert last.response.status == "failed"
            assert "broken" in last.response.error.message
            with pytest.raises(openai.InternalServerError):
                await client.responses.create(model="m", input="Hi")
            assert front_end.is_at_rest, front_end.held
            assert last.response.store is False
            # A time-out ends an answer that has begun: it is told, and not kept.
            front_end.engine.script = Script([[AnswerEvent(TEXT, "a")]], "abort")
            for stream in (False, True):
                answer = await front_end.ask(PATH, {"input": "Hi", "stream": stream}).answer()
                told = named_events(answer.body)[-1]["response"] if stream else answer.value
                assert (told["status"], told["store"]) == ("failed", False)
            assert len(front_end.service.store) == 0

    run(work)


# --- what a request means ---


def test_items_become_turns() -> None:
    async def work() -> None:
        async with opened() as (front_end, client):
            await client.responses.create(
                model="m",
                instructions="Be brief.",
                input=[
                    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                    {
                        "type": "reasoning",
                        "id": "rs_1",
                        "summary": [],
                        "content": [{"type": "reasoning_text", "text": "T"}],
                    },
                    {"type": "message", "role": "assistant", "content": "Yes"},
                    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "Found"},
                ],
                max_output_tokens=1,
            )
            assert prompt_of(front_end) == "system:Be brief.;user:Hi;assistant:YesT;tool:Found;"

    run(work)


def test_parameters_reach_the_engine_under_their_own_names() -> None:
    async def work() -> None:
        async with opened() as (front_end, client):
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
            text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
            response = await client.responses.create(
                model="m", input="Hi", max_output_tokens=3, temperature=0.5, top_p=0.25, text=text, metadata={"a": "b"}
            )
            params = msgspec.msgpack.decode(front_end.engine.submitted[-1].params or b"", type=SamplingParams)
            assert (params.max_tokens, params.temperature, params.top_p) == (3, 0.5, 0.25)
            assert params.structured_outputs is not None
            assert (response.metadata, response.temperature, response.top_p) == ({"a": "b"}, 0.5, 0.25)

    run(work)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": [{"role": "user", "content": "Hi", "colour": 1}]}, "input[].colour"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"input": "a" * 300}, "input"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async def work() -> None:
        async with opened() as (front_end, _):
            answer = await front_end.ask(PATH, {"input": "Hi", **fields}).answer()
            assert answer.status == 400
            assert answer.value["error"]["param"] == param, answer.message
            assert front_end.is_at_rest, front_end.held

    run(work)


def test_what_has_no_effect_is_named() -> None:
    async def work() -> None:
        async with opened() as (front_end, _):
            fields = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto", "effort": "low"}}
            answer = await front_end.ask(PATH, {"input": "Hi", "max_output_tokens": 1, **fields}).answer()
            assert answer.headers["x-sightline-unused"] == "include, reasoning.effort, reasoning.summary"

    run(work)


# --- stored responses ---


def test_a_conversation_goes_on_from_a_stored_response_and_from_references_to_its_items() -> None:
    async def work() -> None:
        async with opened() as (front_end, client):
            first = await client.responses.create(model="m", input="Hi", instructions="Once.", max_output_tokens=1)
            said = first.output_text
            second = await client.responses.create(
                model="m", input="More", previous_response_id=first.id, max_output_tokens=1
            )
            expected = f"user:Hi;assistant:{said};user:More;"
            assert prompt_of(front_end) == expected, "instructions are not carried over"
            assert second.previous_response_id == first.id
            await client.responses.create(model="m", input="?", previous_response_id=second.id, max_output_tokens=1)
            assert prompt_of(front_end) == f"{expected}assistant:{second.output_text};user:?;"
            referred: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "Z"}]
            await client.responses.create(model="m", input=referred, max_output_tokens=1)
            assert prompt_of(front_end) == f"assistant:{said};user:Z;"

    run(work)


def test_a_stored_response_is_given_as_it_was_sent_and_can_be_deleted() -> None:
    async def work() -> None:
        async with opened(EVERYTHING) as (front_end, client):
            events = named_events((await front_end.ask(PATH, {"input": "Hi", "stream": True}).answer()).body)
            sent = events[-1]["response"]
            assert (await front_end.get(f"{PATH}/{sent['id']}")).value == sent
            assert (await client.responses.retrieve(sent["id"])).id == sent["id"]
            await client.responses.delete(sent["id"])
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(sent["id"])
            with pytest.raises(openai.BadRequestError, match="cancel is not supported"):
                await client.responses.cancel(sent["id"])
            unstored = await client.responses.create(model="m", input="Hi", store=False)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(unstored.id)
            assert len(front_end.service.store) == 0

    run(work)


def test_another_keys_an_evicted_and_an_unknown_response_are_the_same_404() -> None:
    async def work() -> None:
        async with opened(api_keys=KEYS, limits=Limits(max_stored_responses=1)) as (front_end, client):
            short: dict[str, Any] = {"model": "m", "input": "Hi", "max_output_tokens": 1}
            evicted, kept = [await client.responses.create(**short) for _ in range(2)]
            unknown = "resp_" + 24 * "0"
            answers = []
            for name, key in ((evicted.id, KEYS[0]), (kept.id, KEYS[1]), (unknown, KEYS[0])):
                for answer in (
                    await front_end.ask(PATH, {"input": "Hi", "previous_response_id": name}, key).answer(),
                    await front_end.get(f"{PATH}/{name}", key),
                    await front_end.get(f"{PATH}/{name}", key, "DELETE"),
                    await front_end.ask(PATH, {"input": [{"id": f"msg_{name.removeprefix('resp_')}_0"}]}, key).answer(),
                ):
                    assert answer.status == 404
                    answers.append(answer.body.replace(name.removeprefix("resp_").encode(), b"ID"))
            assert set(answers[:4]) == set(answers[4:8]) == set(answers[8:])
            assert (await front_end.get(f"{PATH}/{kept.id}", KEYS[0])).status == 200

    run(work)


def test_what_is_too_large_to_be_stored_is_refused_if_asked_and_said_otherwise() -> None:
    async def work() -> None:
        async with opened(limits=Limits(max_stored_bytes=200)) as (front_end, _):
            fields = {"input": "a" * 100, "max_output_tokens": 1}
            assert (await front_end.ask(PATH, fields).answer()).value["store"] is False
            refused = await front_end.ask(PATH, {**fields, "store": True}).answer()
            assert (refused.status, refused.value["error"]["param"]) == (400, "store")

    run(work)


def test_references_to_more_than_a_body_may_hold_are_refused() -> None:
    async def work() -> None:
        async with opened(limits=Limits(max_body_bytes=6000)) as (front_end, client):
            long = "a" * 100
            stored = [await client.responses.create(model="m", input=long, max_output_tokens=1) for _ in range(4)]
            items = [{"type": "item_reference", "id": each.output[0].id} for each in stored]
            answer = await front_end.ask(PATH, {"input": items}).answer()
            assert answer.status == 400
            assert "refer to fewer" in answer.message
            assert front_end.is_at_rest, front_end.held

    run(work)


def test_a_short_body_cannot_become_an_endless_conversation() -> None:
    async def work() -> None:
        async with opened() as (front_end, client):
            first = await client.responses.create(model="m", input="Hi", max_output_tokens=1)
            answer = await front_end.ask(PATH, {"input": [{"id": first.output[0].id}] * 4000}).answer()
            assert (answer.status, answer.value["error"]["param"]) == (400, "input[1].id")
            assert "twice" in answer.message

    run(work)


def test_a_call_with_the_longest_name_and_id_can_be_gone_on_from() -> None:
    name = 256 * "n"
    called = AnswerEvent(EventKind.CALL, call_id=f"functions.{name}:0".ljust(320, "0"), name=name)
    script = Script([[called, *CALL_REST]], "tool_calls")

    async def work() -> None:
        async with opened(script) as (front_end, client):
            first = await client.responses.create(model="m", input="Hi")
            result: Any = [{"type": "function_call_output", "call_id": called.call_id, "output": "X"}]
            await client.responses.create(model="m", input=result, previous_response_id=first.id)
            assert prompt_of(front_end).endswith("tool:X;")

    run(work)
