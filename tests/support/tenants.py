"""A bystander beside an attack: how long it waits, how long `/health` takes, and what the processes hold in memory.

    test process ── attack ──────────────────────▶ server
         │ asks for readings                         ▲
         └──▶ watch process: stream, probes, /proc ──┘

The watch runs in a process of its own with a raised priority, so that building or sending the attack's bodies does not
delay it. It measures its own lateness too and takes that off each reading. Does not know what the attacks are.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sightline.bench.serving.http_stream import Address, Client
from sightline.bench.serving.report import percentile
from sightline.core.config import Task
from sightline.core.errors import SightlineError
from support.serving import ServedProcess

HEALTH_SECONDS = 0.02
"""Between two probes of /health."""
TURN_SECONDS = 0.1
"""Between two small texts that the bystander has tokenised."""
MEMORY_SECONDS = 0.05
FAMILY_SECONDS = 1.0
"""Between two looks for new child processes of the front end."""
PAUSE_SECONDS = 0.02
"""Between two texts that the bystander has embedded."""
TICK_SECONDS = 0.005
"""How exactly the watch knows its own lateness."""
ANSWER_SECONDS = 60.0
STREAM_TOKENS = 1_000
PRIORITY = -10


@dataclass(frozen=True)
class Spread:
    """Times in seconds."""

    count: int = 0
    largest: float = 0.0
    p99: float = 0.0

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread:
        return Spread(len(seconds), max(seconds), percentile(sorted(seconds), 99.0)) if seconds else Spread()


@dataclass(frozen=True)
class Reading:
    """What the watch saw between two moments."""

    gap: Spread
    """Between two events of the bystander's stream; on a server that embeds, the time of each answer."""
    start: Spread
    """From sending the bystander's request to the first event of its stream."""
    health: Spread
    turn: Spread
    """Time in which a small text of the bystander is tokenised."""
    front_end_bytes: int
    """Largest resident size of the front end's process."""
    worker_bytes: int
    """Largest proportional size of the front end's other child processes, together."""
    engine_bytes: int
    first_front_end_bytes: int
    """Resident size of the front end when the window began."""
    lateness: float
    """The most by which the watch itself was late."""
    failures: tuple[str, ...]
    """Answers that the bystander should not have got."""

    def __str__(self) -> str:
        times = {"gap": self.gap, "start": self.start, "/health": self.health, "/tokenize": self.turn}
        told = [f"{name} {each.largest * 1e3:.0f} ms (p99 {each.p99 * 1e3:.0f})" for name, each in times.items()]
        sizes = (self.first_front_end_bytes, self.front_end_bytes, self.worker_bytes, self.engine_bytes)
        first, front, workers, engine = (f"{size / 2**20:.0f}" for size in sizes)
        memory = f"front end {first} to {front} MiB, workers {workers} MiB, engine {engine} MiB"
        return f"{', '.join(told)}; {memory}; watch late by at most {self.lateness * 1e3:.0f} ms"


@dataclass(frozen=True)
class StallLimits:
    """What an attack may cost others."""

    gap_factor: float = 2.0
    """Largest gap of the bystander, in gaps that it has alone; one step comes on top."""
    step_seconds: float = 0.0
    health_seconds: float = 0.05
    turn_seconds: float = 3.0
    """The most time in which a small text of the bystander is tokenised."""
    front_end_bytes: int | None = None
    """None if the server does not tell its bound."""
    more_seconds: float = 0.0
    """Allowed on top of every time."""

    def gap_seconds(self, alone: Reading) -> float:
        return self.gap_factor * alone.gap.largest + self.step_seconds

    def faults(self, alone: Reading, under: Reading) -> list[str]:
        """Every limit that is exceeded, in words."""
        found = [f"bystander: {failure}" for failure in under.failures]
        timed = (
            ("the bystander's largest gap", under.gap.largest, self.gap_seconds(alone)),
            ("/health", under.health.largest, self.health_seconds),
            ("a small text's tokens", under.turn.largest, self.turn_seconds),
        )
        found += [
            f"expected {name} within {most * 1e3:.0f} ms, got {seconds * 1e3:.0f} ms"
            for name, seconds, most in timed
            if seconds > most + self.more_seconds
        ]
        return found + self.memory_faults(under)

    def memory_faults(self, under: Reading) -> list[str]:
        first, most = under.first_front_end_bytes / 2**20, under.front_end_bytes / 2**20
        grown = f"it went from {first:.0f} to {most:.0f} MiB"
        if self.front_end_bytes is None:
            return [f"expected max_front_end_bytes in the limits of /server_info, got none; {grown}"]
        if under.front_end_bytes > self.front_end_bytes:
            return [f"expected the front end within {self.front_end_bytes / 2**20:.0f} MiB; {grown}"]
        return []

    def excess(self, alone: Reading, under: Reading) -> float:
        """The larger of gap and /health, in units of its limit."""
        return max(under.gap.largest / self.gap_seconds(alone), under.health.largest / self.health_seconds)


