"""Edges of the front end: what is held and for how long, what a template may add, starts that fail for hours."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline.core.config import EngineConfig
from sightline.core.metrics import PhaseSeconds
from sightline.core.request import Terms
from sightline.server.api.generation import take
from sightline.server.desks.protocol import Continuation, Generated
from sightline.server.http.admission import AdmissionGate
from sightline.server.http.errors import ApiError
from sightline.server.process.port import EnginePort
from sightline.server.process.protocol import Cancel, Delta, Ended, Stop, command_codec
from sightline.server.process.supervisor import Supervisor
from sightline.server.serve import Server, ServerConfig
from support.commands import UNBOUNDED
from support.fake_serve import FAKE_ENGINE
from support.serving import ServedProcess, fake_serving

QUESTION = [{"role": "user", "content": "count"}]


@given(st.lists(st.integers(1, 5), max_size=60), st.integers(2, 40))
def test_one_of_several_callers_never_holds_more_than_half(counts: list[int], capacity: int) -> None:
    made = AdmissionGate(capacity, shared=True)
    with ExitStack() as held:
        for count in counts:
            with suppress(ApiError):
                held.enter_context(made.admitted("one", count))
        assert made.num_held <= (capacity + 1) // 2


def resident_megabytes(server: ServedProcess) -> float:
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_bodies_of_requests_under_way_are_bounded_in_memory() -> None:
    body = json.dumps(
        {"messages": QUESTION, "max_tokens": 200, "chat_template_kwargs": {"x": [1.5] * 200_000}}
    ).encode()
    limits = {"max_held_bytes": 8 * len(body)}
    with fake_serving("delay=0.2", max_queued=200, limits=limits) as server, ExitStack() as open_ones:
        before = resident_megabytes(server)
        for _ in range(40):
            connection = server.connect(60)
            open_ones.callback(connection.close)
            with suppress(OSError):  # Refused before the whole body was sent.
                connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            time.sleep(0.02)
        time.sleep(0.5)
        assert resident_megabytes(server) - before < 150


def test_offsets_of_an_echo_hold_up_nobody() -> None:
    with fake_serving(max_queued=200) as server:
        body = {"prompt": "x" * 250, "max_tokens": 1, "echo": True, "logprobs": 0, "n": 128}
        asking = threading.Thread(target=server.post, args=("/v1/completions", body))
        asking.start()
        worst = 0.0
        while asking.is_alive():
            asked = server.processor_seconds
            server.get("/health")
            worst = max(worst, server.processor_seconds - asked)
        assert worst < 0.15


class _Writer:
    def __init__(self, waiting: int = 0) -> None:
        self.transport = self
        self.waiting = waiting
        self.sent: list[object] = []

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def write(self, frame: bytes) -> None:
        self.sent += command_codec().decode(frame[4:])


class _NoMeter:
    def __getattr__(self, name: str) -> object:
        return lambda *_: None


def full_port() -> tuple[EnginePort, _Writer]:
    port, writer = EnginePort(_NoMeter()), _Writer()  # type: ignore[arg-type]
    port._writer = writer  # type: ignore[assignment]
    port._open.set()
    return port, writer


def test_a_cancellation_is_sent_however_much_waits() -> None:
    port, writer = full_port()
    answers = port.submit([b"tokens"], b"params", Terms(), 0.0, UNBOUNDED)
    writer.waiting = 1 << 30
    port.cancel(answers)
    assert writer.sent[-1] == Cancel(1)
    assert port.num_under_way == 0


def test_an_engine_process_that_reads_nothing_is_ended_all_the_same() -> None:
    port, writer = full_port()
    writer.waiting = 1 << 30

    class Process:
        pid, killed = 1, False

        async def wait(self) -> None:
            await asyncio.sleep(0 if self.killed else 60)

        def kill(self) -> None:
            self.killed = True

    supervisor = Supervisor(None, port, stall_seconds=1.0)  # type: ignore[arg-type]
    supervisor._process = process = Process()  # type: ignore[assignment]
    asyncio.run(supervisor.stop(0.1))
    assert process.killed
    assert writer.sent == [Stop()]


@pytest.mark.parametrize("makes_a_step", [False, True])
def test_an_engine_process_whose_requests_are_all_paused_is_asked_for_a_step_before_it_is_ended(
    makes_a_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sightline.server.process.supervisor.WATCH_SECONDS", 0.0)

    class Port:
        num_under_way, heard_at, num_probes = 1, -float("inf"), 0

        async def probe(self, seconds: float) -> bool:
            assert seconds == 0.01
            self.num_probes += 1
            if self.num_probes == 3:
                self.num_under_way = 0
            return makes_a_step

    class Process:
        killed = False

        def kill(self) -> None:
            self.killed = True

    port, process = Port(), Process()
    supervisor = Supervisor(None, port, stall_seconds=0.02)  # type: ignore[arg-type]

    async def run() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await supervisor._watch(process)  # type: ignore[arg-type]

    asyncio.run(run())
    assert process.killed is not makes_a_step
    assert port.num_probes == (3 if makes_a_step else 1)


def test_engine_processes_may_fail_for_days(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sightline.server.process.supervisor.FIRST_PAUSE", 0.0)
    monkeypatch.setattr("sightline.server.process.supervisor.LONGEST_PAUSE", 0.0)

    async def run() -> int:
        port = EnginePort(_NoMeter())  # type: ignore[arg-type]
        port.opened = object()  # type: ignore[assignment]
        supervisor = Supervisor(None, port, stall_seconds=1.0)  # type: ignore[arg-type]

        async def failing() -> str:
            supervisor.num_starts += 1
            if supervisor.num_starts > 1200:
                supervisor._stopping.set()
            return "gone"

        monkeypatch.setattr(supervisor, "_run_once", failing)
        await supervisor.run()
        return supervisor.num_starts

    assert asyncio.run(run()) == 1201


def test_a_server_that_cannot_be_announced_ends() -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("nobody listens")

    async def run() -> None:
        async with asyncio.timeout(15):
            await Server(ServerConfig(port=0), EngineConfig(), failing, FAKE_ENGINE).run()

    with pytest.raises(RuntimeError, match="nobody listens"):
        asyncio.run(run())


def test_a_request_whose_time_ran_out_in_the_queue_is_no_empty_answer() -> None:
    outcome = Generated(3, 1, [Continuation()])
    take(Delta(1, 0, "", 0, "abort"), 0, outcome)
    with pytest.raises(ApiError) as caught:
        take(Ended(1, "expected an end within 1 s, got none; allow more time", 0, PhaseSeconds(1.0), None), 0, outcome)
    assert caught.value.status == 503


def test_cost_is_that_of_the_prompt_that_the_template_made() -> None:
    with fake_serving(limits={"max_cost": 150}) as server:
        body = {"messages": [{"role": "user", "content": "c", "reasoning_content": "x" * 200}], "max_tokens": 1}
        status, answer, _ = server.post("/v1/chat/completions", body)
        assert (status, json.loads(answer)["error"].get("code")) == (400, "cost_exceeded")
