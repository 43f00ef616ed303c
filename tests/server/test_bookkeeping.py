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
from sightline.core.metrics import STEP_TOKEN_BOUNDS, EngineMetrics, PhaseSeconds
from sightline.server.api.answers import HostCacheState
from sightline.server.api.events import CompletionChunks
from sightline.server.api.generation import take
from sightline.server.api.inspection import Inspection
from sightline.server.api.scores import usage
from sightline.server.desks.pool import DeskPool
from sightline.server.desks.protocol import Continuation, Generated, Head, Order, StreamShape, UsageEvents
from sightline.server.http.errors import ApiError
from sightline.server.http.limits import ByteBudget, Limits
from sightline.server.http.routing import Call
from sightline.server.metrics import ServiceMetrics
from sightline.server.process.port import Answers, AnswerTooLargeError, EnginePort
from sightline.server.process.protocol import Accepted, Delta, Ended, Opened, Progress
from sightline.server.service import Service
from support.commands import UNBOUNDED
from support.fake_engine import FAILING
from support.serving import fake_serving

QUESTION = [{"role": "user", "content": "count"}]


def engine_metrics(**known: Any) -> EngineMetrics:
    others: dict[str, Any] = dict.fromkeys(EngineMetrics.__dataclass_fields__, 0)
    tokens = (0,) * (len(STEP_TOKEN_BOUNDS) + 1)
    counted = {"request_success": {}, "iteration_tokens": tokens, "spec_decode_num_accepted_tokens_per_pos": ()}
    return EngineMetrics(**{**others, **counted, **known})


def service_metrics() -> ServiceMetrics:
    return ServiceMetrics(Ledger(strict=False))


def opened() -> Opened:
    return Opened("m", b"", 257, None, 256, 4, 4, {}, (), (), ())


def test_cached_tokens_of_several_prompts_add_up() -> None:
    outcome = Generated(10, 1, [Continuation(), Continuation()])
    for place, num_cached in enumerate((3, 4)):
        take(Ended(place + 1, None, num_cached, PhaseSeconds(0.0), None), place, outcome)
    assert usage(outcome).prompt_tokens_details.cached_tokens == 7


def test_a_client_that_goes_away_ends_its_request_in_the_engine() -> None:
    with fake_serving("delay=0.05", max_queued=1) as server:
        body = {"messages": QUESTION, "max_tokens": 240, "stream": True}
        with server.streaming("/v1/chat/completions", body) as response:
            while b'"content":"1 "' not in response.readline():
                pass
            assert b'num_requests_running{model_name="fake"} 1.0' in server.get("/metrics")[1]
        deadline = time.monotonic() + 3
        while b'num_requests_running{model_name="fake"} 0.0' not in server.get("/metrics")[1]:
            assert time.monotonic() < deadline


def test_a_request_goes_to_the_engine_on_its_callers_terms() -> None:
    terms: list[Any] = []

    class Port:
        def submit(self, prompts: object, params: object, given: object, *_: object) -> Any:
            terms.append(given)
            raise StopIteration

    desks, answers = DeskPool(1, shared=False, seconds=1.0), ByteBudget(100, shared=False)
    service = Service(Port(), desks, Future(), answers, Limits(), (), 7.0, Ledger(strict=False))  # type: ignore[arg-type]
    order = Order(1, "m", (b"",), b"", 1, b"")
    with pytest.raises(RuntimeError):  # StopIteration in a coroutine
        asyncio.run(service.start(Call(b"", "key-2", "id", "id", 0.0), order, ExitStack()))
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
    return metrics.registry.get_sample_value(f"sightline_{name}")


def test_latency_between_tokens_is_that_of_one() -> None:
    metrics, answers = service_metrics(), Answers({1: 3}, 0.0, UNBOUNDED, print)
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


def test_right_guesses_add_up_by_position() -> None:
    metrics = service_metrics()
    name = "sightline_spec_decode_num_accepted_tokens_per_pos_total"
    assert metrics.registry.get_sample_value(name, {"position": "0"}) == 0
    for accepted in ((5, 2), (3, 1, 1)):
        metrics.took_in(engine_metrics(spec_decode_num_accepted_tokens_per_pos=accepted))
        metrics.engine_lost()
    metrics.took_in(engine_metrics(spec_decode_num_accepted_tokens_per_pos=(1, 0, 0)))
    found = [metrics.registry.get_sample_value(name, {"position": str(each)}) for each in range(4)]
    assert found == [9, 3, 1, None]


def test_hits_are_counted_by_tier_and_add_up() -> None:
    metrics = service_metrics()
    for hits, from_host in ((10, 4), (5, 5)):
        metrics.took_in(engine_metrics(prefix_cache_hits=hits, prefix_cache_host_hits=from_host, host_cache_blocks=7))
        metrics.engine_lost()
    metrics.took_in(engine_metrics(prefix_cache_hits=2, host_cache_blocks=3, host_cache_returns=1))
    name = "sightline_prefix_cache_tier_hits_total"
    assert [metrics.registry.get_sample_value(name, {"tier": tier}) for tier in ("device", "host")] == [8, 9]
    assert sampled(metrics, "prefix_cache_hits_total") == 17
    assert (sampled(metrics, "host_cache_blocks"), sampled(metrics, "host_cache_returns_total")) == (3, 1)


