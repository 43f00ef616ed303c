"""A server under load: many clients, too many clients, an engine that is killed, an end that comes at any moment.

Short forms run always. `pytest -m slow -s tests/server/test_load.py` runs the long ones, and tells what they measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from threading import Thread

import pytest

from sightline.bench.serving.http_stream import Address, Client
from sightline.bench.serving.load import LoadResult, RequestOutcome, RequestRecord, run_load
from sightline.bench.serving.work import Arrivals, Ask, Sampling
from support.serving import ONE_THREAD, ServedProcess, fake_serving, serving

VOCAB_SIZE = 49_152
ALL_THREADS = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
_OFFLINE = """
import json, sys, time
from sightline import LLM, SamplingParams
prompts, length = json.load(sys.stdin)
llm = LLM(cache_tokens=32768)
params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
llm.generate({"prompt_token_ids": prompts[0]}, params, use_tqdm=False)
started = time.perf_counter()
outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "texts": [output.outputs[0].text for output in outputs]}))
"""


def random_asks(count: int, prompt_len: int, answer_len: int, seed: int) -> list[Ask]:
    random = Random(seed)
    return [Ask(tuple(random.randrange(VOCAB_SIZE) for _ in range(prompt_len)), answer_len) for _ in range(count)]


def load(server: ServedProcess, asks: list[Ask], *, model: str, **settings: object) -> LoadResult:
    client = Client(Address.parse(server.url))
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    return asyncio.run(run_load(client, asks, model=model, sampling=sampling, **settings))  # type: ignore[arg-type]


def served_model(server: ServedProcess) -> str:
    return str(json.loads(server.get("/v1/models")[1])["data"][0]["id"])


def rate(result: LoadResult) -> float:
    """Completed tokens a second."""
    return sum(record.usage.output_tokens for record in result.records if record.usage is not None) / result.seconds


def rate_between(result: LoadResult, start: float, stop: float) -> float:
    """Tokens a second that came in a part of the time, of requests that were completed: no ramp up, no last ones."""
    tokens = 0.0
    for record in result.records:
        if record.outcome is RequestOutcome.COMPLETED and record.usage is not None and record.text_times:
            inside = sum(start <= at < stop for at in record.text_times)
            tokens += record.usage.output_tokens * inside / len(record.text_times)
    return tokens / (stop - start)


def offline(asks: list[Ask], environment: Mapping[str, str]) -> tuple[float, list[str]]:
    """Tokens a second of the engine alone, on the same work, and what it says."""
    work = json.dumps([[list(ask.prompt) for ask in asks], asks[0].max_tokens])
    done = subprocess.run(
        [sys.executable, "-c", _OFFLINE],
        input=work,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    told = json.loads(done.stdout)
    return sum(ask.max_tokens for ask in asks) / told["seconds"], told["texts"]


@pytest.mark.prove
def test_many_streams_are_whole_in_order_and_nobody_elses() -> None:
    with fake_serving("delay=0.002", max_queued=200) as server:
        random = Random(0)
        asks = [Ask("x" * random.randint(1, 20), random.randint(1, 200)) for _ in range(128)]
        result = load(server, asks, model="fake")
        assert [record.outcome for record in result.records] == [RequestOutcome.COMPLETED] * len(asks)
        for ask, record in zip(asks, result.records, strict=True):
            assert record.text == "".join(f"{number} " for number in range(ask.max_tokens))
            assert record.usage is not None
            assert record.usage.output_tokens == ask.max_tokens
        assert len({record.response_id for record in result.records}) == len(asks)


def test_too_many_are_refused_with_an_answer_and_the_rest_are_served_whole() -> None:
    with fake_serving("delay=0.01", max_queued=4) as server:
        result = load(server, [Ask("x", 10)] * 200, model="fake", arrivals=Arrivals(request_rate=400.0, seed=1))
        outcomes = Counter(record.outcome for record in result.records)
        assert len(result.records) == 200
        assert outcomes[RequestOutcome.COMPLETED] + outcomes[RequestOutcome.REFUSED] == 200
        assert outcomes[RequestOutcome.REFUSED] > 0
        assert outcomes[RequestOutcome.COMPLETED] > 4
        assert {record.status for record in result.records if record.outcome is RequestOutcome.REFUSED} == {429}
        assert {record.text for record in result.records if record.outcome is RequestOutcome.COMPLETED} == {
            "0 1 2 3 4 5 6 7 8 9 "
        }


def keeps_up(
    server: ServedProcess, asks: list[Ask], rounds: int, environment: Mapping[str, str]
) -> tuple[list[float], list[LoadResult]]:
    """Rates of the server over those of the engine alone, in turns."""
    model, shares, results = served_model(server), [], []
    load(server, asks[:4], model=model)
    for number in range(rounds):
        alone, texts = offline(asks, environment)
        result = load(server, asks, model=model)
        assert [record.outcome for record in result.records] == [RequestOutcome.COMPLETED] * len(asks)
        assert [record.usage and record.usage.output_tokens for record in result.records] == [
            ask.max_tokens for ask in asks
        ]
        same = sum(record.text == text for record, text in zip(result.records, texts, strict=True))
        assert same >= 0.9 * len(asks), f"{same} of {len(asks)} answers are those of the engine alone"
        shares.append(rate(result) / alone)
        results.append(result)
        client = result.client_seconds / result.seconds
        print(
            f"round {number}: alone {alone:.1f} tokens/s, served {rate(result):.1f} ({shares[-1]:.3f}), {same} of "
            f"{len(asks)} texts equal, client {client:.2f} of a core"
        )
    return shares, results


@pytest.mark.prove
def test_streaming_clients_cost_little_beside_the_engine_and_get_its_answers() -> None:
    with serving("--disable-radix-cache") as server:
        asks = random_asks(8, 16, 12, 1)
        server.wait_for("open")
        begun = server.processor_seconds
        keeps_up(server, asks, 1, ONE_THREAD)
        tokens = sum(ask.max_tokens for ask in asks) + sum(ask.max_tokens for ask in asks[:4])
        # A token costs the engine some 20 ms: what the front end adds to it is little.
        assert (server.processor_seconds - begun) / tokens < 5e-3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sixty_four_streaming_clients_get_95_percent_of_the_engine_alone() -> None:
    # The engine alone has no limit of time for steps.
    with serving("--disable-radix-cache", "--max-step-ms", "0", environment=ALL_THREADS) as server:
        shares, _ = keeps_up(server, random_asks(64, 64, 64, 1), 4, ALL_THREADS)
        assert sorted(shares)[len(shares) // 2] >= 0.95


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_times_too_much_for_a_minute_costs_little_and_leaks_nothing() -> None:
    with serving("--disable-radix-cache", "--max-queued-requests", "64", environment=ALL_THREADS) as server:
        model = served_model(server)
        load(server, random_asks(64, 32, 32, 1), model=model)
        peak_load = load(server, random_asks(512, 32, 32, 2), model=model, arrivals=Arrivals(max_concurrency=64))
        peak = rate_between(peak_load, 5.0, peak_load.seconds - 10.0)
        memory: list[tuple[float, int]] = []
        done = False

        def watch() -> None:
            while not done:
                memory.append((time.monotonic(), resident_bytes(server)))
                time.sleep(1.0)

        watcher = Thread(target=watch)
        watcher.start()
        offered = 10 * peak / 32
        asks = random_asks(round(60 * offered), 32, 32, 3)
        result = load(server, asks, model=model, arrivals=Arrivals(request_rate=offered, seed=4))
        done = True
        watcher.join()
        outcomes = Counter(record.outcome for record in result.records)
        achieved = rate_between(result, 5.0, 60.0)
        print(
            f"peak {peak:.1f} tokens/s; offered {offered:.1f} requests/s for 60 s: "
            f"{ ({outcome.value: count for outcome, count in outcomes.items()}) }, {achieved:.1f} tokens/s "
            f"({achieved / peak:.3f} of the peak), client "
            f"{result.client_seconds / result.seconds:.2f} of a core; memory after 10 s "
            f"{memory[10][1] / 2**20:.0f} MiB, at the end {memory[-1][1] / 2**20:.0f} MiB"
        )
        assert len(result.records) == len(asks)
        assert outcomes[RequestOutcome.COMPLETED] + outcomes[RequestOutcome.REFUSED] == len(asks)
        assert achieved >= 0.9 * peak
        assert memory[-1][1] <= 1.05 * memory[10][1]


def resident_bytes(server: ServedProcess) -> int:
    """Of the front end and the engine process."""
    pids = (server.process.pid, server.engine_pid)
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE")


def survives_kills(server: ServedProcess, kills: int, clients: int) -> list[float]:
    """Seconds until the service is back, for each time that the engine process is killed under load."""
    model, random, seconds = served_model(server), Random(5), []
    for number in range(kills):
        asks = random_asks(clients, 16, 200, number)
        results: list[LoadResult] = []
        running = Thread(target=lambda asks=asks, results=results: results.append(load(server, asks, model=model)))
        running.start()
        time.sleep(random.uniform(0.2, 1.5))
        os.kill(server.engine_pid, signal.SIGKILL)
        killed = time.monotonic()
        running.join(120)
        [result] = results
        assert len(result.records) == clients
        assert all(is_answered(record) for record in result.records), [record.error for record in result.records]
        while load(server, random_asks(1, 4, 1, 0), model=model).records[0].outcome is not RequestOutcome.COMPLETED:
            assert time.monotonic() - killed < 120.0, "the service does not come back"
            time.sleep(0.05)
        seconds.append(time.monotonic() - killed)
        assert server.process.poll() is None
    return seconds


def is_answered(record: RequestRecord) -> bool:
    """A whole answer, a refusal, or an error that the server told in the stream."""
    if record.outcome in (RequestOutcome.COMPLETED, RequestOutcome.REFUSED):
        return True
    return record.outcome is RequestOutcome.FAILED and "engine process" in (record.error or "")


@pytest.mark.prove
def test_every_client_is_answered_and_the_service_returns_when_the_engine_process_is_killed() -> None:
    with serving() as server:
        assert len(survives_kills(server, 1, 8)) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_under_load() -> None:
    with serving(environment=ALL_THREADS) as server:
        seconds = survives_kills(server, 20, 16)
        print(f"20 kills: back after {min(seconds):.1f} to {max(seconds):.1f} s")


def drains_under_load(seed: int, environment: Mapping[str, str]) -> Counter[RequestOutcome]:
    """Ends a server at a random moment under load; what became of the requests."""
    with serving("--drain-timeout", "60", environment=environment) as server:
        model = served_model(server)
        results: list[LoadResult] = []
        asks = random_asks(24, 16, 8, seed)
        arrivals = Arrivals(request_rate=20.0, seed=seed)
        running = Thread(target=lambda: results.append(load(server, asks, model=model, arrivals=arrivals)))
        running.start()
        time.sleep(Random(seed).uniform(0.0, 2.0))
        assert server.stop() == 0
        running.join(60)
        [result] = results
        accepted = [event for event in server.events if event.get("route") == "/v1/completions"]
        assert {event["status"] for event in accepted} <= {200, 503}
        completed = [record for record in result.records if record.outcome is RequestOutcome.COMPLETED]
        assert len(completed) == sum(event["status"] == 200 for event in accepted)
        assert all(record.usage and record.usage.output_tokens == 8 for record in completed)
        assert all(
            record.outcome is RequestOutcome.REFUSED or record.status is None or record in completed
            for record in result.records
        ), [record.error for record in result.records]
        return Counter(record.outcome for record in result.records)


@pytest.mark.prove
def test_no_accepted_request_is_lost_at_the_end() -> None:
    assert drains_under_load(0, ONE_THREAD).total() == 24


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_ends_under_load() -> None:
    outcomes: Counter[RequestOutcome] = Counter()
    for seed in range(50):
        outcomes += drains_under_load(seed, ALL_THREADS)
    print(f"50 ends: { ({outcome.value: count for outcome, count in outcomes.items()}) }")


@pytest.mark.slow
def test_the_quick_starts_first_token_comes_within_ten_seconds() -> None:
    root = Path(__file__).parents[2]
    started = time.monotonic()
    process = subprocess.Popen(
        ["make", "run", "PORT=0"], cwd=root, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        served = ServedProcess(process)
        body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 4}
        with served.streaming("/v1/chat/completions", body) as response:
            while b'"content":"' not in (line := response.readline()) or b'"content":""' in line:
                assert line
        seconds = time.monotonic() - started
        print(f"make run: first streamed token after {seconds:.1f} s")
        assert seconds < 10.0
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)
        served.read_to_end()
