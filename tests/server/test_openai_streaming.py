"""OpenAI's own client against a real server: streams, what ends them, and what is counted meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from support.openai_suite import (
    CANCEL_SECONDS,
    MODEL,
    asking,
    chat,
    complete,
    joined_chat,
    joined_completion,
    num_cached,
    openai_client,
    samples,
    usage_of,
    wait_for_running,
)
from support.serving import ServedProcess

QUESTION = "What is the capital of France?"
STORY = "Once upon a time"
ENDLESS = {"ignore_eos": True}
CONVENTIONAL = {
    "gauge": {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "degradations"},
    "counter": {
        "prefix_cache_queries",
        "prefix_cache_hits",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "num_preemptions",
        "plans_rebuilt",
    },
    "histogram": {
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_time_per_output_token_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_params_max_tokens",
        "request_params_n",
        "iteration_tokens",
    },
    "summary": {"plan_seconds"},
}
"""Metrics that the conventions name, by type."""


@pytest.fixture(scope="module")
def client(server: ServedProcess) -> Iterator[OpenAI]:
    with openai_client(server) as opened:
        yield opened


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0, "max_tokens": 3},
        {"temperature": 1, "seed": 3, "n": 3},
        {"temperature": 0, "logprobs": True, "top_logprobs": 2},
        {"temperature": 0, "stop": " Paris", "logprobs": True},
    ],
    ids=str,
)
def test_a_streamed_answer_joined_is_the_whole_one(client: OpenAI, fields: dict[str, Any]) -> None:
    fields = {"max_tokens": 10} | fields
    whole = chat(client, QUESTION, **fields)
    streamed = joined_chat(
        client.chat.completions.create(
            model=MODEL, messages=asking(QUESTION), stream=True, stream_options={"include_usage": True}, **fields
        )
    )
    assert streamed.texts == {choice.index: choice.message.content for choice in whole.choices}
    assert streamed.reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert len(streamed.ids) == 1
    for choice in whole.choices:
        scored = [] if choice.logprobs is None else choice.logprobs.content
        assert streamed.logprobs.get(choice.index, []) == scored
    *before, usage = streamed.usages
    assert set(before) == {None}
    assert streamed.choice_counts == [1] * len(before) + [0]
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = {"prompt_tokens_details"}
    assert usage.model_dump(exclude=cached) == usage_of(whole).model_dump(exclude=cached)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_tells_usage_so_far_in_every_event_if_asked(client: OpenAI, n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=asking(QUESTION),
            max_tokens=6,
            n=n,
            stream=True,
            stream_options=options,  # type: ignore[call-overload]
            extra_body=ENDLESS,
        )
    )
    usages = [chunk.usage for chunk in chunks]
    assert all(usage is not None for usage in usages)
    counts = [usage.completion_tokens for usage in usages]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 6 * n
    assert len({usage.prompt_tokens for usage in usages}) == 1
    assert [usage.total_tokens - usage.prompt_tokens for usage in usages] == counts


def test_a_stream_tells_no_usage_unasked_and_begins_with_the_role(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=asking("Hi"), max_tokens=3, stream=True))
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks].count("length") == 1
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_stream_is_events_that_end_with_done(server: ServedProcess) -> None:
    body = {"prompt": STORY, "max_tokens": 2, "stream": True}
    status, text, headers = server.post("/v1/completions", body)
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    events = text.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith('data: {"id":"cmpl-') for event in events[:-2])
    assert len(events) >= 4


def test_tokens_come_as_they_are_made(client: OpenAI, server: ServedProcess) -> None:
    stream = client.completions.create(model=MODEL, prompt=STORY, max_tokens=64, stream=True, extra_body=ENDLESS)
    next(stream)
    assert samples(server)["num_requests_running"] == 1, "the first came while the others are not made yet"
    # On a busy machine a few come together.
    assert 1 + sum(1 for _ in stream) > 32


@pytest.mark.parametrize("stop", [[" is Paris"], [" of France is not", "Paris."], ["is Paris and", "is Paris."]])
def test_no_event_holds_a_part_of_a_stop_string_that_is_found(client: OpenAI, stop: list[str]) -> None:
    whole = "The capital of France is Paris."
    cut = min(whole.index(each) for each in stop if each in whole)
    streamed = joined_chat(
        client.chat.completions.create(
            model=MODEL, messages=asking(QUESTION), temperature=0, max_tokens=16, stop=stop, stream=True
        )
    )
    sent = ""
    for piece in streamed.pieces[0]:
        sent += piece
        # What was sent cannot be taken back: it never goes beyond where the stop string begins.
        assert whole[:cut].startswith(sent)
    assert sent == whole[:cut]
    assert streamed.reasons == {0: "stop"}


def test_what_only_looked_like_a_stop_string_is_sent_after_all(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=asking(QUESTION), temperature=0, max_tokens=16, stop=["Paris!", ". "], stream=True
    )
    assert joined_chat(stream).texts == {0: "The capital of France is Paris."}


def test_characters_of_several_tokens_are_sent_whole(client: OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt="🦜🦜🦜🦜🦜", temperature=0, max_tokens=9, stream=True)
    streamed = joined_completion(stream)
    assert streamed.texts == {0: "🦜🦜🦜"}
    assert not any("\ufffd" in piece for piece in streamed.pieces[0])


@pytest.mark.parametrize(
    "fields", [{}, {"n": 2, "temperature": 1.0, "seed": 4}, {"echo": True}, {"logprobs": 2}], ids=str
)
def test_streamed_continuations_of_several_prompts_keep_apart(client: OpenAI, fields: dict[str, Any]) -> None:
    prompts = [STORY, "1, 2, 3, 4,", "🦜🦜🦜🦜🦜"]
    fields = {"temperature": 0, "max_tokens": 5} | fields
    whole = complete(client, prompts, **fields)
    streamed = joined_completion(client.completions.create(model=MODEL, prompt=prompts, stream=True, **fields))
    assert len(whole.choices) == 3 * fields.get("n", 1)
    assert streamed.texts == {choice.index: choice.text for choice in whole.choices}
    assert streamed.reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    for choice in whole.choices:
        parts = streamed.logprobs.get(choice.index, [])
        assert bool(parts) == (choice.logprobs is not None)
        if choice.logprobs is not None:
            for name, value in choice.logprobs.model_dump().items():
                assert [each for part in parts for each in getattr(part, name)] == value


def test_closing_a_stream_cancels_it_in_the_engine(server: ServedProcess, client: OpenAI) -> None:
    before = samples(server)
    stream = client.chat.completions.create(
        model=MODEL, messages=asking(STORY), max_tokens=2000, n=2, stream=True, extra_body=ENDLESS
    )
    next(iter(stream))
    wait_for_running(server, 2, CANCEL_SECONDS)
    stream.close()
    wait_for_running(server, 0, CANCEL_SECONDS)
    after = samples(server)
    assert after["client_disconnects_total"] == before.get("client_disconnects_total", 0) + 1
    assert after["kv_cache_usage_perc"] == 0
    assert after["generation_tokens_total"] < before["generation_tokens_total"] + 400


def test_a_client_that_waits_no_longer_cancels_in_the_engine(server: ServedProcess, client: OpenAI) -> None:
    before = samples(server)
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=1.5), STORY, max_tokens=2000, extra_body=ENDLESS)
    wait_for_running(server, 0, CANCEL_SECONDS)
    after = samples(server)
    assert after["client_disconnects_total"] == before["client_disconnects_total"] + 1
    time.sleep(0.3)
    assert samples(server)["steps_total"] == after["steps_total"] > before["steps_total"]


def test_every_conventional_metric_is_there_under_its_type(server: ServedProcess) -> None:
    status, text, headers = server.send("GET", "/metrics", None, None)
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    for kind, names in CONVENTIONAL.items():
        assert {name for name in names if families[f"sightline_{name}"].type != kind} == set()
    assert all(family.documentation and family.name.startswith("sightline_") for family in families.values())


def test_counters_move_by_exactly_what_a_request_does(server: ServedProcess, client: OpenAI) -> None:
    prompt = "A prompt that nothing has asked for before, to be counted. " * 3
    before = samples(server)
    first = complete(client, prompt, n=2, max_tokens=4, extra_body=ENDLESS)
    middle = samples(server)
    again = complete(client, prompt, max_tokens=1, extra_body=ENDLESS)
    after = samples(server)
    moved = {name: middle[name] - before.get(name, 0) for name in middle if not name.startswith("http_")}
    count = usage_of(first).prompt_tokens
    expected = {
        "prompt_tokens_total": count,
        "generation_tokens_total": 8,
        'request_success_total{finished_reason="length"}': 2,
        'request_success_total{finished_reason="stop"}': 0,
        'request_success_total{finished_reason="abort"}': 0,
        'request_success_total{finished_reason="error"}': 0,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 6,
        "e2e_request_latency_seconds_count": 1,
        "request_queue_time_seconds_count": 1,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "num_preemptions_total": 0,
        "plans_rebuilt_total": 0,
        "client_disconnects_total": 0,
        "prefix_cache_hits_total": 0,
    }
    assert {name: moved[name] for name in expected} == expected
    assert after["prefix_cache_hits_total"] - middle["prefix_cache_hits_total"] == num_cached(again) > 0
    assert after["prefix_cache_queries_total"] - middle["prefix_cache_queries_total"] == count
    assert after["steps_total"] - middle["steps_total"] == 1
    assert after["plan_seconds_count"] - middle["plan_seconds_count"] == 1
    answered = 'http_requests_total{route="/v1/completions",status="200"}'
    assert after[answered] - before.get(answered, 0) == 2
    assert moved["e2e_request_latency_seconds_sum"] > moved["time_to_first_token_seconds_sum"] / 2 > 0
