"""Fields that a body's type does not have: none is ignored silently, on any route."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import msgspec
import pytest

from sightline.core.request import SamplingParams
from sightline.server.api.fields import PLACES, REFUSED, WITHOUT_EFFECT, described, unused_fields
from sightline.server.api.messages.body import CountRequest, MessagesRequest
from sightline.server.api.responses.body import ResponsesRequest
from sightline.server.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from sightline.server.desks.protocol import Declined, FormName, Order, ReadBody, Setup, WrittenAnswer
from sightline.server.desks.worker import BodyDesk
from sightline.server.http.limits import parse
from sightline.server.process.frames import unpack_tokens
from support.fake_engine import MAX_MODEL_LEN, VOCAB_SIZE, tokenizer_data
from support.fields_page import PAGE, fields_page
from support.local_front_end import local_front_end

SETUP = Setup(
    msgspec.msgpack.encode(tokenizer_data()),
    ("m",),
    VOCAB_SIZE,
    vector_size=None,
    max_model_len=MAX_MODEL_LEN,
    max_cost=10**6,
    allows_unknown=False,
    least_priority=-5,
    log_level="info",
    seconds=10.0,
    max_answer_bytes=10**6,
)
GENERATING = BodyDesk(SETUP)
EMBEDDING = BodyDesk(msgspec.structs.replace(SETUP, vector_size=4))
LENIENT = BodyDesk(msgspec.structs.replace(SETUP, allows_unknown=True))
SAID = [{"role": "user", "content": "Hi"}]
BODIES: dict[FormName, dict[str, Any]] = {
    FormName.CHAT: {"messages": SAID},
    FormName.RESPONSES: {"input": "Hi"},
    FormName.MESSAGES: {"messages": SAID, "max_tokens": 2},
    FormName.COUNT: {"messages": SAID},
    FormName.COMPLETION: {"prompt": "Hi"},
    FormName.EMBED: {"input": "Hi"},
    FormName.SCORE: {"text_1": "a", "text_2": "b"},
    FormName.RERANK: {"query": "a", "documents": ["b"]},
    FormName.TOKENIZE: {"prompt": "Hi"},
    FormName.DETOKENIZE: {"tokens": [72]},
}


TYPES: dict[FormName, type[msgspec.Struct]] = {
    FormName.CHAT: ChatRequest,
    FormName.RESPONSES: ResponsesRequest,
    FormName.MESSAGES: MessagesRequest,
    FormName.COUNT: CountRequest,
    FormName.COMPLETION: CompletionRequest,
    FormName.EMBED: EmbeddingRequest,
    FormName.SCORE: ScoreRequest,
    FormName.RERANK: RerankRequest,
    FormName.TOKENIZE: TokenizeRequest,
    FormName.DETOKENIZE: DetokenizeRequest,
}


def read(form: FormName, fields: dict[str, Any], desk: BodyDesk | None = None) -> Order | WrittenAnswer | Declined:
    vectors = form in (FormName.EMBED, FormName.SCORE, FormName.RERANK)
    chosen = desk or (EMBEDDING if vectors else GENERATING)
    result = chosen.do(ReadBody(1, form, json.dumps(BODIES[form] | fields).encode()))
    assert isinstance(result, Order | WrittenAnswer | Declined), result
    return result


def refusal(form: FormName, fields: dict[str, Any], desk: BodyDesk | None = None) -> Declined:
    result = read(form, fields, desk)
    assert isinstance(result, Declined), f"{fields} is answered with a 200"
    assert result.status == 400
    return result


def order(form: FormName, fields: dict[str, Any]) -> tuple[Order, SamplingParams]:
    result = read(form, fields)
    assert isinstance(result, Order), result
    return result, msgspec.msgpack.decode(result.params or b"", type=SamplingParams)


TEXT = {"type": "text", "text": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"type": "tool_result", "tool_use_id": "c"}
SCHEMA: dict[str, Any] = {"input_schema": {}}
HOLDERS: dict[str, tuple[FormName, dict[str, Any]]] = {
    "": (FormName.CHAT, {}),
    "stream_options": (FormName.CHAT, {"stream": True, "stream_options": {}}),
    "messages[]": (FormName.CHAT, {"messages": [SAID[0]]}),
    "messages[].content[]": (FormName.CHAT, {"messages": [{"role": "user", "content": [TEXT]}]}),
    "messages[].tool_calls[]": (FormName.CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL]}, *SAID]}),
    "messages[].tool_calls[].function": (
        FormName.CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}, *SAID]},
    ),
    "messages[].content[].content[]": (
        FormName.MESSAGES,
        {"messages": [{"role": "user", "content": [{**RESULT, "content": [TEXT]}]}]},
    ),
    "system[]": (FormName.MESSAGES, {"system": [TEXT]}),
    "tools[]": (FormName.MESSAGES, {"tools": [{"name": "f", **SCHEMA}], "tool_choice": {"type": "none"}}),
    "thinking": (FormName.MESSAGES, {"thinking": {"type": "adaptive"}}),
    "input[]": (FormName.RESPONSES, {"input": [SAID[0]]}),
    "input[].content[]": (
        FormName.RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
    ),
    "reasoning": (FormName.RESPONSES, {"reasoning": {}}),
    "text": (FormName.RESPONSES, {"text": {}}),
}
"""For each place of a field: a route that has it, and a body with an object there."""


def nested(path: str, value: object) -> tuple[FormName, dict[str, Any]]:
    """A body with a field at a path, and its route."""
    where, _, name = path.rpartition(".")
    form, fields = HOLDERS[where]
    owner: Any = (fields := copy.deepcopy(fields))
    for step in where.split(".") if where else []:
        owner = owner[step.removesuffix("[]")]
        owner = owner[0] if step.endswith("[]") else owner
    owner[name] = value
    return form, fields


def test_the_tables_have_each_field_once_and_none_that_a_type_has() -> None:
    assert not WITHOUT_EFFECT.keys() & REFUSED.keys()
    own = {field.name for field in msgspec.structs.fields(ChatRequest)}
    assert not own & (WITHOUT_EFFECT.keys() | REFUSED.keys())
    _, described = msgspec.json.schema_components(list(TYPES.values()))
    assert PLACES.keys() <= described.keys()
    for name, place in PLACES.items():
        names = {place + field for field in described[name]["properties"]}
        assert not names & (WITHOUT_EFFECT.keys() | REFUSED.keys()), name


@pytest.mark.parametrize("form", BODIES)
def test_a_field_without_effect_is_accepted_and_named_on_every_route(form: FormName) -> None:
    own = TYPES[form].__struct_fields__
    named = {name: {"a": 1} for name in WITHOUT_EFFECT if "." not in name and name not in own}
    result = read(form, named)
    assert not isinstance(result, Declined), result.message
    assert result.unused == tuple(sorted(named))


@pytest.mark.parametrize("path", WITHOUT_EFFECT)
def test_a_field_without_effect_is_accepted_wherever_it_is(path: str) -> None:
    assert order(*nested(path, {"a": 1}))[0].unused == (path,)


@pytest.mark.parametrize("path", REFUSED)
def test_a_field_that_is_not_supported_is_refused_by_name_unless_it_asks_for_nothing(path: str) -> None:
    for desk in (GENERATING, LENIENT):
        refused = refusal(*nested(path, {"some": "thing"}), desk)
        assert (refused.param, refused.code) == (path, "unsupported_field")
        assert refused.message == f"{path} is not supported yet: {REFUSED[path].reason}"
    for off in REFUSED[path].off:
        assert order(*nested(path, off))[0].unused == (), off


@pytest.mark.parametrize("form", BODIES)
def test_what_the_engine_cannot_do_is_refused_on_every_route(form: FormName) -> None:
    for path in [each for each in REFUSED if "." not in each and each not in TYPES[form].__struct_fields__]:
        assert refusal(form, {path: {"some": "thing"}}).param == path


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_decoding_backend": "outlines"},
        {"regex": "a+"},
        {"use_beam_search": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"length_penalty": 0.5},
        {"best_of": 3},
        {"best_of": 2, "n": 1},
        {"include_reasoning": False},
    ],
    ids=str,
)
def test_what_people_send_to_other_engines_is_not_ignored(fields: dict[str, Any]) -> None:
    # The model of these tests knows no tools.
    assert refusal(FormName.CHAT, fields).param == next(iter(fields))


def test_the_best_of_as_many_as_are_returned_is_all_of_them() -> None:
    for fields in ({"best_of": 1}, {"best_of": 3, "n": 3}, {"best_of": None}):
        assert order(FormName.COMPLETION, fields)[0].unused == ()


@pytest.mark.parametrize("form", BODIES)
def test_an_unknown_field_is_refused_on_every_route_or_named(form: FormName) -> None:
    refused = refusal(form, {"frobnicate": 1})
    assert (refused.param, refused.code) == ("frobnicate", "unknown_field")
    if form in (FormName.CHAT, FormName.COMPLETION):
        result = read(form, {"frobnicate": 1, "user": "me"}, LENIENT)
        assert isinstance(result, Order)
        assert result.unused == ("frobnicate", "user")


@pytest.mark.parametrize(
    ("form", "fields", "message"),
    [
        (
            FormName.CHAT,
            {"temprature": 1},
            "temprature is not a known field; nearest: temperature; correct it or leave it out",
        ),
        (FormName.CHAT, {"max_new_tokens": 1}, "nearest: max_tokens"),
        (FormName.COMPLETION, {"max_completion_tokens": 1}, "nearest: max_tokens"),
        (FormName.CHAT, {"max_model_len": 1}, "max_model_len is a setting of the engine, not a known field"),
        (FormName.EMBED, {"temperature": 1}, "temperature is a field of completions, not a known field"),
        (FormName.CHAT, {"messages": [{**SAID[0], "contents": 2}]}, "nearest: messages[].content; "),
        (FormName.CHAT, {"num_beams": 2}, "num_beams is not supported yet: beam search"),
        (FormName.CHAT, {"x\r\nSet-Cookie: a=b": 1}, "x??Set-Cookie??a?b is not a known field"),
    ],
    ids=str,
)
def test_an_unknown_field_is_answered_with_the_nearest_known_one(
    form: FormName, fields: dict[str, Any], message: str
) -> None:
    assert message in refusal(form, fields).message


def test_a_field_that_is_refused_cannot_hide_among_many_others() -> None:
    many = {f"field_{number}": 1 for number in range(500)}
    assert refusal(FormName.CHAT, {**many, "stop_regex": "a+"}, LENIENT).param == "stop_regex"
    messages = [{**SAID[0], "audio": None}, {**SAID[0], "audio": {"id": 1}}, {**SAID[0], "audio": None}]
    assert refusal(FormName.CHAT, {"messages": messages}).param == "messages[].audio"
    named = unused_fields(
        parse(json.dumps({"prompt": "a", **many}).encode(), CompletionRequest)[1], allows_unknown=True
    )
    assert len(named) == 64


def test_what_other_clients_send_of_earlier_answers_is_accepted() -> None:
    """The fields that OpenAI's client writes when an answer is sent back."""
    answer: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None}
    messages = [*SAID, {**answer, "function_call": None, "tool_calls": None}, *SAID]
    assert order(FormName.CHAT, {"messages": messages})[0].unused == ("messages[].annotations",)


