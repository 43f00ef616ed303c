"""Counts, rates and percentiles add up."""

from __future__ import annotations

import pytest

from sightline.bench.serving.answers import ReportedUsage
from sightline.bench.serving.load import LoadResult, RequestOutcome
from sightline.bench.serving.report import LatencySpread, make_report, percentile
from support.serving_loads import record, sent


def test_percentiles_lie_between_ranks() -> None:
    values = [1.0, 2.0, 4.0, 8.0]
    assert [percentile(values, each) for each in (0, 25, 50, 90, 100)] == pytest.approx([1, 1.75, 3, 6.8, 8])
    assert percentile([5.0], 99) == 5
    assert LatencySpread.of([], ()) is None
    spread = LatencySpread.of([4.0, 1.0, 8.0, 2.0], (90.0, 99.9))
    assert spread is not None
    assert (spread.count, spread.mean, list(spread.percentiles)) == (4, 3.75, ["p50", "p90", "p99", "p99.9"])
    assert spread.percentiles["p90"] == pytest.approx(6.8)


def test_the_report_adds_up() -> None:
    records = (
        record(0),
        record(1, sent=0.0, ended=4.0, text_times=(1.0,), usage=ReportedUsage(20, 7, 0)),
        record(2, RequestOutcome.FAILED, usage=None, error="broken"),
        record(3, RequestOutcome.FAILED, usage=ReportedUsage(99, 99, 99), error="broken"),
        record(4, RequestOutcome.CUT, usage=None),
    )
    result = LoadResult(7, records, seconds=4.0, peak_concurrency=3, client_seconds=0.0011, stopped=True)
    report = make_report(sent(), result, [4] * 7, (90.0,))
    assert (report.completed, report.failed, report.cut, report.not_sent) == (2, 2, 1, 2)
    assert (report.prompt_tokens, report.output_tokens, report.cached_tokens, report.other_lengths) == (30, 11, 6, 1)
    assert report.requests_per_second == 0.5
    assert (report.output_tokens_per_second, report.total_tokens_per_second) == (11 / 4, 41 / 4)
    assert report.failures == ("broken (2 requests)",)
    assert report.ttft is not None
    assert (report.ttft.mean, report.ttft.percentiles["p50"]) == (0.75, 0.75)
    assert report.tpot is not None
    assert report.tpot.mean == pytest.approx((1.5 / 3 + 3.0 / 6) / 2)
    assert report.itl is not None
    assert report.itl.count == 2
    assert report.itl.mean == pytest.approx(0.65)
    assert report.latency is not None
    assert [report.latency.mean, report.latency.percentiles["p90"]] == pytest.approx([3.0, 3.8])
    assert report.client_seconds_per_chunk == pytest.approx(0.0011 / 13)
    assert report.exit_code == 1
    told = "\n".join(report.lines())
    assert "INTERRUPTED: 1 requests were cut, 2 were not sent" in told
    assert "| time to first token (TTFT), ms | 2 | 750.00 | 750.00 | 950.00 | 995.00 |" in " ".join(told.split())


def test_a_report_of_nothing_says_so() -> None:
    result = LoadResult(1, (record(0, RequestOutcome.REFUSED, refusals=(429,)),), 1.0, 1, 0.1, stopped=False)
    report = make_report(sent(), result, [4], ())
    assert "no request completed: there are no latencies to report" in report.lines()
    assert report.exit_code == 0
