"""Bounds on what a client may send: nesting, types and ranges, unused fields, cost."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest
from msgspec import Struct

from sightline.core.errors import ConfigError
from sightline.server.api.fields import unused_fields
from sightline.server.api.schema import ChatRequest, CompletionRequest, EmbeddingRequest
from sightline.server.http.errors import ApiError
from sightline.server.http.ingress import Exchange
from sightline.server.http.limits import MAX_CONTAINERS, MAX_DEPTH, Limits, check_cost, check_nesting, parse
from sightline.server.http.turns import LoopTurns
from sightline.server.serve import ServerConfig


def refusal(body: bytes, kind: type[object] = CompletionRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body, kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")])
def test_a_body_may_be_nested_so_deep_and_no_deeper(opening: bytes, closing: bytes) -> None:
    brackets = sum(opening.count(bracket) for bracket in (b"[", b"{"))
    deepest = MAX_DEPTH // brackets
    check_nesting(opening * deepest + b"1" + closing * deepest)
    with pytest.raises(ApiError, match="nested at most"):
        check_nesting(opening * (deepest + 1) + b"1" + closing * (deepest + 1))


def test_brackets_in_strings_do_not_nest() -> None:
    check_nesting(b'["' + b"[{" * 1000 + b'", "\\"' + b"[" * 1000 + b'", "\\\\", 1]')
    with pytest.raises(ApiError, match="nested at most"):
        check_nesting(b'["\\\\",' + b"[" * 1000)


def test_closed_containers_do_not_add_up_to_depth() -> None:
    check_nesting(b"[" + b"[],{}," * 1000 + b"1]")


def test_a_body_may_have_so_many_containers() -> None:
    with pytest.raises(ApiError, match="objects and arrays"):
        check_nesting(b"[" + b"[]," * (MAX_CONTAINERS + 1) + b"1]")


@pytest.mark.parametrize("piece", [b'"', b'\\"', b'"",', b"[", b"]", b'"\\', b"\\"])
def test_nesting_is_checked_in_time_linear_in_the_length(piece: bytes) -> None:
    started = time.process_time()
    with suppress(ApiError):
        check_nesting(b"[" * 65 + b"]" * 65 + piece * ((4 << 20) // len(piece)))
    assert time.process_time() - started < 10.0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nul",
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"n": 1e999}',
        b"\xef\xbb\xbf{}",
    ],
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    assert refusal(body).code == "invalid_json"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", "-0.5", "got -0.5"),
        ("temperature", '"hot"', "got `str`"),
        ("top_p", "0", "got 0"),
        ("top_p", "1.5", "got 1.5"),
        ("n", "0", "got 0"),
        ("n", "true", "got `bool`"),
        ("max_tokens", "1.5", "got `float`"),
        ("max_tokens", "99999999999999999999", "got"),
        ("seed", "-1", "got -1"),
        ("logprobs", "21", "got 21"),
        ("stop", '""', 'got ""'),
        ("stop_token_ids", "[-1]", "got -1"),
        ("presence_penalty", "2.5", "got 2.5"),
        ("stream", '"yes"', "got `str`"),
    ],
)
def test_a_wrong_field_is_named_with_what_came(field: str, value: str, said: str) -> None:
    error = refusal(b'{"prompt": "a", "%b": %b}' % (field.encode(), value.encode()))
    assert error.param is not None
    assert error.param.partition("[")[0] == field
    assert error.message.startswith(field)
    assert said in error.message


def test_a_key_that_is_no_token_is_refused_under_its_fields_name() -> None:
    assert refusal(b'{"prompt": "a", "logit_bias": {"x": 1}}').param == "logit_bias"


def test_a_wrong_part_of_a_message_is_named_with_its_place() -> None:
    error = refusal(b'{"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]}', ChatRequest)
    assert error.param == "messages[0].content[0].type"
    assert error.message == 'messages[0].content[0].type: expected "text", got "image_url"'
    error = refusal(b'{"input": "a", "encoding_format": "int8"}', EmbeddingRequest)
    assert error.message == 'encoding_format: expected "base64" or "float", got "int8"'


def test_a_long_wrong_value_is_not_repeated() -> None:
    assert "xxxx" not in refusal(b'{"prompt": "a", "model": "%b"}' % (b"x" * 600)).message


def test_fields_that_a_type_does_not_have_are_named_wherever_they_are() -> None:
    body = b"""{"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "extra": 1}], "mood": 2}],
        "user": "me", "stream_options": {"include_usage": true, "more": 1}, "stream": true,
        "chat_template_kwargs": {"anything": {"goes": 1}}}"""
    _, strays = parse(body, ChatRequest)
    found = {stray.path: stray.value for stray in strays}
    assert found == {"messages[].content[].extra": 1, "messages[].mood": 2, "stream_options.more": 1, "user": "me"}


def test_a_fields_name_cannot_break_out_of_a_header() -> None:
    _, strays = parse(b'{"prompt": "a", "x\\r\\nSet-Cookie: a=b": 1, "' + b"y" * 500 + b'": 2}', CompletionRequest)
    assert unused_fields(strays, allows_unknown=True) == ("x??Set-Cookie??a?b", "y" * 64)


def test_nothing_is_unused_where_every_field_is_known() -> None:
    assert list(parse(b'{"prompt": ["a"], "n": 2, "logit_bias": {"1": 2}}', CompletionRequest)[1]) == []


def test_unused_fields_are_found_in_lists_of_lists_of_nothing() -> None:
    class Plain(Struct):
        values: list[list[int]]

    assert [stray.path for stray in parse(b'{"values": [[1], []], "other": 1}', Plain)[1]] == ["other"]


def test_the_cost_of_a_request_is_its_product() -> None:
    check_cost(prompts=2, n=3, tokens=5, logprobs=6, most=750)
    with pytest.raises(ApiError, match="got 750") as caught:
        check_cost(prompts=2, n=3, tokens=5, logprobs=6, most=749)
    assert caught.value.code == "cost_exceeded"


def test_a_body_that_nobody_wants_has_an_end_however_long_the_answer_takes() -> None:
    received = 0

    async def receive() -> dict[str, Any]:
        nonlocal received
        received += 100
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b" " * 100, "more_body": True}

    async def send(event: object) -> None:
        raise AssertionError(f"expected no answer yet, got {event}")

    scope = {"method": "GET", "raw_path": b"/ready", "headers": [(b"transfer-encoding", b"chunked")]}
    exchange = Exchange(scope, receive, send, Limits(max_body_bytes=1_000), LoopTurns())
    with pytest.raises(ApiError, match="expected a body of at most 1,000 bytes, got more") as caught:
        asyncio.run(asyncio.wait_for(exchange.while_connected(asyncio.sleep(60)), 10))
    assert caught.value.status == 413
    assert received == 1_100


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 2e9])
@pytest.mark.parametrize("name", ["request_timeout", "drain_seconds", "stall_seconds", "text_seconds"])
def test_times_that_no_clock_can_tell_are_refused_at_the_start(name: str, seconds: float) -> None:
    """A request timeout of infinity made every request an internal error."""
    with pytest.raises(ConfigError, match=f"expected {name} between 0 and 1e"):
        ServerConfig(**{name: seconds})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_body_bytes", "max_answer_bytes"])
def test_bodies_and_answers_fit_in_a_frame_to_a_desk(name: str) -> None:
    ServerConfig(limits=Limits(**{name: 128 << 20}))
    with pytest.raises(ConfigError, match=f"expected {name} of at most 134,217,728, got 134,217,729"):
        ServerConfig(limits=Limits(**{name: (128 << 20) + 1}))
