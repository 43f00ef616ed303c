"""What the front end adds up and hands on: tokens, terms, latencies, bytes, degradations."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest

from sightline.core.ledger import Ledger
from sightline.core.metrics import EngineMetrics
from sightline.core.request import SamplingParams
from sightline.server.api.generation import Continuation, GenerationOutcome, _take
from sightline.server.desk import TextDesk
from sightline.server.http.limits import BodyBudget, Limits
from sightline.server.http.routing import Call
from sightline.server.metrics import ServiceMetrics
from sightline.server.process.port import Answers, EnginePort
from sightline.server.process.protocol import Delta, Ended, Opened, Progress
from sightline.server.service import Service
from support.fake_engine import FAILING, tokenizer_data
from support.serving import fake_serving

QUESTION = [{"role": "user", "content": "count"}]


def engine_metrics(**known: float) -> EngineMetrics:
    names = EngineMetrics.__dataclass_fields__
    return EngineMetrics(**{name: known.get(name, {} if name == "request_success" else 0) for name in names})  # type: ignore[arg-type]


def service_metrics() -> ServiceMetrics:
    return ServiceMetrics(Ledger(strict=False))


def opened() -> Opened:
    return Opened("m", tokenizer_data(), 257, None, 256, 4, 4, {}, (), (), ())


def test_cached_tokens_of_several_prompts_add_up() -> None:
    outcome = GenerationOutcome(10, 1, [Continuation(), Continuation()])
    for place, num_cached in enumerate((3, 4)):
        _take(Ended(place + 1, None, num_cached, 0.0, None), place, outcome)
    assert outcome.usage().prompt_tokens_details.cached_tokens == 7


def test_a_client_that_goes_away_ends_its_request_in_the_engine() -> None:
    with fake_serving("delay=0.05", max_queued=1) as server:
        body = {"messages": QUESTION, "max_tokens": 240, "stream": True}
        with server.streaming("/v1/chat/completions", body) as response:
            while b'"content":"1 "' not in response.readline():
                pass
            assert b"num_requests_running 1.0" in server.get("/metrics")[1]
        deadline = time.monotonic() + 3
        while b"num_requests_running 0.0" not in server.get("/metrics")[1]:
            assert time.monotonic() < deadline


def test_a_request_goes_to_the_engine_on_its_callers_terms() -> None:
    terms: list[Any] = []

    class Port:
        def submit(self, prompts: object, params: object, given: object, received_at: float) -> Any:
            terms.append(given)
            raise StopIteration

    service = Service(Port(), Future(), Limits(), (), 7.0, Ledger(strict=False))  # type: ignore[arg-type]
    call = Call(None, "key-2", "id", 0.0)
    with pytest.raises(RuntimeError):  # StopIteration in a coroutine
        asyncio.run(service.start(call, [[1]], SamplingParams(), ExitStack()))
    assert [(each.caller, each.timeout) for each in terms] == [("key-2", 7.0)]


def test_the_next_engine_process_counts_its_steps_from_the_beginning() -> None:
    port = EnginePort(service_metrics())
    port._take(opened(), 1.0)
    port._take(Progress(engine_metrics(steps=5)), 2.0)
    port._lose()
    port._take(opened(), 3.0)
    port._take(Progress(engine_metrics(steps=1)), 4.0)
    assert port.heard_at == 4.0


def sampled(metrics: ServiceMetrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(f"sightline:{name}")


def test_latency_between_tokens_is_that_of_one() -> None:
    metrics, answers = service_metrics(), Answers({1: 3}, 0.0)
    metrics.observe(Delta(1, 0, "a", 1, None), answers, 1.0)
    metrics.observe(Delta(1, 0, "bc", 2, None), answers, 2.0)
    assert sampled(metrics, "inter_token_latency_seconds_sum") == 0.5


def test_what_engine_processes_did_adds_up_and_what_they_were_doing_does_not() -> None:
    metrics = service_metrics()
    for steps in (5, 2):
        metrics.took_in(engine_metrics(steps=steps, num_requests_running=3))
        metrics.engine_lost()
    assert sampled(metrics, "steps_total") == 7
    assert sampled(metrics, "num_requests_running") == 0


def test_no_done_follows_an_error() -> None:
    body = {"messages": QUESTION, "seed": FAILING, "max_tokens": 9, "stream": True}
    with fake_serving() as server, server.streaming("/v1/chat/completions", body) as response:
        events = [line.decode().strip().removeprefix("data: ") for line in response if line.strip()]
    assert "error" in json.loads(events[-1])
    assert "[DONE]" not in events


def test_streamed_echoes_stand_with_their_own_continuations() -> None:
    body = {"prompt": ["a", "bb"], "n": 2, "max_tokens": 1, "echo": True, "stream": True}
    with fake_serving() as server, server.streaming("/v1/completions", body) as response:
        events = [json.loads(line.decode()[6:]) for line in response if line.startswith(b"data: {")]
    texts = dict.fromkeys(range(4), "")
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == ["a0 ", "a0 ", "bb0 ", "bb0 "]


def test_a_caller_has_one_text_at_a_time_on_the_thread() -> None:
    async def run() -> list[str]:
        desk, order = TextDesk(tokenizer_data(), 256), []

        async def work(caller: str, seconds: float) -> None:
            await desk._run(caller, lambda: (time.sleep(seconds), order.append(caller)))  # type: ignore[func-returns-value]

        many = [asyncio.ensure_future(work("many", 0.05)) for _ in range(4)]
        await asyncio.sleep(0.01)
        await asyncio.gather(work("one", 0.0), *many)
        return order

    assert asyncio.run(run()).index("one") <= 1


def test_bytes_of_bodies_come_back() -> None:
    budget = BodyBudget(10, shared=False)
    for _ in range(3):
        with budget.held("") as take:
            take(8)


def test_degradations_of_the_front_end_are_counted() -> None:
    with fake_serving(host="0.0.0.0") as server:
        assert b"sightline:degradations 1.0" in server.get("/metrics")[1]


def test_an_engine_process_that_worked_is_followed_at_once() -> None:
    import os
    import signal

    with fake_serving(ready_seconds=0.0) as server:
        for start in range(2, 7):
            assert server.get("/ready")[0] == 200
            os.kill(server.engine_pid, signal.SIGKILL)
            server.wait_for("engine process started", lambda event, start=start: event["start"] == start)  # type: ignore[misc]
            deadline = time.monotonic() + 10
            while server.get("/ready")[0] != 200:
                assert time.monotonic() < deadline
        pauses = [event["next_start_in"] for event in server.events if event["message"] == "engine process lost"]
        assert set(pauses) == {0.1}