# --- what is implemented ---


def test_choices_of_tokens_reach_the_engine() -> None:
    for form in (FormName.CHAT, FormName.COMPLETION):
        _, params = order(form, {"allowed_token_ids": [3, 1], "bad_words": ["a", "b c"]})
        assert (params.allowed_token_ids, params.bad_words) == ((1, 3), ("a", "b c"))


def test_a_prompt_keeps_its_last_tokens() -> None:
    long = "a" * MAX_MODEL_LEN + "bcd"
    for fields, kept in (
        ({"truncate_prompt_tokens": 2}, b"cd"),
        ({"truncate_prompt_tokens": -1}, long[-240:].encode()),
    ):
        made, _ = order(FormName.COMPLETION, {"prompt": long, **fields})
        assert bytes(unpack_tokens(made.prompts[0])) == kept
    made, _ = order(FormName.CHAT, {"truncate_prompt_tokens": 3})
    assert bytes(unpack_tokens(made.prompts[0])) == b"Hi;"


def test_the_end_of_a_conversation_is_as_asked() -> None:
    messages = [*SAID, {"role": "assistant", "content": "Well, "}]
    for fields, end in (
        ({}, b"assistant:Well, ;"),
        ({"add_generation_prompt": False}, b"assistant:Well, ;"),
        ({"continue_final_message": True}, b"assistant:Well, "),
        ({"continue_final_message": True, "add_generation_prompt": False}, b"assistant:Well, "),
    ):
        made, _ = order(FormName.CHAT, {"messages": messages, **fields})
        assert bytes(unpack_tokens(made.prompts[0])).endswith(end), fields
        tokens = GENERATING.do(ReadBody(1, FormName.TOKENIZE, json.dumps({"messages": messages, **fields}).encode()))
        assert isinstance(tokens, WrittenAnswer)
        assert json.loads(tokens.body)["tokens"] == list(unpack_tokens(made.prompts[0]))
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert refusal(FormName.CHAT, both).param == "continue_final_message"
    assert "last message of the assistant" in refusal(FormName.CHAT, {"continue_final_message": True}).message


