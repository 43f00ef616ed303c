"""Traces: a span for each request with its phases, sent beside the event loop, with no text in it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sightline.core.errors import ConfigError
from sightline.core.metrics import PhaseSeconds
from sightline.server import traces as traces_module
from sightline.server.http.access import Access
from sightline.server.http.routing import NO_BODY, Call, CallTrace, Reply, Route
from sightline.server.process.timing import RequestTimes
from sightline.server.traces import NoTraces, TracedRequest, open_traces
from support.fake_engine import FAILING
from support.openai_suite import samples
from support.serving import ServedProcess, fake_serving

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sightline.server import otlp
from sightline.server.otlp import OtlpTraces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MARK = "a text that no trace may have"


async def nothing(call: Call) -> Reply:
    return Reply(b"")


ROUTE = Route("POST", "/v1/chat/completions", Access.KEY, nothing, "", NO_BODY, None, operation="chat")


def request(call: CallTrace | None = None, status: int = 200, **more: Any) -> TracedRequest:
    now = time.monotonic()
    known: dict[str, Any] = {"parent": {}, "facts": {"prompt_tokens": 7, "completion_tokens": 3}, **more}
    return TracedRequest(ROUTE, ("127.0.0.1", 8000), "mine", status, now - 2.0, now, call=call or CallTrace(), **known)


def recorded(*requests: TracedRequest) -> list[Any]:
    exporter, dropped = InMemorySpanExporter(), list[int]()
    traces = OtlpTraces(exporter, dropped.append)
    for each in requests:
        traces.record(each)
    traces.close()
    assert dropped == []
    return list(exporter.get_finished_spans())


def test_phases_are_children_that_follow_each_other() -> None:
    times = RequestTimes(time.monotonic() - 1.5)
    times.take(PhaseSeconds(0.25, 0.5, 0.75))
    spans = {span.name: span for span in recorded(request(CallTrace("m", times=times)))}
    root = spans.pop("chat m")
    assert list(spans) == ["queue", "prefill", "decode"]
    assert [round((each.end_time - each.start_time) / 1e9, 3) for each in spans.values()] == [0.25, 0.5, 0.75]
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    assert all(each.parent.span_id == root.context.span_id for each in spans.values())
    assert root.start_time < spans["queue"].start_time
    assert spans["decode"].end_time <= root.end_time
    assert abs(root.end_time - time.time_ns()) < 10e9


def test_several_prompts_begin_a_phase_with_the_first_and_end_it_with_the_last() -> None:
    times = RequestTimes(10.0)
    for phases in (PhaseSeconds(2.0, 1.0, 5.0), PhaseSeconds(1.0, 1.5, 1.0), PhaseSeconds(9.0)):
        times.take(phases)
    assert (times.started_at, times.first_token_at, times.ended_at) == (11.0, 12.5, 19.0)


def test_attributes_are_those_of_the_conventions_and_of_what_was_in_effect() -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 3, "n": 2, "seed": 1, "stop": [MARK]}
    call = CallTrace("m", "chatcmpl-1", json.dumps(sampling).encode(), ("stop", "length"))
    [root] = recorded(request(call))
    told = dict(root.attributes)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.model": "m",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "server.address": "127.0.0.1",
        "server.port": 8000,
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "sightline.request.id": "mine",
    }
    assert {name: told.get(name) for name in expected} == expected
    assert "error.type" not in told
    assert MARK not in root.to_json()


@pytest.mark.parametrize(
    ("status", "facts", "kind", "is_error"),
    [
        (400, {}, "400", False),
        (400, {"error": "unknown_field"}, "unknown_field", False),
        (400, {"error": None}, "400", False),
        (503, {}, "503", True),
        (200, {"error": "generation_failed"}, "generation_failed", True),
    ],
)
def test_a_failure_is_one(status: int, facts: dict[str, object], kind: str, is_error: bool) -> None:
    [root] = recorded(request(status=status, facts=facts))
    assert (root.attributes["error.type"], root.status.is_ok) == (kind, not is_error)


def test_a_clients_trace_is_continued_unless_it_is_not_recorded() -> None:
    [root] = recorded(
        request(parent={"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}),
        request(parent={"traceparent": f"00-{TRACE}-{PARENT}-00"}),
    )
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    assert root.context.trace_state.get("a") == "b"


@pytest.mark.parametrize("sent", ["", "00", f"00-{'0' * 32}-{PARENT}-01", "é" * 300, f"ff-{TRACE}-{PARENT}-01"])
def test_what_is_no_trace_context_begins_a_new_trace(sent: str) -> None:
    [root] = recorded(request(parent={"traceparent": sent}))
    assert root.parent is None


def test_a_collector_that_hangs_makes_nobody_wait_and_what_it_misses_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otlp, "CLOSE_SECONDS", 0.1)
    hanging, dropped = threading.Event(), list[int]()

    class Hanging(InMemorySpanExporter):  # type: ignore[misc]
        def export(self, spans: Any) -> Any:
            hanging.wait(20)
            return super().export(spans)

    exporter = Hanging()
    traces = OtlpTraces(exporter, dropped.append)
    begun = time.monotonic()
    for _ in range(otlp.MAX_SPANS + 100):
        traces.record(request())
    traces.close()
    assert time.monotonic() - begun < 10
    assert sum(dropped) == 100
    hanging.set()
    deadline = time.monotonic() + 10
    while len(exporter.get_finished_spans()) < otlp.MAX_SPANS and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(exporter.get_finished_spans()) == otlp.MAX_SPANS


def test_spans_that_the_collector_does_not_take_are_counted_and_make_room() -> None:
    class Refusing(InMemorySpanExporter):  # type: ignore[misc]
        def export(self, spans: Any) -> Any:
            return SpanExportResult.FAILURE

    dropped = list[int]()
    traces = OtlpTraces(Refusing(), dropped.append)
    for _ in range(3):
        traces.record(request())
    traces.close()
    assert sum(dropped) == 3
    assert traces._outbox.admit(otlp.MAX_SPANS)


def test_a_request_that_cannot_be_traced_is_answered_all_the_same() -> None:
    dropped = list[int]()
    traces = OtlpTraces(InMemorySpanExporter(), dropped.append)
    traces.record(request(CallTrace(sampling=b"no JSON")))
    traces.close()
    assert dropped == [1]


def test_without_the_extra_the_flag_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'sightline\[otel\]'"):
        open_traces("http://localhost:4318", print)
    assert isinstance(open_traces(None, print), NoTraces)


@pytest.mark.parametrize("url", ["", "localhost:4318", "grpc://localhost:4317", "http://"])
def test_what_is_no_url_of_a_collector_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        open_traces(url, print)


class Collector(ThreadingHTTPServer):
    """Takes traces by OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.spans: list[Any] = []
        self.paths: set[str] = set()

    def wait_for(self, name: str, count: int = 1) -> list[Any]:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            found = [span for span in tuple(self.spans) if span.name == name]
            if len(found) >= count:
                return found
            time.sleep(0.02)
        raise AssertionError(f"expected {count} spans named {name}, got {[span.name for span in self.spans]}")


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.add(self.path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[ServedProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        url = f"http://127.0.0.1:{collector.server_address[1]}"
        with fake_serving(otlp_traces_endpoint=url) as server:
            yield server


def attributes(span: Any) -> dict[str, Any]:
    values = {each.key: each.value for each in span.attributes}
    return {name: getattr(value, value.WhichOneof("value")) for name, value in values.items()}


def test_a_server_sends_a_span_with_phases_for_each_request(traced: ServedProcess, collector: Collector) -> None:
    body = {"messages": [{"role": "user", "content": MARK}], "max_tokens": 4, "temperature": 0.5, "stream": True}
    context = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    status, answer, _ = traced.post("/v1/chat/completions", body, context)
    assert (status, collector.wait_for("decode")[0].trace_id.hex()) == (200, TRACE)
    [root] = collector.wait_for("chat fake")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    children = {span.name for span in collector.spans if span.parent_span_id == root.span_id}
    assert children == {"queue", "prefill", "decode"}
    told = attributes(root)
    assert told["gen_ai.usage.output_tokens"] == 4
    assert told["gen_ai.response.id"].encode() in answer
    assert [each.string_value for each in told["gen_ai.response.finish_reasons"].values] == ["length"]
    assert told["sightline.request.id"] == "mine"
    assert told["server.port"] > 0
    assert not [span for span in collector.spans if MARK in str(span) or "0 1 2" in str(span)]
    assert collector.paths == {"/v1/traces"}


def test_refused_and_failed_requests_are_traced_and_routes_that_generate_nothing_are_not(
    traced: ServedProcess, collector: Collector
) -> None:
    assert traced.get("/health")[0] == 200
    assert traced.post("/v1/completions", {"prompt": 7})[0] == 400
    assert attributes(collector.wait_for("text_completion")[0])["error.type"] == "400"
    assert traced.post("/v1/completions", {"prompt": "a", "seed": FAILING, "max_tokens": 9})[0] == 500
    [failed] = collector.wait_for("text_completion fake")
    assert (attributes(failed)["error.type"], failed.status.code) == ("500", 2)
    assert not [span for span in collector.spans if "health" in str(span)]
    assert samples(traced)["trace_spans_dropped_total"] == 0


def test_a_server_whose_collector_is_gone_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with fake_serving(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as server:
        for _ in range(3):
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        deadline = time.monotonic() + 20
        while samples(server)["trace_spans_dropped_total"] < 4:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert server.stop() == 0
