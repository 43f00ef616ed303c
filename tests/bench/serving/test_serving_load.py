"""A load loses nothing, counts what the server says, and its times are those of the script."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from sightline.bench.serving.answers import ReportedUsage, StreamedAnswer, seconds_to_wait
from sightline.bench.serving.http_stream import Address, Client
from sightline.bench.serving.load import LoadResult, RequestOutcome, RequestRecord, run_load
from sightline.bench.serving.report import make_report
from sightline.bench.serving.work import Arrivals, Ask
from sightline.core.errors import SightlineError
from support.serving_loads import load, one, sent
from support.stub_completions import Scripted, StubServer, stub_server
from support.virtual_serving import TimedAnswer, virtual_load


def test_every_request_has_one_record_in_order_with_its_own_text() -> None:
    def script(body: Mapping[str, Any], _: int) -> Scripted:
        number = body["prompt"][0]
        return Scripted(pieces=tuple(f"{number}.{at} " for at in range(6)), gap=0.002 * (number % 3))

    with stub_server(script) as server:
        result = load(server, 64)
    assert [record.index for record in result.records] == list(range(64))
    assert [record.text for record in result.records] == [
        "".join(f"{number}.{at} " for at in range(6)) for number in range(64)
    ]
    assert {(record.outcome, record.status, record.finish_reason) for record in result.records} == {
        (RequestOutcome.COMPLETED, 200, "length")
    }
    assert {record.usage for record in result.records} == {ReportedUsage(3, 6, None)}
    assert len({record.response_id for record in result.records}) == 64
    assert sorted(body["prompt"][0] for body in server.asked) == list(range(64))
    assert not result.stopped


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("cut", [1, 7])
def test_text_survives_cuts_anywhere_even_inside_characters(line_end: str, cut: int) -> None:
    pieces = ("Zürich", " 🙂", ' "line\nbreak\r" ', "数")
    record = one(Scripted(pieces=pieces, line_end=line_end, cut=cut))
    assert (record.error, record.text, len(record.text_times)) == (None, "".join(pieces), 4)


def event(text: str, reason: str | None = None) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"text": text, "finish_reason": reason}]}).encode()


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'
TIMED = TimedAnswer(
    [(0.5, event("a")), (0.25, event("b")), (0.0, event("")), (0.125, event("c", "length")), (1.0, USAGE)], closing=9.0
)


def test_times_are_those_of_the_script_and_the_closing_of_a_connection_is_in_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, time = virtual_load(monkeypatch, [TIMED])
    [record] = result.records
    assert (record.error, record.sent, record.text_times) == (None, 0.0, (0.5, 0.75, 0.875))
    assert (record.ttft, record.gaps, record.latency, record.tpot) == (0.5, [0.25, 0.125], 1.875, 1.375 / 2)
    assert (result.seconds, time.now) == (1.875, 100 + 1.875 + 9)


def test_tokens_are_the_usages_and_gaps_the_chunks_with_text() -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 11, "prompt_tokens_details": {"cached_tokens": 8}}
    record = one(Scripted(pieces=("a", "", "", "b"), gap=0.02, usage=usage))
    assert record.usage == ReportedUsage(10, 11, 8)
    assert len(record.text_times) == 2
    assert record.ttft is not None
    assert record.tpot == pytest.approx((record.latency - record.ttft) / 10)


def test_an_answer_without_text_or_of_one_token_has_no_time_a_token() -> None:
    silent = one(Scripted(pieces=("", "")))
    assert (silent.outcome, silent.ttft, silent.tpot, silent.gaps) == (RequestOutcome.COMPLETED, None, None, [])
    single = one(Scripted(pieces=("a",)))
    assert single.ttft is not None
    assert single.tpot is None


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Scripted(dies_after=2), "expected the rest of the body, got a closed connection|reset"),
        (Scripted(error_after=1), "expected a completion, got scripted error in the stream"),
        (Scripted(done=False), r"expected \[DONE\] at the end of the stream"),
        (Scripted(usage=None), "expected usage in the stream"),
        (Scripted(usage={"prompt_tokens": 1}), "Object missing required field `completion_tokens`"),
        (Scripted(usage={"prompt_tokens": 1, "completion_tokens": True}), "Expected `int`, got `bool`"),
        (Scripted(finish_reason=None), "expected a finish_reason"),
        (Scripted(status=500), "HTTP 500: scripted 500"),
        (Scripted(raw=b"HTTP/1.1 404 No\r\n\r\n<html>"), "HTTP 404: '<html>'"),
        (
            Scripted(raw=b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\nx"),
            "expected a stream of events, got text/h",
        ),
        (
            Scripted(raw=b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: x\n\n"),
            "expected a completion, got 'x': JSON is malformed",
        ),
        (Scripted(raw=b"nonsense"), "expected an HTTP/1.1 response"),
    ],
)
def test_what_is_no_whole_answer_failed_and_says_why(script: Scripted, message: str) -> None:
    record = one(script)
    assert record.outcome is RequestOutcome.FAILED
    assert record.error is not None
    assert re.search(message, record.error)


def test_a_server_that_dies_in_the_stream_leaves_what_came() -> None:
    record = one(Scripted(pieces=("a", "b", "c"), gap=0.01, dies_after=2))
    assert (record.outcome, record.text, record.usage) == (RequestOutcome.FAILED, "ab", None)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (['{"id": "a", "choices": []}', '{"id": "b", "choices": []}'], "expected chunks with one id, 'a', got 'b'"),
        (["[DONE]", '{"choices": []}'], "expected nothing after"),
        (
            ['{"choices": [{"text": "", "finish_reason": "stop"}]}', '{"choices": [{"text": "x"}]}'],
            "expected no text after",
        ),
        (["[]"], "Expected `object`, got `array`"),
        (['{"choices": [1]}'], "Expected `object`, got `int`"),
        (['{"choices": [{"text": 1}]}'], "Expected `str | null`, got `int`"),
        (['{"choices": [{}]}'], "expected a choice with text, a delta or a message"),
        (['{"detail": "not so"}'], "expected a completion, got not so"),
        (['{"id": 1, "choices": []}'], "Expected `str | null`, got `int`"),
        (["{" * 9], "expected a completion, got .* JSON is malformed"),
    ],
)
def test_streams_that_contradict_themselves_are_refused(events: list[str], message: str) -> None:
    answer = StreamedAnswer()
    with pytest.raises(SightlineError, match=message):
        answer.take("".join(f"data: {event}\n\n" for event in events).encode(), 0.0)


def test_a_deadline_fails_the_request_and_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = TimedAnswer([(0.0, event("a"))], hangs=True)
    result, _ = virtual_load(monkeypatch, [TIMED, hanging, TIMED], 3, timeout=0.01)
    assert [record.outcome.value for record in result.records] == ["completed", "failed", "completed"]
    assert result.records[1].error == "expected an end within 0.01 s, got none; allow more time with --timeout"
    assert result.records[1].text == "a"


def test_refusals_are_counted_and_are_no_failures() -> None:
    statuses = {1: 429, 2: 503, 3: 503}
    with stub_server(lambda body, _: Scripted(status=statuses.get(body["prompt"][0], 200))) as server:
        result = load(server, 5)
    assert [record.outcome.value for record in result.records] == ["completed", *["refused"] * 3, "completed"]
    assert [record.status for record in result.records] == [200, 429, 503, 503, 200]
    assert result.records[1].error == "HTTP 429: scripted 429"
    report = make_report(sent(), result, [3] * 5, ())
    assert (report.completed, report.refused, report.failed, report.exit_code) == (2, {"429": 1, "503": 2}, 0, 0)
    assert "completed 2, refused 3 (1 with 429, 2 with 503), failed 0" in report.lines()


def test_a_refused_request_is_sent_again_when_the_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = TimedAnswer([(0.5, b"{}")], status=429, retry_after="2")
    result, time = virtual_load(monkeypatch, [refused, refused, TIMED], retry=True)
    [record] = result.records
    assert (record.outcome, record.refusals, record.status) == (RequestOutcome.COMPLETED, (429, 429), 200)
    assert (time.slept, record.ttft) == ([2.0, 2.0], 5.5)
    report = make_report(sent(), result, [3], ())
    assert (report.refused, report.refusals_retried) == ({}, {"429": 2})


def test_a_server_that_refuses_for_longer_than_there_is_time_has_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = TimedAnswer([], status=503, retry_after="30")
    result, time = virtual_load(monkeypatch, [refused], retry=True, timeout=29.0)
    [record] = result.records
    assert (record.outcome, record.refusals, time.slept) == (RequestOutcome.REFUSED, (503,), [])


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, 1.0), ("3", 3.0), ("0", 0.05), ("-4", 0.05), ("inf", 1.0), ("soon", 1.0), ("", 1.0)],
)
def test_retry_after_is_read_in_seconds(header: str | None, seconds: float) -> None:
    assert seconds_to_wait(header) == seconds


def test_retry_after_may_be_a_date(monkeypatch: pytest.MonkeyPatch) -> None:
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(2_000_000_060))
    monkeypatch.setattr("sightline.bench.serving.answers.time", SimpleNamespace(time=lambda: 2_000_000_000.0))
    assert seconds_to_wait(date) == 60


def test_no_more_requests_are_under_way_than_may_be() -> None:
    with stub_server(Scripted(gap=0.01)) as server:
        limited = load(server, 12, arrivals=Arrivals(max_concurrency=3))
        assert (limited.peak_concurrency, server.peak <= 4) == (3, True)
        assert load(server, 12).peak_concurrency == 12
    assert limited.records[-1].sent > limited.records[0].ended - 0.001


def test_requests_are_sent_when_they_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = Arrivals(request_rate=40.0, seed=1)
    at_once = TimedAnswer([(0.0, event("a", "length")), (0.0, USAGE)])
    result, _ = virtual_load(monkeypatch, [at_once], 20, arrivals=arrivals)
    assert [record.due for record in result.records] == arrivals.offsets(20)
    assert [record.sent for record in result.records] == pytest.approx(arrivals.offsets(20))


def test_overload_in_an_open_loop_loses_nothing() -> None:
    """Ten times what the server takes: it answers every tenth request."""

    def script(body: Mapping[str, Any], number: int) -> Scripted:
        if number % 10:
            return Scripted(status=429 if body["prompt"][0] % 2 else 503, headers={"Retry-After": "1"})
        return Scripted(pieces=("a", "b"), gap=0.05)

    with stub_server(script) as server:
        result = load(server, 450, arrivals=Arrivals(request_rate=300.0))
    assert [record.index for record in result.records] == list(range(450))
    assert sorted(body["prompt"][0] for body in server.asked) == list(range(450))
    report = make_report(sent(), result, [2] * 450, ())
    assert (report.failed, report.cut, report.not_sent) == (0, 0, 0)
    assert (report.completed, sum(report.refused.values())) == (45, 405)
    assert set(report.refused) == {"429", "503"}
    assert all(record.text == "ab" for record in result.with_outcome(RequestOutcome.COMPLETED))


def test_a_load_that_is_stopped_tells_what_ended_and_cuts_the_rest() -> None:
    async def stopped(server: StubServer) -> LoadResult:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def stop_soon(_: RequestRecord) -> None:
            """One has ended: as soon as the next has been sent, nobody ends any more."""
            loop.call_later(0.1, stop.set)

        asks = [Ask((number,), 3) for number in range(6)]
        arrivals = Arrivals(max_concurrency=4)
        client = Client(Address.parse(server.url))
        return await run_load(
            client,
            asks,
            model="stub",
            arrivals=arrivals,
            stop=stop,
            on_record=stop_soon,
        )

    with stub_server(lambda body, _: Scripted(first_delay=0.0 if body["prompt"][0] == 1 else 20.0)) as server:
        result = asyncio.run(stopped(server))
    assert result.stopped
    assert {record.index: record.outcome.value for record in result.records} == {
        0: "cut",
        1: "completed",
        2: "cut",
        3: "cut",
        4: "cut",
    }
    assert result.num_asked == 6


def test_the_client_is_cheap_and_imports_no_torch() -> None:
    with stub_server(Scripted(pieces=("word ",) * 60, gap=0.005)) as server:
        result = load(server, 64)
    chunks = sum(len(record.text_times) for record in result.records)
    assert chunks == 64 * 60
    assert result.client_seconds / chunks < 300e-6
    loaded = (
        "import sys, sightline.bench.serving.measure, sightline.cli.bench.serving; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0