def test_a_switch_that_the_template_never_reads_is_named() -> None:
    switches = {"chat_template_kwargs": {"enable thinking": True, "messages_": 1}}
    named = ("chat_template_kwargs.enable?thinking", "chat_template_kwargs.messages_")
    assert order(FormName.CHAT, switches)[0].unused == named
    tokens = read(FormName.TOKENIZE, {"prompt": None, "messages": SAID, **switches})
    assert isinstance(tokens, WrittenAnswer)
    assert tokens.unused == named


@pytest.mark.parametrize("added", [True, False])
def test_special_tokens_asked_for_beside_token_ids_are_named(added: bool) -> None:
    for prompt in ([72, 105], [[72], [105]]):
        assert order(FormName.COMPLETION, {"prompt": prompt, "add_special_tokens": added})[0].unused == (
            "add_special_tokens",
        )
    for fields in ({"prompt": "Hi", "add_special_tokens": added}, {"prompt": [72], "add_special_tokens": None}):
        assert order(FormName.COMPLETION, fields)[0].unused == ()


def test_a_field_of_the_other_kind_of_text_is_refused() -> None:
    """`/tokenize` takes a prompt or messages."""
    for name, value in (
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("chat_template_kwargs", {"a": 1}),
    ):
        assert refusal(FormName.TOKENIZE, {"prompt": "a", name: value}).param == name
    for value in (True, False):
        refused = refusal(FormName.TOKENIZE, {"prompt": None, "messages": SAID, "add_special_tokens": value})
        assert refused.param == "add_special_tokens"


