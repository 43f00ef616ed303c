"""The life of a server: start, loss of the engine process, restarts, drain, end. With an engine that only counts."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from support.fake_engine import DEADLY, FAILING, HANGING
from support.serving import ServedProcess, fake_serving

QUESTION = [{"role": "user", "content": "count"}]


def ask(server: ServedProcess, **body: object) -> tuple[int, dict[str, object]]:
    status, answer, _ = server.post("/v1/chat/completions", {"messages": QUESTION, **body})
    return status, json.loads(answer)


def counted(num_tokens: int) -> str:
    return "".join(f"{number} " for number in range(num_tokens))


def is_gone(pid: int, seconds: float = 10.0) -> bool:
    """Waits for a process that nobody may have reaped to end."""
    status = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def streamed(server: ServedProcess, num_tokens: int) -> list[str]:
    """What a stream says, event by event."""
    with server.streaming(
        "/v1/chat/completions", {"messages": QUESTION, "max_tokens": num_tokens, "stream": True}
    ) as response:
        return [line.decode().strip().removeprefix("data: ") for line in response if line.strip()]


def text_of(events: list[str]) -> str:
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if "choices" in chunk)


def test_a_whole_answer_and_a_stream_say_the_same() -> None:
    with fake_serving() as server:
        status, answer = ask(server, max_tokens=7)
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == counted(7)  # type: ignore[index]
        events = streamed(server, 7)
        assert text_of(events) == counted(7)
        assert events[-1] == "[DONE]"


def test_an_engine_that_cannot_start_ends_the_server_with_its_reason() -> None:
    with fake_serving("fail=no such model", until_open=False) as server:
        assert server.process.wait(20) == 1
        server._reader.join(5)
        assert any("it was asked to fail: no such model" in line for line in server.lines)
        assert "listening" not in [event["message"] for event in server.events]


def test_an_engine_process_that_ends_before_it_is_open_ends_the_server() -> None:
    with fake_serving("silent=1", until_open=False) as server:
        assert server.process.wait(20) == 1
        server._reader.join(5)
        assert any("exit code 7" in line for line in server.lines)


def test_while_the_model_loads_the_front_end_is_alive_and_not_ready() -> None:
    with fake_serving("opening=2", until_open=False) as server:
        server.wait_for("engine process started")
        port = server.wait_for("listening")["url"].rsplit(":", 1)[1]
        assert _get(port, "/health") == 200
        assert _get(port, "/ready") == 503
        server.wait_for("open")
        assert _get(port, "/ready") == 200


def _get(port: str, path: str) -> int:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_requests_under_way_are_told_at_once_that_the_engine_process_is_lost() -> None:
    with fake_serving("delay=0.05") as server, ThreadPoolExecutor(8) as pool:
        whole = [pool.submit(ask, server, max_tokens=200) for _ in range(3)]
        streams = [pool.submit(streamed, server, 200) for _ in range(3)]
        time.sleep(0.5)
        os.kill(server.engine_pid, signal.SIGKILL)
        for answer in whole:
            status, body = answer.result(60)
            assert status == 503
            assert body["error"]["code"] == "engine_unavailable"  # type: ignore[index]
        for stream in streams:
            events = stream.result(60)
            assert json.loads(events[-1])["error"]["code"] == "engine_unavailable"
            assert "[DONE]" not in events
            num_tokens = len(text_of(events).split())
            assert text_of(events) == counted(num_tokens)
            assert num_tokens < 200, "told before the answer would have been complete"
        server.wait_for("engine process started", lambda event: event["start"] == 2)


@pytest.mark.prove
def test_the_front_end_outlives_twenty_engine_processes() -> None:
    with fake_serving() as server:
        for start in range(2, 22):
            os.kill(server.engine_pid, signal.SIGKILL)
            server.wait_for("engine process started", lambda event, start=start: event["start"] == start, 10.0)  # type: ignore[misc]
            deadline = time.monotonic() + 10.0
            while server.get("/ready")[0] != 200:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert ask(server, max_tokens=3)[1]["choices"][0]["message"]["content"] == counted(3)  # type: ignore[index]
        assert server.process.poll() is None


def test_a_request_that_kills_the_engine_process_is_answered_and_the_next_one_served() -> None:
    with fake_serving() as server:
        assert ask(server, seed=DEADLY)[0] == 503
        server.wait_for("engine process started", lambda event: event["start"] == 2)
        deadline = time.monotonic() + 10
        while ask(server, max_tokens=2)[0] != 200:
            assert time.monotonic() < deadline


def test_engine_processes_that_never_make_a_step_are_started_less_and_less_often() -> None:
    with fake_serving() as server:
        for start in range(2, 6):
            server.wait_for("open")
            os.kill(server.engine_pid, signal.SIGKILL)
            server.wait_for("engine process started", lambda event, start=start: event["start"] == start)  # type: ignore[misc]
        pauses = [event["next_start_in"] for event in server.events if event["message"] == "engine process lost"]
        assert pauses == sorted(pauses)
        assert pauses[-1] >= 8 * pauses[0]


def test_an_engine_process_that_hangs_is_replaced() -> None:
    with fake_serving(stall_seconds=1.0) as server:
        status, body = ask(server, seed=HANGING)
        assert status == 503
        assert body["error"]["code"] == "engine_unavailable"  # type: ignore[index]
        server.wait_for("engine process stuck")
        server.wait_for("engine process started", lambda event: event["start"] == 2)


def test_not_ready_where_the_engine_process_makes_no_step() -> None:
    with fake_serving(ready_seconds=0.2, probe_seconds=0.3) as server:
        assert server.get("/ready")[0] == 200
        os.kill(server.engine_pid, signal.SIGSTOP)
        time.sleep(0.3)
        assert server.get("/ready")[0] == 503
        assert server.get("/health")[0] == 200
        os.kill(server.engine_pid, signal.SIGCONT)
        assert server.get("/ready")[0] == 200


def test_a_request_that_fails_alone_is_an_error_and_not_an_answer() -> None:
    with fake_serving() as server:
        status, body = ask(server, seed=FAILING, max_tokens=9)
        assert status == 500
        assert "asked to fail" in body["error"]["message"]  # type: ignore[index]
        with server.streaming(
            "/v1/chat/completions", {"messages": QUESTION, "seed": FAILING, "max_tokens": 9, "stream": True}
        ) as response:
            events = [line.decode().strip().removeprefix("data: ") for line in response if line.strip()]
        assert "error" in json.loads(events[-1])


def test_a_killed_front_end_leaves_no_file_and_no_engine_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with fake_serving() as server:
        engine_pid = server.engine_pid
        server.process.kill()
        server.process.wait(10)
        assert is_gone(engine_pid)
    assert list(tmp_path.iterdir()) == []


def test_sigterm_lets_requests_finish_refuses_new_ones_and_leaves_nothing_behind() -> None:
    with fake_serving("delay=0.02") as server, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, server, max_tokens=60) for _ in range(4)]
        streams = [pool.submit(streamed, server, 60) for _ in range(4)]
        time.sleep(0.4)
        engine_pid = server.engine_pid
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        status, body, headers = server.post("/v1/chat/completions", {"messages": QUESTION})
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        assert b"shutting down" in body
        assert server.get("/ready")[0] == 503
        assert [answer.result(20)[1]["choices"][0]["message"]["content"] for answer in answers] == [counted(60)] * 4  # type: ignore[index]
        for stream in streams:
            events = stream.result(20)
            assert text_of(events) == counted(60)
            assert events[-1] == "[DONE]"
        assert server.process.wait(10) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(engine_pid, 0)


def test_what_is_under_way_at_the_drains_deadline_is_told() -> None:
    with fake_serving("delay=0.05", drain_seconds=0.5) as server, ThreadPoolExecutor(2) as pool:
        whole = pool.submit(ask, server, max_tokens=240)
        stream = pool.submit(streamed, server, 240)
        time.sleep(0.3)
        assert server.stop() == 0
        # Neither was waited for: both would have taken 240 tokens.
        assert whole.result(5)[0] == 503
        assert "shut down" in json.loads(stream.result(5)[-1])["error"]["message"]


def test_a_second_signal_ends_at_once() -> None:
    with fake_serving("delay=0.05", drain_seconds=60.0) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(ask, server, max_tokens=250)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        server.wait_for("draining")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(8) == 0


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(5))
def test_no_accepted_request_is_lost_when_the_end_comes_at_a_random_moment(seed: int) -> None:
    random = Random(seed)
    with fake_serving("delay=0.005") as server:
        assert server.url
        outcomes: list[tuple[int, str]] = []
        halt = threading.Event()

        def client() -> None:
            while not halt.is_set():
                try:
                    status, body = ask(server, max_tokens=20)
                except OSError:
                    return
                text = body["choices"][0]["message"]["content"] if status == 200 else ""  # type: ignore[index]
                outcomes.append((status, text))
                if status != 200:
                    return

        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(random.uniform(0.05, 0.6))
        assert server.stop() == 0
        halt.set()
        for thread in threads:
            thread.join(10)
        assert {status for status, _ in outcomes} <= {200, 503}
        assert all(text == counted(20) for status, text in outcomes if status == 200)
        served = [event for event in server.events if event["message"] == "request" and event["status"] == 200]
        assert len([event for event in served if event["route"] == "/v1/chat/completions"]) == len(
            [status for status, _ in outcomes if status == 200]
        )
