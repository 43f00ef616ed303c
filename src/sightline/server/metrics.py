"""Metrics of the service in Prometheus's format.

Labels come from closed sets: routes of the table, finish reasons, status codes. Nothing that a client sends becomes a
label. Counts go on when the engine process restarts: those of all engine processes are added up.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from sightline.core.ledger import Ledger
from sightline.core.metrics import EngineMetrics
from sightline.core.request import FinishReason
from sightline.server.process.port import Answers, RequestReport
from sightline.server.process.protocol import Accepted, Delta, Ended

PREFIX = "sightline:"
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ADDED_UP = (
    ("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache."),
    ("prefix_cache_hits", "Prompt tokens that were found in the prefix cache."),
    ("num_preemptions", "Times that a running sequence gave its pages back."),
    ("steps", "Forward passes."),
    ("steps_cut", "Steps that raised, and were run again in parts."),
    ("plans_rebuilt", "Plans that were made again because the state that they were derived from had changed."),
)
_STATES = (
    ("num_requests_running", "Sequences that are running."),
    ("num_requests_waiting", "Sequences that are waiting."),
    ("kv_cache_usage_perc", "Share of the cache's pages that running sequences hold, 0 to 1."),
)
disable_created_metrics()  # type: ignore[no-untyped-call]


class ServiceMetrics:
    """Counts requests, tokens and latencies."""

    def __init__(self, ledger: Ledger) -> None:
        """`ledger` is the front end's; its degradations are counted with the engine's."""
        self.registry = CollectorRegistry()
        self.engine = EngineTotals(ledger)
        self.registry.register(self.engine)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens that were generated.")
        self._success = self._counter("request_success", "Continuations that ended.", "finished_reason")
        self._first = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self._between = self._histogram("inter_token_latency_seconds", "Between a continuation's tokens.")
        self._end_to_end = self._histogram("e2e_request_latency_seconds", "From a request's arrival to its end.")
        self._queue = self._histogram("request_queue_time_seconds", "From a request's submission to its first step.")
        self._http = self._counter("http_requests", "Answers.", "route", "status")
        self._disconnects = self._counter("client_disconnects", "Requests whose client went away.")
        self._starts = self._counter("engine_starts", "Starts of the engine process.")
        for reason in FinishReason:
            self._success.labels(str(reason))

    def took_in(self, metrics: EngineMetrics) -> None:
        """Takes in the latest counts of the engine process."""
        self.engine.latest = metrics

    def engine_started(self) -> None:
        self._starts.inc()

    def engine_lost(self) -> None:
        """Keeps the totals of the lost process: the next one counts from zero."""
        self.engine.settle()

    def answered(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def disconnected(self) -> None:
        self._disconnects.inc()

    def observe(self, report: RequestReport, answers: Answers, now: float) -> None:
        """Counts a report that is being passed on to its client."""
        match report:
            case Delta(number, index, num_tokens=num_tokens, finish_reason=reason):
                self._take_tokens(answers, (number, index), num_tokens, now)
                if reason is not None:
                    self._success.labels(reason).inc()
            case Ended(queue_seconds=seconds):
                self._queue.observe(seconds)
                self._end_to_end.observe(now - answers.received_at)
            case Accepted():
                self._prompt_tokens.inc(answers.prompt_lens[report.number])
            case _:
                pass

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _take_tokens(self, answers: Answers, continuation: tuple[int, int], count: int, now: float) -> None:
        if count == 0:
            return
        self._generation_tokens.inc(count)
        before = answers.last_at.get(continuation)
        if before is None:
            self._first.observe(now - answers.received_at)
        else:
            self._between.observe((now - before) / count)
        answers.last_at[continuation] = now

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, told, labels, registry=self.registry)

    def _histogram(self, name: str, told: str) -> Histogram:
        return Histogram(PREFIX + name, told, buckets=_SECONDS, registry=self.registry)


class EngineTotals:
    """The sum of the counts of all engine processes, and the state of the one that runs."""

    def __init__(self, ledger: Ledger) -> None:
        self.latest: EngineMetrics | None = None
        """The last report of the running engine process; None while there is none."""
        self._ledger = ledger
        self._before: dict[str, float] = {}
        """Totals of the processes before this one."""

    def settle(self) -> None:
        """Adds the counts of a process that has ended to the totals, and drops its state."""
        self._before = {name: self._total(name) for name in (*dict(_ADDED_UP), "plans", "plan_seconds")}
        self.latest = None

    def collect(self) -> Iterator[Metric]:
        for name, told in _ADDED_UP:
            yield CounterMetricFamily(PREFIX + name, told, value=self._total(name))
        for name, told in _STATES:
            yield GaugeMetricFamily(PREFIX + name, told, value=self._now(name))
        yield GaugeMetricFamily(
            PREFIX + "degradations",
            "Entries in the ledgers of degradations.",
            value=len(self._ledger.degradations) + self._now("degradations"),
        )
        yield SummaryMetricFamily(
            PREFIX + "plan_seconds",
            "Time on the host to plan a step.",
            count_value=int(self._total("plans")),
            sum_value=self._total("plan_seconds"),
        )

    def _total(self, name: str) -> float:
        return self._before.get(name, 0.0) + self._now(name)

    def _now(self, name: str) -> float:
        if self.latest is None:
            return 0.0
        return float(getattr(self.latest, name))