def test_a_priority_reaches_the_engine_and_does_not_pass_others() -> None:
    for form in (FormName.CHAT, FormName.COMPLETION, FormName.EMBED, FormName.SCORE, FormName.RERANK):
        made = read(form, {"priority": -5})
        assert isinstance(made, Order)
        assert made.priority == -5
        assert refusal(form, {"priority": -6}).param == "priority"


@pytest.mark.parametrize(
    ("keys", "least"), [((), -(2**31)), (("first-key",), -(2**31)), (("first-key", "second-key"), 0)]
)
def test_among_several_callers_nobody_goes_before_the_others(keys: tuple[str, ...], least: int) -> None:
    async def work() -> None:
        async with local_front_end(api_keys=keys) as front_end:
            for priority, status in ((least, 200), (7, 200), (least - 1, 400)):
                fields = {"prompt": "a", "max_tokens": 1, "priority": priority}
                answer = await front_end.ask("/v1/completions", fields, keys[0] if keys else None).answer()
                assert answer.status == status, priority
            assert [each.terms.priority for each in front_end.engine.submitted] == [least, 7]

    asyncio.run(work())


def test_a_prompt_that_is_given_back_can_be_scored_alone() -> None:
    _, params = order(FormName.COMPLETION, {"echo": True, "max_tokens": 0, "logprobs": 2})
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (0, 2, 2)
    _, params = order(FormName.COMPLETION, {"echo": True, "max_tokens": 0})
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (0, None, 0)
    for form in (FormName.CHAT, FormName.COMPLETION):
        assert refusal(form, {"max_tokens": 0}).param == "max_tokens"


