"""Loads on a stub server, and records and reports made by hand."""

from __future__ import annotations

import asyncio
from typing import Any

from sightline.bench.serving.answers import ReportedUsage
from sightline.bench.serving.http_stream import Address, Client
from sightline.bench.serving.load import LoadResult, RequestOutcome, RequestRecord, run_load
from sightline.bench.serving.report import Sent
from sightline.bench.serving.work import Arrivals, Ask
from support.stub_completions import Scripted, StubServer, stub_server


def load(server: StubServer, count: int, **settings: Any) -> LoadResult:
    asks = [Ask((number, 7, 7), 3) for number in range(count)]
    return asyncio.run(run_load(Client(Address.parse(server.url)), asks, model="stub", **settings))


def one(script: Scripted, **settings: Any) -> RequestRecord:
    with stub_server(script) as server:
        [record] = load(server, 1, **settings).records
    return record


def sent(**changes: Any) -> Sent:
    usual = {"server": "http://x", "endpoint": "/v1/completions", "model": "m", "dataset": "d", "arrivals": Arrivals()}
    more = {"sampling": {}, "num_prompts": 2, "num_warmups": 0, "timeout_seconds": 1.0, "refused_are_retried": False}
    return Sent(**{**usual, **more, "check": "c", **changes})


def record(index: int, outcome: RequestOutcome = RequestOutcome.COMPLETED, **changes: Any) -> RequestRecord:
    usual = {"status": 200, "due": 0.0, "sent": 1.0, "ended": 3.0, "text": "ab", "text_times": (1.5, 2.0, 2.8)}
    more = {
        "usage": ReportedUsage(10, 4, 6),
        "finish_reason": "length",
        "response_id": None,
        "refusals": (),
        "error": None,
    }
    return RequestRecord(index=index, outcome=outcome, **{**usual, **more, **changes})
