"""What is told of a load: counts, throughput, and latencies as means and percentiles.

Owns the arithmetic and the text. Does not know how anything was sent.
"""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sightline.bench.serving.load import LoadResult, Outcome, Record
from sightline.bench.serving.work import Arrivals
from sightline.core.errors import ConfigError
from sightline.version import __version__

ALWAYS = (50.0, 99.0)
"""Percentiles that are told whether or not they are asked for."""
SHOWN_FAILURES = 5
BUSY = 0.5
"""Share of a core from which on the client itself may be what is slow."""


@dataclass(frozen=True)
class LatencySpread:
    """Of times, in seconds."""

    count: int
    mean: float
    percentiles: Mapping[str, float]
    """By names such as p50 and p99.9."""

    @staticmethod
    def of(seconds: Sequence[float], percentiles: Sequence[float]) -> LatencySpread | None:
        """None where nothing was timed."""
        if not seconds:
            return None
        ordered = sorted(seconds)
        told = sorted({*ALWAYS, *percentiles})
        return LatencySpread(
            len(ordered), math.fsum(ordered) / len(ordered), {f"p{each:g}": percentile(ordered, each) for each in told}
        )

    def row(self, name: str) -> str:
        """As a line of the table, in milliseconds."""
        cells = (f"{value * 1e3:.2f}" for value in (self.mean, *self.percentiles.values()))
        return f"| {name} | {self.count} | {' | '.join(cells)} |"


@dataclass(frozen=True)
class Sent:
    """The load, as it was sent."""

    server: str
    endpoint: str
    model: str
    dataset: str
    """What prompts are made of, and their lengths."""
    arrivals: Arrivals
    sampling: Mapping[str, object]
    """Fields of the first request."""
    num_prompts: int
    num_warmups: int
    timeout_seconds: float
    refused_are_retried: bool
    check: str
    """What was found before anything was measured."""

    def lines(self) -> list[str]:
        sampling = ", ".join(f"{name} {value}" for name, value in self.sampling.items())
        refused = "sent again when the server says" if self.refused_are_retried else "counted"
        return [
            f"{self.server}{self.endpoint}, model {self.model}; client: sightline {__version__}, Python "
            f"{platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            f"{self.num_prompts} prompts, {self.arrivals}, after {self.num_warmups} to warm up. {self.dataset}",
            f"sampling as sent: {sampling}; streamed with usage; {self.timeout_seconds:g} s for each; refused requests "
            f"are {refused}",
            f"check: {self.check}",
        ]


@dataclass(frozen=True)
class ServingReport:
    """A whole run. Tokens are those of completed requests, as the server counts them."""

    sent: Sent
    interrupted: bool
    completed: int
    refused: Mapping[str, int]
    """By status: requests that ended so."""
    refusals_retried: Mapping[str, int]
    """By status: answers behind which a request was sent again."""
    failed: int
    failures: tuple[str, ...]
    """The first reasons, each once, with how many requests had it."""
    cut: int
    """Under way when the run was interrupted."""
    not_sent: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int | None
    """Of those; None where the server does not tell."""
    output_tokens: int
    other_lengths: int
    """Completed requests whose answer is not as long as was asked."""
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    peak_concurrency: int
    ttft: LatencySpread | None
    tpot: LatencySpread | None
    itl: LatencySpread | None
    latency: LatencySpread | None
    late: LatencySpread | None
    """How long after they were due requests were sent; None where they wait for each other."""
    client_share: float
    """Of one core, that this client took."""
    client_seconds_per_chunk: float | None

    @property
    def exit_code(self) -> int:
        """1 where a request failed, 130 where only Ctrl-C ended the run; refusals are no failure."""
        return 1 if self.failed else 130 if self.interrupted else 0

    def lines(self) -> list[str]:
        """The report as text."""
        return [
            *self.sent.lines(),
            "",
            *self._count_lines(),
            f"{self.requests_per_second:.2f} requests/s, {self.output_tokens_per_second:.1f} output tokens/s, "
            f"{self.total_tokens_per_second:.1f} tokens/s with the prompts', over {self.seconds:.2f} s; at most "
            f"{self.peak_concurrency} requests at once",
            f"{self.prompt_tokens} tokens of prompts, {_cached(self.cached_tokens)}; {self.output_tokens} of answers"
            + (f"; {self.other_lengths} answers are not as long as asked" if self.other_lengths else ""),
            "",
            *self._table(),
            "",
            self._client_line(),
        ]

    def _count_lines(self) -> list[str]:
        counts = [f"completed {self.completed}", f"refused {_by_status(self.refused)}", f"failed {self.failed}"]
        if self.refusals_retried:
            counts.append(f"sent again after refusals {_by_status(self.refusals_retried)}")
        told = [", ".join(counts), *(f"  failed: {reason}" for reason in self.failures)]
        if self.interrupted:
            told.insert(0, f"INTERRUPTED: {self.cut} requests were cut, {self.not_sent} were not sent")
        return told

    def _table(self) -> list[str]:
        spreads = {
            "time to first token (TTFT), ms": self.ttft,
            "time per output token (TPOT), ms": self.tpot,
            "between chunks of text (ITL), ms": self.itl,
            "end to end, ms": self.latency,
            "all requests: sent late by, ms": self.late,
        }
        rows = [spread.row(name) for name, spread in spreads.items() if spread is not None]
        if self.latency is None or not rows:
            return ["nothing completed: there are no times to tell"]
        names = ["of completed requests", "count", "mean", *self.latency.percentiles]
        return ["| " + " | ".join(names) + " |", "| " + " | ".join(["---"] * len(names)) + " |", *rows]

    def _client_line(self) -> str:
        each = (
            "" if self.client_seconds_per_chunk is None else f", {self.client_seconds_per_chunk * 1e6:.0f} µs a chunk"
        )
        busy = ": it may be what is slow, use another machine or fewer requests" if self.client_share > BUSY else ""
        return f"this client took {self.client_share:.0%} of a core{each}{busy}"


