"""OpenAI's own client against a real server: what is refused, by whom it may be asked, and what is never logged."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from openai import OpenAI

from sightline.version import __version__
from support.openai_suite import (
    CANCEL_SECONDS,
    MODEL,
    asking,
    chat,
    complete,
    openai_client,
    usage_of,
    wait_for_running,
)
from support.serving import ServedProcess, serving

KEY, OTHER_KEY = "sk-of-one-client", "sk-of-nobody"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
MARKER = "zanzibar-marker"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{{ ' and more' * (extra or 0) }}"
WRONG_FOR_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 10001}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.5}, "min_p"),
    ({"min_p": 1.5}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "two"}, "n"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": 7}, "stop"),
    ({"stop": ["x"] * 129}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [10**7]}, "stop_token_ids"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"cat": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {str(10**7): 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"skip_special_tokens": 1}, "skip_special_tokens"),
    ({"include_stop_str_in_output": 0}, "include_stop_str_in_output"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"model": 7}, "model"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**7]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"priority": 2**31}, "priority"),
    ({"guided_json": {}, "use_beam_search": True}, "use_beam_search"),
    ({"temprature": 1}, "temprature"),
    ({"guided_json": {"uniqueItems": True}}, "structured_outputs"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_json"),
    ({"guided_json": {}, "ignore_eos": True}, "ignore_eos"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_regex": "(a"}, "structured_outputs"),
    ({"guided_regex": ""}, "structured_outputs"),
    ({"guided_choice": []}, "structured_outputs"),
    ({"guided_grammar": "start: b"}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"yaml": 1}}, "structured_outputs"),
]
WRONG_FOR_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
]
WRONG_FOR_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": "word " * 9000}, "prompt"),
    ({"prompt": ["a"] * 2049}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"suffix": "the end"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
]


@pytest.fixture(scope="module")
def client(server: ServedProcess) -> Iterator[OpenAI]:
    with openai_client(server) as opened:
        yield opened


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """Strict, with a key, a template with a switch, room for two sequences, and everything logged that ever is."""
    template = tmp_path_factory.mktemp("template") / "switched.jinja"
    template.write_text(TEMPLATE)
    flags = ("--strict", "--max-num-seqs", "1", "--max-queued-requests", "1", "--log-level", "debug")
    with serving(*flags, "--chat-template", str(template), environment={"SIGHTLINE_API_KEY": KEY}) as running:
        assert running.url
        yield running


@pytest.fixture(scope="module")
def trusted(guarded: ServedProcess) -> Iterator[OpenAI]:
    with openai_client(guarded, KEY) as opened:
        yield opened


@pytest.mark.parametrize(("fields", "param"), WRONG_FOR_BOTH + WRONG_FOR_CHAT, ids=lambda each: str(each)[:50])
def test_a_wrong_chat_is_refused_by_the_name_of_its_field(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "Hi", max_tokens=None, extra_body=fields)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")


@pytest.mark.parametrize(("fields", "param"), WRONG_FOR_BOTH + WRONG_FOR_COMPLETIONS, ids=lambda each: str(each)[:50])
def test_a_wrong_completion_is_refused_by_the_name_of_its_field(
    client: OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "Hi", extra_body=fields)
    assert caught.value.param == param


def test_a_model_that_is_not_served_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=asking("Hi"))
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError) as unrouted:
        client.embeddings.create(model=MODEL, input="x", encoding_format="float")
    assert unrouted.value.code == "not_found"


def test_a_request_that_would_cost_too_much_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "Hi", n=128, max_tokens=8000, logprobs=20)
    assert caught.value.code == "cost_exceeded"


@pytest.mark.parametrize("name", ["self", "cls", "template", "seconds", "variables", "context"])
def test_a_template_switch_of_any_name_is_no_fault(client: OpenAI, name: str) -> None:
    answer = chat(client, "Hi", max_tokens=1, extra_body={"chat_template_kwargs": {name: 1}})
    assert answer.choices[0].finish_reason == "length"


def test_a_template_switch_reaches_the_template(trusted: OpenAI) -> None:
    plain, switched = (
        usage_of(chat(trusted, "Hi", max_tokens=1, extra_body={"chat_template_kwargs": {"extra": count}}))
        for count in (0, 3)
    )
    assert (plain.prompt_tokens, switched.prompt_tokens) == (1, 7)


@pytest.mark.parametrize("key", [OTHER_KEY, KEY + "x", KEY[:-1]], ids=["other", "longer", "shorter"])
def test_another_key_is_refused_everywhere(guarded: ServedProcess, key: str) -> None:
    with openai_client(guarded, key) as stranger:
        for ask in (
            lambda: chat(stranger, "Hi"),
            lambda: complete(stranger, "Hi"),
            stranger.models.list,
            lambda: stranger.models.retrieve(MODEL),
        ):
            with pytest.raises(openai.AuthenticationError) as caught:
                ask()
            assert caught.value.code == "invalid_api_key"
            assert KEY not in caught.value.message


def test_without_a_key_only_what_is_public_is_told(guarded: ServedProcess, trusted: OpenAI) -> None:
    public = ["/health", "/ready", "/version", "/openapi.json", "/docs", "/"]
    private = ["/v1/models", f"/v1/models/{MODEL}", "/metrics", "/server_info", "/nowhere"]
    assert [guarded.get(path)[0] for path in public] == [200] * len(public)
    assert [guarded.get(path)[0] for path in private] == [401] * len(private)
    assert [guarded.get(path, WITH_KEY)[0] for path in private] == [200, 200, 200, 200, 404]
    assert guarded.send("GET", "/v1/models", None, None)[2]["www-authenticate"] == "Bearer"
    assert trusted.models.list().data[0].id == MODEL


def test_a_full_queue_says_when_to_come_again_and_empties(guarded: ServedProcess, trusted: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as too_many:
        complete(trusted, "Hi", n=3)
    assert too_many.value.code == "too_many_sequences"
    with ExitStack() as streams:
        for _ in range(2):
            stream = trusted.completions.create(
                model=MODEL, prompt="Hi", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
            )
            streams.callback(stream.close)
        with pytest.raises(openai.RateLimitError) as caught:
            chat(trusted, "Hi")
        assert (caught.value.status_code, caught.value.code) == (429, "queue_full")
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        wait_for_running(guarded, 1, CANCEL_SECONDS, WITH_KEY)
    wait_for_running(guarded, 0, CANCEL_SECONDS, WITH_KEY)
    assert chat(trusted, "Hi", max_tokens=1).choices


@pytest.mark.slow
def test_a_client_that_tries_again_gets_through_once_there_is_room(trusted: OpenAI) -> None:
    streams = [
        trusted.completions.create(model=MODEL, prompt="Hi", max_tokens=8, stream=True, extra_body={"ignore_eos": True})
        for _ in range(2)
    ]
    patient = trusted.with_options(max_retries=5)
    assert chat(patient, "Hi", max_tokens=1).choices[0].finish_reason == "length"
    assert [len([*stream]) >= 8 for stream in streams] == [True, True]


def test_neither_prompts_nor_keys_are_ever_logged(guarded: ServedProcess, trusted: OpenAI) -> None:
    text = f"Tell me of {MARKER}."
    assert chat(trusted, text, max_tokens=2).choices
    assert list(trusted.completions.create(model=MODEL, prompt=text, max_tokens=2, stream=True))
    wrong: list[dict[str, Any]] = [
        {"temperature": MARKER},
        {MARKER: MARKER},
        {"model": MARKER},
        {"stop": [MARKER, 5]},
        {"chat_template_kwargs": {"extra": MARKER}},
        {"messages": [{"role": MARKER, "content": [{"type": MARKER}]}]},
        {"messages": asking(text * 3000)},
    ]
    for fields in wrong:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
            chat(trusted, text, extra_body=fields)
    sent = f"/v1/{MARKER}?{MARKER}={MARKER}"
    assert guarded.get(sent, WITH_KEY | {"X-Other": MARKER})[0] == 404
    assert guarded.post("/v1/completions", f'{{"prompt": "{MARKER}'.encode(), WITH_KEY)[0] == 400
    with openai_client(guarded, OTHER_KEY) as stranger, pytest.raises(openai.AuthenticationError):
        chat(stranger, text)
    guarded.wait_for("request", lambda event: event["status"] == 401)
    time.sleep(0.1)
    assert len(guarded.lines) > 10
    assert all(json.loads(line) for line in guarded.lines if line.startswith("{"))
    leaked = [line for line in guarded.lines if MARKER in line or KEY in line or OTHER_KEY in line]
    assert leaked == []


def test_the_server_tells_how_it_is(server: ServedProcess) -> None:
    told = {path: json.loads(server.get(path)[1]) for path in ("/health", "/ready", "/version", "/server_info")}
    assert told["/health"] == {"status": "alive"}
    assert told["/ready"] == {"status": "ready"}
    assert told["/version"] == {"version": __version__}
    info = told["/server_info"]
    assert (info["models"], info["vocab_size"], info["degradations"]) == ([MODEL], 49152, [])
    # The default model is a quantised file, which is dequantised unless it is told otherwise.
    assert [note.partition(":")[0] for note in info["notes"]] == ["--quantization keep", "answers"]
    assert info["engine"] == {"is_open": True, "starts": 1}
    assert (info["config"]["cache_tokens"], info["config"]["max_model_len"]) == (32768, 8192)
    assert (info["limits"]["max_sequences"], info["limits"]["max_body_bytes"]) == (64 + 1024, 4 << 20)
