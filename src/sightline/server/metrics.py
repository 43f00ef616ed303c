"""Metrics of the service in Prometheus's format.

Labels come from closed sets: routes of the table, finish reasons, status codes, and the model's name on every series.
Nothing that a client sends becomes a label. Counts go on when the engine process restarts: those of all engine
processes are added up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import accumulate, zip_longest

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from sightline.core.ledger import Ledger
from sightline.core.metrics import STEP_TOKEN_BOUNDS, EngineMetrics, PhaseSeconds
from sightline.core.request import FinishReason
from sightline.server.process.port import Answers, RequestReport
from sightline.server.process.protocol import Accepted, Delta, Ended, read_sampling
from sightline.server.process.timing import TokenTimes

PREFIX = "sightline_"
MODEL_LABEL = "model_name"
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 1_000_000)
_CHOICES = (1, 2, 5, 10, 20)
_ADDED_UP = (
    ("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache."),
    ("prefix_cache_hits", "Prompt tokens that were found in the prefix cache."),
    ("num_preemptions", "Times that a running sequence gave its pages back."),
    ("steps", "Forward passes."),
    ("steps_over_limit", "Steps with rows that generate that took longer than max_step_ms."),
    ("steps_cut", "Steps that raised, and were run again in parts."),
    ("steps_uncaptured", "Steps that ran eagerly because their plan did not fit their captured graph."),
    ("spec_decode_num_drafts", "Rows of steps with guessed tokens."),
    ("spec_decode_num_draft_tokens", "Tokens that were guessed."),
    ("spec_decode_num_accepted_tokens", "Guessed tokens that were right."),
    ("host_cache_offloads", "Pages that left the cache for host memory."),
    ("host_cache_returns", "Pages that came back from host memory."),
    ("host_cache_failures", "Pages that could not be copied to host memory or back."),
    ("hisparse_lookups", "Chosen entries of contexts in host memory."),
    ("hisparse_misses", "Chosen entries that were not hot, and were copied from host memory."),
    ("plans_rebuilt", "Plans that were made again because the state that they were derived from had changed."),
)
_STATES = (
    ("num_requests_running", "Sequences that are running."),
    ("num_requests_waiting", "Sequences that are waiting."),
    ("num_requests_paused", "Sequences that are paused because their clients read too slowly."),
    ("kv_cache_usage_perc", "Share of the cache's pages that running sequences hold, 0 to 1."),
    ("state_checkpoints", "Recurrent states that are kept for sequences that begin alike."),
    ("host_cache_blocks", "Pages that host memory holds."),
    ("host_cache_usage_perc", "Share of the host cache that holds pages, 0 to 1."),
    ("host_cache_bytes", "Host memory that the host cache takes."),
    ("hisparse_host_bytes", "Host memory that entries take."),
    ("hisparse_device_bytes", "Device memory that hot entries take."),
)
_SUMS = ("plans", "plan_seconds", "step_seconds", "iteration_tokens_sum", "prefix_cache_host_hits")
disable_created_metrics()  # type: ignore[no-untyped-call]


class ServiceMetrics:
    """Counts requests, tokens and latencies."""

    def __init__(self, ledger: Ledger) -> None:
        """`ledger` is the front end's; its degradations are counted with the engine's."""
        self.registry = CollectorRegistry()
        """All metrics, without the model's name."""
        self.engine = EngineTotals(ledger)
        self.registry.register(self.engine)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens that were generated.")
        self._success = self._counter("request_success", "Continuations that ended.", "finished_reason")
        self._first = self._seconds("time_to_first_token", "From a request's arrival to its first token.")
        self._between = self._seconds("inter_token_latency", "Between a continuation's tokens.")
        self._per_token = self._seconds(
            "request_time_per_output_token", "Mean time between the tokens of a continuation that ended."
        )
        self._end_to_end = self._seconds("e2e_request_latency", "From a request's arrival to its end.")
        self._queue = self._seconds("request_queue_time", "From a request's submission to its first step.")
        self._prefill = self._seconds("request_prefill_time", "From a request's first step to its first token.")
        self._decode = self._seconds("request_decode_time", "From a request's first token to its end.")
        self._inference = self._seconds("request_inference_time", "From a request's first step to its end.")
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a request that ended.")
        self._answer_length = self._histogram("request_generation_tokens", "Tokens of a continuation that ended.")
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest continuation of a request that ended."
        )
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens of accepted requests.")
        self._n = self._histogram("request_params_n", "n of accepted requests.", _CHOICES)
        self._http = self._counter("http_requests", "Answers.", "route", "status")
        self._disconnects = self._counter("client_disconnects", "Requests whose client went away.")
        self._slow_clients = self._counter("slow_clients_cut", "Connections that were aborted: too little was read.")
        self._starts = self._counter("engine_starts", "Starts of the engine process.")
        self._spans = self._counter("trace_spans_dropped", "Spans of traces that could not be sent.")
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

    def slow_client_cut(self) -> None:
        self._slow_clients.inc()

    def disconnected(self) -> None:
        self._disconnects.inc()

    def spans_dropped(self, count: int) -> None:
        """Any thread may call it."""
        self._spans.inc(count)

    def observe(self, report: RequestReport, answers: Answers, now: float) -> None:
        """Counts a report that is being passed on to its client."""
        match report:
            case Delta(number, index, num_tokens=num_tokens, finish_reason=reason):
                continuations = answers.token_times[number]
                if num_tokens:
                    self._take_tokens(continuations, index, num_tokens, answers.received_at, now)
                if reason is not None:
                    self._success.labels(reason).inc()
                    self._take_continuation(continuations.get(index))
            case Ended(number, phases=phases):
                self._end_to_end.observe(now - answers.received_at)
                self._take_phases(phases)
                self._prompt_length.observe(answers.prompt_lens[number])
                continuations = answers.token_times.pop(number)
                if continuations:
                    self._longest.observe(max([each.num_tokens for each in continuations.values()]))
            case Accepted(number, sampling):
                self._prompt_tokens.inc(answers.prompt_lens[number])
                self._take_sampling(sampling)
            case _:
                pass

    async def text(self, model: str) -> bytes:
        """All metrics of the model with this name. Lets the event loop do other work after each family."""
        written = []
        for family in self.registry.collect():
            registry = CollectorRegistry()
            registry.register(_Labelled(family, model))
            written.append(generate_latest(registry))
            await asyncio.sleep(0)
        return b"".join(written)

    def _take_tokens(
        self, continuations: dict[int, TokenTimes], index: int, count: int, received_at: float, now: float
    ) -> None:
        self._generation_tokens.inc(count)
        times = continuations.get(index)
        if times is None:
            self._first.observe(now - received_at)
            continuations[index] = TokenTimes(now, count)
        else:
            self._between.observe((now - times.last_at) / count)
            times.last_at = now
            times.num_tokens += count

    def _take_continuation(self, times: TokenTimes | None) -> None:
        self._answer_length.observe(0 if times is None else times.num_tokens)
        if times is not None and times.last_at > times.first_at:
            self._per_token.observe((times.last_at - times.first_at) / (times.num_tokens - 1))

    def _take_phases(self, phases: PhaseSeconds) -> None:
        self._queue.observe(phases.queue)
        if phases.prefill is not None:
            self._prefill.observe(phases.prefill)
            self._inference.observe(phases.prefill + (phases.decode or 0.0))
        if phases.decode is not None:
            self._decode.observe(phases.decode)

    def _take_sampling(self, sampling: bytes) -> None:
        asked = read_sampling(sampling)
        if asked.n is not None:
            self._n.observe(asked.n)
        if asked.max_tokens is not None:
            self._max_tokens.observe(asked.max_tokens)

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, told, labels, registry=self.registry)

    def _seconds(self, name: str, told: str) -> Histogram:
        return self._histogram(f"{name}_seconds", told, _SECONDS)

    def _histogram(self, name: str, told: str, buckets: tuple[float, ...] = _TOKENS) -> Histogram:
        return Histogram(PREFIX + name, told, buckets=buckets, registry=self.registry)