def percentile(ordered: Sequence[float], wanted: float) -> float:
    """Of values in order: the one at that rank, or between two in proportion."""
    rank = wanted / 100 * (len(ordered) - 1)
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def check_percentiles(percentiles: Sequence[float]) -> None:
    """Raises where one is none."""
    for each in percentiles:
        if not 0 <= each <= 100:
            raise ConfigError(f"expected percentiles between 0 and 100, got {each:g}")


def make_report(
    sent: Sent, result: LoadResult, max_tokens: Sequence[int], percentiles: Sequence[float]
) -> ServingReport:
    """`max_tokens` of each request that was to be sent."""
    completed, failed = result.with_outcome(Outcome.COMPLETED), result.with_outcome(Outcome.FAILED)
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
        refused=_statuses([record.refusals[-1] for record in result.with_outcome(Outcome.REFUSED)]),
        refusals_retried=_statuses([status for record in result.records for status in _retried(record)]),
        failed=len(failed),
        failures=_reasons(failed),
        cut=len(result.with_outcome(Outcome.CUT)),
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
        **_spreads(completed, percentiles),
        late=_lateness(sent.arrivals, result.records, percentiles),
        client_share=result.client_seconds / seconds,
        client_seconds_per_chunk=result.client_seconds / chunks if chunks else None,
    )


def _spreads(completed: Sequence[Record], percentiles: Sequence[float]) -> dict[str, LatencySpread | None]:
    firsts = [record.ttft for record in completed if record.ttft is not None]
    rates = [record.tpot for record in completed if record.tpot is not None]
    gaps = [gap for record in completed for gap in record.gaps]
    latencies = [record.latency for record in completed]
    timed = {"ttft": firsts, "tpot": rates, "itl": gaps, "latency": latencies}
    return {name: LatencySpread.of(seconds, percentiles) for name, seconds in timed.items()}


def _lateness(arrivals: Arrivals, records: Sequence[Record], percentiles: Sequence[float]) -> LatencySpread | None:
    if arrivals.max_concurrency is not None:
        return None
    return LatencySpread.of([record.sent - record.due for record in records], percentiles)


def _retried(record: Record) -> tuple[int, ...]:
    return record.refusals[:-1] if record.outcome is Outcome.REFUSED else record.refusals


def _statuses(found: Sequence[int]) -> dict[str, int]:
    return {str(status): count for status, count in sorted(Counter(found).items())}


def _reasons(failed: Sequence[Record]) -> tuple[str, ...]:
    reasons = Counter(record.error or "no reason" for record in failed)
    told = [f"{reason} ({count} requests)" if count > 1 else reason for reason, count in reasons.items()]
    more = len(told) - SHOWN_FAILURES
    return (*told[:SHOWN_FAILURES], *([f"and {more} more reasons"] if more > 0 else []))


def _by_status(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return f"{total} ({', '.join(f'{count} with {status}' for status, count in counts.items())})" if total else "0"


def _cached(count: int | None) -> str:
    return "of which the server does not tell how many were cached" if count is None else f"{count} of them cached"