def test_server_info_tells_how_full_the_host_tier_is() -> None:
    latest = engine_metrics(host_cache_bytes=64, host_cache_blocks=3, host_cache_usage_perc=0.5, host_cache_returns=2)
    metrics = service_metrics()
    inspection = Inspection.__new__(Inspection)
    inspection._metrics = metrics
    assert inspection._host_cache() is None
    metrics.took_in(engine_metrics())
    assert inspection._host_cache() is None, "an engine without a host cache has nothing to tell"
    metrics.took_in(latest)
    assert inspection._host_cache() == HostCacheState(64, 3, 0.5, 0, 2, 0, 0)


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


def test_bytes_come_back() -> None:
    budget = ByteBudget(10, shared=False)
    for _ in range(3):
        with budget.opened("") as held:
            assert held.take(6)
            assert not held.take(5), "refused, and not counted"
            held.give_back(2)
            assert held.take(5)
            assert budget.num_held == 9
    assert budget.num_held == 0


@pytest.mark.parametrize("shared", [False, True])
def test_small_requests_go_on_where_large_ones_take_all_the_room(shared: bool) -> None:
    budget = ByteBudget(100, shared=shared, always=10)
    with budget.opened("a") as large, budget.opened("a") as small:
        while large.take(1):
            pass
        assert large.count == 10 + (50 if shared else 100)
        for _ in range(3):
            assert small.take(6)
            assert small.take(4)
            assert not small.take(1)
            small.give_back(6)
            small.give_back(4)
        large.give_back(30)
        assert small.take(20)
        assert budget.num_held == large.count + small.count
    assert budget.num_held == 0


def test_a_prompt_without_a_text_of_its_own_moves_no_others_echo() -> None:
    shape = StreamShape(None, UsageEvents.NONE, ("", "b", "", "d"))
    events = CompletionChunks(Head("id", 1, "m"), shape, Generated(4, 2, [])).opening()
    assert [(event.choices[0].index, event.choices[0].text) for event in events] == [
        (2, "b"),
        (3, "b"),
        (6, "d"),
        (7, "d"),
    ]


class _Writer:
    """Takes commands, and keeps none."""

    transport = property(lambda self: self)

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, frame: bytes) -> None:
        del frame


def open_port() -> EnginePort:
    port = EnginePort(service_metrics())
    port._writer = _Writer()  # type: ignore[assignment]
    port._open.set()
    return port


def service_of(port: EnginePort, answers: ByteBudget) -> Service:
    desks = DeskPool(1, shared=False, seconds=1.0)
    return Service(port, desks, Future(), answers, Limits(), (), None, Ledger(strict=False))


def test_a_request_for_whose_first_report_there_is_no_room_is_told_to_come_again() -> None:
    async def start() -> None:
        port, answers = open_port(), ByteBudget(1000, shared=False)
        service, order = service_of(port, answers), Order(1, "m", (b"", b""), b"", 1, b"")
        with answers.opened("a") as held:
            assert held.take(900)
            starting = asyncio.ensure_future(service.start(Call(b"", "b", "id", "id", 0.0), order, ExitStack()))
            await asyncio.sleep(0)
            port._take(Accepted(1, b"{}"), 0.0)
            with pytest.raises(ApiError) as refused:
                await starting
        assert (refused.value.status, refused.value.retry_after) == (503, 2)
        assert (answers.num_held, port.num_under_way) == (0, 0)

    asyncio.run(start())


def test_a_whole_answer_counts_with_what_is_kept_of_it() -> None:
    """Every token counted as a report until the end: 64 answers of 4,000 tokens filled 64 MiB with 1 MB of text."""

    async def collect() -> None:
        port, answers = open_port(), ByteBudget(1 << 20, shared=False)
        service, held = service_of(port, answers), ExitStack()
        with held:
            reports = service.submit(Call(b"", "", "id", "id", 0.0), Order(1, "m", (b"",), b"", 1, b""), held).reports()
            for _ in range(20_000):
                port._take(Delta(1, 0, "four", 1, None), 0.0)
                assert isinstance((await anext(reports))[1], Delta)
            assert answers.num_held < 20_000 * 10
            port._take(Delta(1, 0, "x" * (1 << 20), 1, None), 0.0)
            with pytest.raises(AnswerTooLargeError):
                await anext(reports)
        assert answers.num_held == 0

    asyncio.run(collect())


def test_degradations_of_the_front_end_are_counted() -> None:
    with fake_serving(host="0.0.0.0") as server:
        assert b'sightline_degradations{model_name="fake"} 1.0' in server.get("/metrics")[1]


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