def test_a_long_prompt_is_refused_in_words_that_clients_look_for() -> None:
    for form, fields in (
        (FormName.CHAT, {"messages": [{"role": "user", "content": "a" * MAX_MODEL_LEN}]}),
        (FormName.COMPLETION, {"prompt": "a" * MAX_MODEL_LEN}),
        (FormName.COMPLETION, {"prompt": "a" * 10**6, "max_tokens": 1}),
        (FormName.EMBED, {"input": "a" * (MAX_MODEL_LEN + 1)}),
    ):
        refused = refusal(form, fields)
        assert refused.code == "context_length_exceeded"
        assert refused.message.startswith(f"This model's maximum context length is {MAX_MODEL_LEN} tokens: expected ")
        assert ", got " in refused.message


# --- what is told ---


def test_what_has_no_effect_is_in_the_header_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with local_front_end(allows_unknown_fields=True) as front_end:
            ask = {"prompt": "a", "max_tokens": 1}
            answer = await front_end.ask("/v1/completions", {**ask, "user": "me", "other": 1}).answer()
            assert (answer.status, answer.headers["x-sightline-unused"]) == (200, "other, user")
            answer = await front_end.ask("/v1/completions", {**ask, "regex": "a"}).answer()
            assert answer.status == 400
        async with local_front_end() as front_end:
            answer = await front_end.ask("/v1/completions", {**ask, "zanzibar": "a"}).answer()
            assert answer.status == 400

    with caplog.at_level("INFO", logger="sightline"):
        asyncio.run(work())
    logged = [vars(record).get("fields", {}) for record in caplog.records]
    assert [each["unused"] for each in logged if "unused" in each] == ["other, user"]
    assert [each["unsupported"] for each in logged if "unsupported" in each] == ["regex"]
    assert [each["error"] for each in logged if "error" in each] == ["unsupported_field", "unknown_field"]
    assert "zanzibar" not in str(logged), "a client's text is logged"


def test_the_document_lists_what_is_accepted_and_closes_the_rest() -> None:
    _, schemas = msgspec.json.schema_components([ChatRequest], ref_template="{name}")
    found = described(schemas, ["ChatRequest"], allows_unknown=False)
    assert found["ChatRequest"]["additionalProperties"] is False
    assert "Accepted without effect" in found["ChatRequest"]["properties"]["user"]["description"]
    assert "annotations" in found["Message"]["properties"]
    assert "include_obfuscation" in found["StreamOptions"]["properties"]
    assert "additionalProperties" not in described(schemas, ["ChatRequest"], allows_unknown=True)["ChatRequest"]
    assert "user" not in schemas["ChatRequest"]["properties"]


def test_the_page_of_fields_is_that_of_the_code() -> None:
    assert PAGE.read_text() == fields_page(), "run PYTHONPATH=src:tests python -m support.fields_page"
