"""The report of a load: counts, throughput, and latencies as means and percentiles.

Does not know how requests were sent.
"""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sightline.bench.serving.load import LoadResult, RequestOutcome, RequestRecord
from sightline.bench.serving.work import Arrivals
from sightline.bench.tables import markdown_table
from sightline.core.errors import ConfigError
from sightline.version import __version__

ALWAYS = (50.0, 99.0)
"""Percentiles that are always reported."""
SHOWN_FAILURES = 5
BUSY = 0.5
"""Share of a core above which the client itself may be the bottleneck."""


@dataclass(frozen=True)
class LatencySpread:
    """How a set of times is distributed, in seconds."""

    count: int
    mean: float
    percentiles: Mapping[str, float]
    """By name, such as p50 and p99.9."""

    @staticmethod
    def of(seconds: Sequence[float], percentiles: Sequence[float]) -> LatencySpread | None:
        """Returns None if nothing was timed."""
        if not seconds:
            return None
        ordered = sorted(seconds)
        named = {f"p{each:g}": percentile(ordered, each) for each in sorted({*ALWAYS, *percentiles})}
        return LatencySpread(len(ordered), math.fsum(ordered) / len(ordered), named)

    def row(self, name: str) -> list[str]:
        """The cells of a table row, in milliseconds."""
        return [name, str(self.count), *(f"{value * 1e3:.2f}" for value in (self.mean, *self.percentiles.values()))]


@dataclass(frozen=True)
class Sent:
    """The load, as it was sent."""

    server: str
    endpoint: str
    model: str
    dataset: str
    """Contents and lengths of the prompts."""
    arrivals: Arrivals
    sampling: Mapping[str, object]
    """Sampling fields of the first request."""
    num_prompts: int
    num_warmups: int
    timeout_seconds: float
    refused_are_retried: bool
    check: str
    """Result of the check before the measurement."""

    def lines(self) -> list[str]:
        sampling = ", ".join(f"{name} {value}" for name, value in self.sampling.items())
        refused = "sent again after Retry-After" if self.refused_are_retried else "counted"
        return [
            f"{self.server}{self.endpoint}, model {self.model}; client: sightline {__version__}, Python "
            f"{platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            f"{self.num_prompts} prompts, {self.arrivals}, after {self.num_warmups} warm-up requests. {self.dataset}",
            f"sampling as sent: {sampling}; streamed with usage; timeout {self.timeout_seconds:g} s; refused requests "
            f"are {refused}",
            f"check: {self.check}",
        ]


@dataclass(frozen=True)
class ServingReport:
    """A whole run. Token counts are of completed requests, as the server reports them."""

    sent: Sent
    interrupted: bool
    completed: int
    refused: Mapping[str, int]
    """Refused requests by status."""
    refusals_retried: Mapping[str, int]
    """Refusals by status after which the request was sent again."""
    failed: int
    failures: tuple[str, ...]
    """The first few different reasons, with the number of requests of each."""
    cut: int
    """Requests that were running when the run was interrupted."""
    not_sent: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int | None
    """Cached prompt tokens; None if the server does not report them."""
    output_tokens: int
    other_lengths: int
    """Completed requests whose answer does not have the requested length."""
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    peak_concurrency: int
    ttft: LatencySpread | None
    tpot: LatencySpread | None
    itl: LatencySpread | None
    latency: LatencySpread | None
    late: LatencySpread | None
    """How late requests were sent; None with a concurrency limit, where they wait for each other."""
    client_share: float
    """Share of one core that this client used."""
    client_seconds_per_chunk: float | None

    @property
    def exit_code(self) -> int:
        """1 if a request failed, 130 if Ctrl-C ended the run, otherwise 0. Refusals are not failures."""
        return 1 if self.failed else 130 if self.interrupted else 0

    def lines(self) -> list[str]:
        """The report as text."""
        return [
            *self.sent.lines(),
            "",
            *self._count_lines(),
            f"{self.requests_per_second:.2f} requests/s, {self.output_tokens_per_second:.1f} output tokens/s, "
            f"{self.total_tokens_per_second:.1f} tokens/s including prompts, over {self.seconds:.2f} s; at most "
            f"{self.peak_concurrency} requests at once",
            f"{self.prompt_tokens} prompt tokens, {_cached(self.cached_tokens)}; {self.output_tokens} output tokens"
            + (f"; {self.other_lengths} answers do not have the requested length" if self.other_lengths else ""),
            "",
            *self._table(),
            "",
            self._client_line(),
        ]

    def _count_lines(self) -> list[str]:
        counts = [f"completed {self.completed}", f"refused {_by_status(self.refused)}", f"failed {self.failed}"]
        if self.refusals_retried:
            counts.append(f"sent again after refusals {_by_status(self.refusals_retried)}")
        lines = [", ".join(counts), *(f"  failed: {reason}" for reason in self.failures)]
        if self.interrupted:
            lines.insert(0, f"INTERRUPTED: {self.cut} requests were cut, {self.not_sent} were not sent")
        return lines

    def _table(self) -> list[str]:
        spreads = {
            "time to first token (TTFT), ms": self.ttft,
            "time per output token (TPOT), ms": self.tpot,
            "between chunks of text (ITL), ms": self.itl,
            "end to end, ms": self.latency,
            "lateness of sending, all requests, ms": self.late,
        }
        rows = [spread.row(name) for name, spread in spreads.items() if spread is not None]
        if self.latency is None or not rows:
            return ["no request completed: there are no latencies to report"]
        return markdown_table(" | ".join(["completed requests", "count", "mean", *self.latency.percentiles]), rows)

    def _client_line(self) -> str:
        per_chunk = self.client_seconds_per_chunk
        each = "" if per_chunk is None else f", {per_chunk * 1e6:.0f} µs per chunk"
        busy = ": it may be the bottleneck, use another machine or fewer requests" if self.client_share > BUSY else ""
        return f"this client used {self.client_share:.0%} of a core{each}{busy}"