class EngineTotals:
    """The sum of the counts of all engine processes, and the state of the one that runs."""

    def __init__(self, ledger: Ledger) -> None:
        self.latest: EngineMetrics | None = None
        """The last report of the running engine process; None while there is none."""
        self._ledger = ledger
        self._before: dict[str, float] = {}
        """Totals of the processes before this one."""
        self._iterations_before = (0,) * (len(STEP_TOKEN_BOUNDS) + 1)
        self._accepted_before: tuple[int, ...] = ()

    def settle(self) -> None:
        """Adds the counts of a process that has ended to the totals, and drops its state."""
        self._before = {name: self._total(name) for name in (*dict(_ADDED_UP), *_SUMS)}
        self._iterations_before = self._iterations()
        self._accepted_before = self._accepted()
        self.latest = None

    def collect(self) -> Iterator[Metric]:
        for name, told in _ADDED_UP:
            yield CounterMetricFamily(PREFIX + name, told, value=self._total(name))
        for name, told in _STATES:
            yield GaugeMetricFamily(PREFIX + name, told, value=self._now(name))
        yield self._hits_by_tier()
        yield GaugeMetricFamily(
            PREFIX + "degradations",
            "Entries in the ledgers of degradations.",
            value=len(self._ledger.degradations) + self._now("degradations"),
        )
        yield SummaryMetricFamily(
            PREFIX + "step_seconds",
            "Time of a step, from its launch to its results.",
            count_value=int(self._total("steps")),
            sum_value=self._total("step_seconds"),
        )
        yield SummaryMetricFamily(
            PREFIX + "plan_seconds",
            "Time on the host to plan a step.",
            count_value=int(self._total("plans")),
            sum_value=self._total("plan_seconds"),
        )
        positions = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that were right, by their position behind the last known token.",
            labels=["position"],
        )
        # The first is there before anything is guessed, as all other series are.
        for position, count in enumerate(self._accepted() or (0,)):
            positions.add_metric([str(position)], count)
        yield positions
        bounds = [*map(str, map(float, STEP_TOKEN_BOUNDS)), "+Inf"]
        yield HistogramMetricFamily(
            PREFIX + "iteration_tokens",
            "Tokens of a step.",
            buckets=list(zip(bounds, accumulate(self._iterations()), strict=True)),
            sum_value=self._total("iteration_tokens_sum"),
        )

    def _hits_by_tier(self) -> CounterMetricFamily:
        """`prefix_cache_hits`, divided by where the tokens were."""
        hits = CounterMetricFamily(
            PREFIX + "prefix_cache_tier_hits",
            "Prompt tokens that were found in the prefix cache, by where their pages were.",
            labels=["tier"],
        )
        host = self._total("prefix_cache_host_hits")
        hits.add_metric(["device"], self._total("prefix_cache_hits") - host)
        hits.add_metric(["host"], host)
        return hits

    def _iterations(self) -> tuple[int, ...]:
        """Steps of all processes by their numbers of tokens."""
        if self.latest is None:
            return self._iterations_before
        return tuple(map(sum, zip(self._iterations_before, self.latest.iteration_tokens, strict=True)))

    def _accepted(self) -> tuple[int, ...]:
        """Right guesses of all processes by position."""
        latest = () if self.latest is None else self.latest.spec_decode_num_accepted_tokens_per_pos
        return tuple(map(sum, zip_longest(self._accepted_before, latest, fillvalue=0)))

    def _total(self, name: str) -> float:
        return self._before.get(name, 0.0) + self._now(name)

    def _now(self, name: str) -> float:
        if self.latest is None:
            return 0.0
        return float(getattr(self.latest, name))


class _Labelled:
    """One family of series, each labelled with the model's name, so that no counter has to know it."""

    def __init__(self, family: Metric, model: str) -> None:
        label = {MODEL_LABEL: model}
        family.samples = [each._replace(labels=label | each.labels) for each in family.samples]
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family