class Watch:
    """The watch process, as its user sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def alone(self, seconds: float) -> Reading:
        """Readings of some time in which nobody else asks anything."""
        begun = time.monotonic()
        time.sleep(seconds)
        return self.between(begun, time.monotonic())

    def between(self, begun: float, ended: float) -> Reading:
        """Readings that overlap the time, one that is still under way included. Times are those of `time.monotonic`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([begun, ended]) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._process.stdout.readline())
        spreads = {name: Spread(**told[name]) for name in ("gap", "start", "health", "turn")}
        return Reading(**{**told, **spreads, "failures": tuple(told["failures"])})


@contextmanager
def watching(server: ServedProcess, key: str, task: Task) -> Iterator[Watch]:
    """Starts the bystander and the probes; returns once the bystander has had its first answer."""
    settings = [server.url, key, task.value, server.process.pid, server.engine_pid]
    process = subprocess.Popen(
        [sys.executable, "-m", "support.tenants", json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield Watch(process)
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()


@dataclass
class _Times:
    """Readings with the moments at which they began and ended."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    open_since: float | None = None

    def add(self, begun: float, ended: float) -> None:
        self.spans.append((begun, ended))

    @contextmanager
    def timed(self) -> Iterator[None]:
        self.open_since = begun = time.monotonic()
        try:
            yield
        finally:
            self.open_since = None
            self.add(begun, time.monotonic())

    def within(self, begun: float, ended: float, lateness: _Times) -> list[float]:
        """Seconds of what overlaps a time, less the most by which the watch was late meanwhile."""
        spans = [*self.spans, *([(self.open_since, time.monotonic())] if self.open_since is not None else [])]
        return [
            stop - start - max((late for _, late in lateness.overlapping(start, stop)), default=0.0)
            for start, stop in spans
            if stop > begun and start < ended
        ]

    def overlapping(self, begun: float, ended: float) -> Iterator[tuple[float, float]]:
        """The end and the length of each span, newest first; spans are in order."""
        for start, stop in reversed(self.spans):
            if stop < begun:
                return
            if start < ended:
                yield stop, stop - start


@dataclass(frozen=True)
class _Sizes:
    """Memory of the processes at a moment, in bytes."""

    at: float
    front_end: int
    peak: int
    """The largest that the front end ever had, as the system counts it."""
    workers: int
    engine: int


class _Watcher:
    """Everything that the watch process does, on one event loop."""

    def __init__(self, url: str, key: str, task: str, front_end_pid: int, engine_pid: int) -> None:
        self._address = Address.parse(url)
        self._client = Client(self._address, key)
        self._key = key
        self._bystand = self._embed if task == Task.EMBED.value else self._stream
        self._pids = (front_end_pid, engine_pid)
        self.gaps, self.starts, self.healths, self.turns, self.lateness = (_Times() for _ in range(5))
        self.sizes: list[_Sizes] = []
        self.failures: list[tuple[float, str]] = []

    async def run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tick())
            group.create_task(self._weigh())
            group.create_task(self._repeat(self._bystand))
            while not self.gaps.spans and not self.failures:
                await asyncio.sleep(0.01)
            group.create_task(self._repeat(self._probe_health))
            group.create_task(self._repeat(self._tokenise))
            print("ready", flush=True)
            group.create_task(self._answer())

    async def _answer(self) -> None:
        """Answers questions for readings until there are no more."""
        while line := await asyncio.to_thread(sys.stdin.readline):
            begun, ended = json.loads(line)
            print(json.dumps(asdict(self.reading(begun, ended))), flush=True)
        os._exit(0)

    def reading(self, begun: float, ended: float) -> Reading:
        sizes = [each for each in self.sizes if begun <= each.at <= ended] or self.sizes[-1:]
        peak = max(each.front_end for each in sizes)
        if sizes[-1].peak > sizes[0].peak:
            peak = max(peak, sizes[-1].peak)
        return Reading(
            gap=self._spread(self.gaps, begun, ended),
            start=self._spread(self.starts, begun, ended),
            health=self._spread(self.healths, begun, ended),
            turn=self._spread(self.turns, begun, ended),
            front_end_bytes=peak,
            worker_bytes=max(each.workers for each in sizes),
            engine_bytes=max(each.engine for each in sizes),
            first_front_end_bytes=sizes[0].front_end,
            lateness=max((late for _, late in self.lateness.overlapping(begun, ended)), default=0.0),
            failures=tuple(what for at, what in self.failures if begun <= at <= ended),
        )

    def _spread(self, times: _Times, begun: float, ended: float) -> Spread:
        return Spread.of(times.within(begun, ended, self.lateness))

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work` again and again; what fails is kept and tried again."""
        while True:
            try:
                await work()
            except (OSError, SightlineError, LookupError, ValueError, asyncio.IncompleteReadError) as error:
                self._fail(repr(error))
                await asyncio.sleep(0.1)

    def _fail(self, what: str) -> None:
        self.failures.append((time.monotonic(), what[:300]))

    async def _tick(self) -> None:
        """Keeps each time at which this process itself was late."""
        while True:
            due = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            if (now := time.monotonic()) > due + TICK_SECONDS:
                self.lateness.add(due, now)

    async def _stream(self) -> None:
        """One stream to its end."""
        asked = {"prompt": "Once upon a time", "max_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**asked, "stream": True}).encode()
        last = self.starts.open_since = time.monotonic()
        is_first, end = True, b""
        try:
            async with self._client.exchange("POST", "/v1/completions", body) as response:
                if response.status != 200:
                    self._fail(f"HTTP {response.status}: {(await response.read())[:200]!r}")
                    await asyncio.sleep(PAUSE_SECONDS)
                    return
                while content := await response.read_some():
                    now = time.monotonic()
                    (self.starts if is_first else self.gaps).add(last, now)
                    is_first, last, end = False, now, content[-200:]
                    self.starts.open_since, self.gaps.open_since = None, now
        finally:
            self.starts.open_since = self.gaps.open_since = None
        if b"[DONE]" not in end:
            self._fail(f"the stream ended with {end!r}")

    async def _embed(self) -> None:
        body = json.dumps({"input": "A text of the bystander's."}).encode()
        with self.gaps.timed():
            async with self._client.exchange("POST", "/v1/embeddings", body) as response:
                answer = await response.read()
        if response.status != 200:
            self._fail(f"HTTP {response.status}: {answer[:200]!r}")
        await asyncio.sleep(PAUSE_SECONDS)

    async def _probe_health(self) -> None:
        """Probes on one connection as long as that lasts."""
        async with self._connected() as ask:
            while True:
                with self.healths.timed():
                    status, _ = await ask(b"GET /health")
                if status != 200:
                    self._fail(f"/health: HTTP {status}")
                await asyncio.sleep(HEALTH_SECONDS)

    async def _tokenise(self) -> None:
        """Has one text after the other tokenised; each answer must be that of its text."""
        number = 0
        async with self._connected() as ask:
            while True:
                number += 1
                told = f"{os.getpid()}{number:07}"
                body = json.dumps({"prompt": f"number {told}", "return_token_strs": True}).encode()
                with self.turns.timed():
                    status, answer = await ask(b"POST /tokenize", body)
                spelled = "".join(json.loads(answer).get("token_strs", ())).replace("##", "")
                if status != 200 or told not in spelled:
                    self._fail(f"/tokenize of {told}: HTTP {status}: {answer[:200]!r}")
                await asyncio.sleep(TURN_SECONDS)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Callable[..., Awaitable[tuple[int, bytes]]]]:
        """A connection for one request after the other."""
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port)

        async def ask(line: bytes, body: bytes = b"") -> tuple[int, bytes]:
            lines = [line + b" HTTP/1.1", b"Host: localhost", b"Authorization: Bearer " + self._key.encode()]
            if body:
                lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
            writer.write(b"\r\n".join([*lines, b"", body]))
            async with asyncio.timeout(ANSWER_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                named = dict(line.lower().partition(b":")[::2] for line in head.split(b"\r\n")[1:])
                return int(head.split(b" ", 2)[1]), await reader.readexactly(int(named[b"content-length"]))

        try:
            yield ask
        finally:
            writer.close()

    async def _weigh(self) -> None:
        """Keeps what the processes hold in memory."""
        front_end, engine = self._pids
        looked, workers = -math.inf, list[int]()
        while True:
            if (now := time.monotonic()) - looked > FAMILY_SECONDS:
                looked, workers = now, [pid for pid in descendants(front_end) if pid != engine]
            weight = sum(map(_proportional_bytes, workers))
            resident, peak = _resident_bytes(front_end)
            self.sizes.append(_Sizes(time.monotonic(), resident, peak, weight, _resident_bytes(engine)[0]))
            await asyncio.sleep(MEMORY_SECONDS)


def descendants(pid: int) -> list[int]:
    """Ids of a process's children and their children."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found = parents.get(pid, [])
    for child in found:
        found += parents.get(child, [])
    return found


def _resident_bytes(pid: int) -> tuple[int, int]:
    """At present, and at most so far; nothing for a process that is gone."""
    return _kilobytes(pid, "status", "VmRSS:"), _kilobytes(pid, "status", "VmHWM:")


def _proportional_bytes(pid: int) -> int:
    """Bytes that only this process holds, and its share of the others."""
    return _kilobytes(pid, "smaps_rollup", "Pss:")


def _kilobytes(pid: int, file: str, name: str) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return 0


if __name__ == "__main__":
    asyncio.run(_Watcher(*json.loads(sys.argv[1])).run())