def percentile(ordered: Sequence[float], wanted: float) -> float:
    """Percentile of sorted values, interpolated linearly."""
    rank = wanted / 100 * (len(ordered) - 1)
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def check_percentiles(percentiles: Sequence[float]) -> None:
    """Raises if one is not between 0 and 100."""
    for each in percentiles:
        if not 0 <= each <= 100:
            raise ConfigError(f"expected percentiles between 0 and 100, got {each:g}")


def make_report(
    sent: Sent, result: LoadResult, max_tokens: Sequence[int], percentiles: Sequence[float]
) -> ServingReport:
    """Builds the report. `max_tokens` has the requested length of every answer."""
    completed, failed = result.with_outcome(RequestOutcome.COMPLETED), result.with_outcome(RequestOutcome.FAILED)
    usages = [(record.index, record.usage) for record in completed if record.usage is not None]
    prompt_tokens = sum(usage.prompt_tokens for _, usage in usages)
    output_tokens = sum(usage.output_tokens for _, usage in usages)
    cached = [usage.cached_tokens for _, usage in usages if usage.cached_tokens is not None]
    chunks = sum(len(record.text_times) for record in result.records)
    seconds = result.seconds or math.inf
    return ServingReport(
        sent=sent,
        interrupted=result.stopped,
        completed=len(completed),
        refused=_statuses([record.refusals[-1] for record in result.with_outcome(RequestOutcome.REFUSED)]),
        refusals_retried=_statuses([status for record in result.records for status in _retried(record)]),
        failed=len(failed),
        failures=_reasons(failed),
        cut=len(result.with_outcome(RequestOutcome.CUT)),
        not_sent=result.num_asked - len(result.records),
        seconds=result.seconds,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(cached) if cached else None,
        output_tokens=output_tokens,
        other_lengths=sum(usage.output_tokens != max_tokens[index] for index, usage in usages),
        requests_per_second=len(completed) / seconds,
        output_tokens_per_second=output_tokens / seconds,
        total_tokens_per_second=(prompt_tokens + output_tokens) / seconds,
        peak_concurrency=result.peak_concurrency,
        **_spreads(sent, result, percentiles),
        client_share=result.client_seconds / seconds,
        client_seconds_per_chunk=result.client_seconds / chunks if chunks else None,
    )


def _spreads(sent: Sent, result: LoadResult, percentiles: Sequence[float]) -> dict[str, LatencySpread | None]:
    completed = result.with_outcome(RequestOutcome.COMPLETED)
    firsts = [record.ttft for record in completed if record.ttft is not None]
    rates = [record.tpot for record in completed if record.tpot is not None]
    gaps = [gap for record in completed for gap in record.gaps]
    latencies = [record.latency for record in completed]
    late = [] if sent.arrivals.max_concurrency else [record.sent - record.due for record in result.records]
    timed = {"ttft": firsts, "tpot": rates, "itl": gaps, "latency": latencies, "late": late}
    return {name: LatencySpread.of(seconds, percentiles) for name, seconds in timed.items()}


def _retried(record: RequestRecord) -> tuple[int, ...]:
    return record.refusals[:-1] if record.outcome is RequestOutcome.REFUSED else record.refusals


def _statuses(found: Sequence[int]) -> dict[str, int]:
    return {str(status): count for status, count in sorted(Counter(found).items())}


def _reasons(failed: Sequence[RequestRecord]) -> tuple[str, ...]:
    reasons = Counter(record.error or "no reason" for record in failed)
    lines = [f"{reason} ({count} requests)" if count > 1 else reason for reason, count in reasons.items()]
    more = len(lines) - SHOWN_FAILURES
    return (*lines[:SHOWN_FAILURES], *([f"and {more} more reasons"] if more > 0 else []))


def _by_status(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return f"{total} ({', '.join(f'{count} with {status}' for status, count in counts.items())})" if total else "0"


def _cached(count: int | None) -> str:
    return "cached ones not reported by the server" if count is None else f"{count} of them cached"
