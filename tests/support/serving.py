"""A real server in processes of its own, as people start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

START_SECONDS = 120.0
ONE_THREAD: Mapping[str, str] = MappingProxyType({"OMP_NUM_THREADS": "1"})


class ServedProcess:
    """`sightline serve`, what it logs, and where it listens."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.events: list[dict[str, Any]] = []
        """What was logged, in order."""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """Known once the model is loaded."""
        return str(self.wait_for("open")["url"])

    @property
    def base_url(self) -> str:
        """What OpenAI's client wants."""
        return f"{self.url}/v1"

    @property
    def engine_pid(self) -> int:
        """Of the engine process that was started last."""
        return int(self._logged("engine process started")[-1]["engine_pid"])

    @property
    def num_engine_starts(self) -> int:
        return len(self._logged("engine process started"))

    @property
    def processor_seconds(self) -> float:
        """What the front end's threads have computed so far: unlike the clock, the same however busy the machine is."""
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, words[11:13])) / os.sysconf("SC_CLK_TCK")

    def _logged(self, message: str) -> list[dict[str, Any]]:
        with self._changed:
            return [event for event in self.events if event["message"] == message]

    def wait_for(
        self, message: str, fits: Callable[[dict[str, Any]], bool] = lambda _: True, seconds: float = START_SECONDS
    ) -> dict[str, Any]:
        """The first event of that kind that fits; an error where the server ends, or takes too long, before it."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                for event in self.events:
                    if event["message"] == message and fits(event):
                        return event
                left = deadline - time.monotonic()
                if left <= 0 or (self.process.poll() is not None and not self._reader.is_alive()):
                    said = "\n".join(self.lines[-30:])
                    raise AssertionError(f"expected the server to log {message!r}, got none; it said:\n{said}")
                self._changed.wait(min(left, 0.2))

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        status, body, _ = self.send("GET", path, None, headers)
        return status, body

    def post(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, Mapping[str, str]]:
        sent = {"Content-Type": "application/json", **(headers or {})}
        return self.send("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), sent)

    def send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None, seconds: float = 60.0
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """One request on a connection of its own: status, body, headers by lower-case name."""
        connection = self.connect(seconds)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            return response.status, response.read(), {name.lower(): value for name, value in response.getheaders()}
        finally:
            connection.close()

    @contextmanager
    def streaming(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> Iterator[HTTPResponse]:
        """A response that is read line by line; leaving closes the connection, read or not."""
        connection = self.connect(60.0)
        try:
            sent = {"Content-Type": "application/json", **(headers or {})}
            connection.request("POST", path, json.dumps(body).encode(), sent)
            yield connection.getresponse()
        finally:
            connection.close()

    def connect(self, seconds: float) -> HTTPConnection:
        parts = urlsplit(self.url)
        return HTTPConnection(str(parts.hostname), parts.port, timeout=seconds)

    def stop(self, seconds: float = 60.0) -> int:
        """Ends it as an operator would, and tells its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill_engines(self) -> None:
        """Whatever is left of them: where the front end was killed, one may be stuck."""
        for event in self._logged("engine process started"):
            with suppress(ProcessLookupError):
                os.kill(event["engine_pid"], signal.SIGKILL)

    def read_to_end(self) -> None:
        """All that the processes said, once they are gone."""
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                if line.startswith("{"):
                    self.events.append(json.loads(line))
                self._changed.notify_all()


@contextmanager
def serving(*flags: str, environment: Mapping[str, str] | None = None) -> Iterator[ServedProcess]:
    """A server with a real engine on a free port; on one thread, as tests run side by side, unless told otherwise."""
    command = [sys.executable, "-m", "sightline", "serve", "--port", "0", "--cache-tokens", "32k", *flags]
    with _running(command, ONE_THREAD if environment is None else environment) as served:
        yield served


@contextmanager
def fake_serving(
    behaviour: str = "", *, max_queued: int = 64, until_open: bool = True, **server: object
) -> Iterator[ServedProcess]:
    """A server whose engine process only counts; `behaviour` is told in `fake_engine`."""
    # One desk: each is a process that must start.
    config = {"text_processes": 1, **server}
    settings = {"model": behaviour or None, "engine": {"max_queued_requests": max_queued}, "server": config}
    with _running([sys.executable, str(Path(__file__).with_name("fake_serve.py")), json.dumps(settings)], {}) as served:
        if until_open:
            served.wait_for("open")
        yield served


@contextmanager
def _running(command: list[str], environment: Mapping[str, str]) -> Iterator[ServedProcess]:
    """Killed at the end if it still runs."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    served = ServedProcess(process)
    try:
        yield served
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        served.kill_engines()
        served.read_to_end()
