"""Traces as OpenTelemetry spans, with the attributes of its semantic conventions for generative AI.

    chat MODEL ──────────────────────────────────────────
      queue ───── prefill ─────── decode ──────────────

A request's spans are made when it has ended, from times that were taken anyway, and are sent by a thread of the SDK.
They hold names, numbers and codes: no text of a prompt or an answer. Imported only if traces are sent: it needs the
extra `otel`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sightline.server.process.protocol import read_sampling
from sightline.server.process.timing import RequestTimes
from sightline.server.traces import TracedRequest
from sightline.version import __version__

logger = logging.getLogger("sightline.server")
MAX_SPANS = 2048
"""Spans that may wait to be sent; more are dropped and counted."""
CLOSE_SECONDS = 3.0
"""How long the last spans may take when the server ends."""


def otlp_exporter(endpoint: str) -> Any:
    """Sends spans by OTLP over HTTP. Headers and timeouts come from OpenTelemetry's environment variables."""
    return OTLPSpanExporter(endpoint=endpoint)


class OtlpTraces:
    """Makes spans of requests."""

    def __init__(self, exporter: Any, on_drop: Callable[[int], None]) -> None:
        """`exporter` is a `SpanExporter`. `on_drop` is called, by any thread, with the number of lost spans."""
        self._on_drop = on_drop
        self._outbox = Outbox(exporter, on_drop)
        resource = Resource({"service.name": "sightline", "service.version": __version__})
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._outbox, max_queue_size=MAX_SPANS))
        self._tracer = self._provider.get_tracer("sightline", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, request: TracedRequest) -> None:
        """Makes a request's spans and queues them."""
        try:
            self._record(request)
        except Exception as error:
            # The request is answered: whatever is wrong with its trace must not end its connection.
            logger.warning("a request could not be traced: %s", type(error).__name__)
            self._on_drop(1)

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _record(self, request: TracedRequest) -> None:
        to_wall_clock = time.time_ns() - time.monotonic_ns()

        def at(moment: float) -> int:
            return int(moment * 1e9) + to_wall_clock

        operation, model = request.route.operation, request.call.model
        root = self._tracer.start_span(
            f"{operation} {model}" if model else operation,
            context=self._propagator.extract(request.parent),
            kind=SpanKind.SERVER,
            attributes=_attributes(request),
            start_time=at(request.received_at),
        )
        if not root.is_recording():
            return
        phases = list(_phases(request.call.times))
        if not self._outbox.admit(1 + len(phases)):
            self._on_drop(1 + len(phases))
            return
        # A refusal is no failure of the server; an error behind a status of 200 is one.
        if request.status >= 500 or (request.status < 400 and "error" in request.facts):
            root.set_status(Status(StatusCode.ERROR))
        within = set_span_in_context(root)
        for name, began, ended in phases:
            self._tracer.start_span(name, context=within, start_time=at(began)).end(end_time=at(ended))
        root.end(end_time=at(request.ended_at))


def _attributes(request: TracedRequest) -> dict[str, Any]:
    """Attributes without a value are left out."""
    call, facts = request.call, request.facts
    asked = read_sampling(call.sampling)
    failed = str(facts.get("error") or request.status)
    told = {
        "gen_ai.operation.name": request.route.operation,
        "gen_ai.provider.name": "sightline",
        "gen_ai.request.model": call.model or None,
        "gen_ai.request.temperature": asked.temperature,
        "gen_ai.request.top_p": asked.top_p,
        "gen_ai.request.top_k": asked.top_k,
        "gen_ai.request.max_tokens": asked.max_tokens,
        "gen_ai.request.seed": asked.seed,
        "gen_ai.request.presence_penalty": asked.presence_penalty,
        "gen_ai.request.frequency_penalty": asked.frequency_penalty,
        "gen_ai.request.choice.count": asked.n,
        "gen_ai.response.model": call.model or None,
        "gen_ai.response.id": call.response_id or None,
        "gen_ai.response.finish_reasons": call.finish_reasons or None,
        "gen_ai.usage.input_tokens": facts.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": facts.get("completion_tokens"),
        "server.address": request.server[0],
        "server.port": request.server[1],
        "http.request.method": request.route.method,
        "http.route": request.route.path,
        "http.response.status_code": request.status,
        "error.type": failed if request.status >= 400 or "error" in facts else None,
        "sightline.request.id": request.request_id,
    }
    return {name: value for name, value in told.items() if value is not None}


class Outbox:
    """The spans that wait to be sent, in front of an exporter: so many, and no more.

    The SDK's own queue drops without telling how many.
    """

    def __init__(self, exporter: Any, on_drop: Callable[[int], None]) -> None:
        self._exporter = exporter
        self._on_drop = on_drop
        self._lock = threading.Lock()
        self._num_waiting = 0

    def admit(self, count: int) -> bool:
        """Counts spans that are about to be queued; returns False if there is no room for them."""
        with self._lock:
            if self._num_waiting + count > MAX_SPANS:
                return False
            self._num_waiting += count
            return True

    def export(self, spans: Sequence[Any]) -> Any:
        """Called by the SDK's thread."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            with self._lock:
                self._num_waiting -= len(spans)
            if result is not SpanExportResult.SUCCESS:
                self._on_drop(len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


def _phases(times: RequestTimes | None) -> Iterator[tuple[str, float, float]]:
    """The name, begin and end of each phase that the request went through."""
    if times is None or times.ended_at == times.submitted_at:
        return
    started = times.ended_at if times.started_at is None else times.started_at
    yield "queue", times.submitted_at, started
    if times.started_at is not None:
        first = times.ended_at if times.first_token_at is None else times.first_token_at
        yield "prefill", started, first
        if times.first_token_at is not None:
            yield "decode", first, times.ended_at
