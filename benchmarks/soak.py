"""A server under load with cancelled requests for minutes: nothing lost, memory flat, the cache empty at the end.

    python benchmarks/soak.py --seconds 300 -- --model MODEL --max-model-len 2048

Starts `sightline serve` with the arguments behind `--`. Every client sends one streamed request after another, of
random lengths, and cancels some of them by closing the connection. Memory is that of the server's processes and of the
whole GPU, if there is one. The first quarter of the time is warm-up: memory must not grow after it. Exits with 1 if a
request failed or got too few tokens, if memory grew, or if the server holds sequences or pages at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from sightline.bench.serving.answers import StreamedAnswer
from sightline.bench.serving.http_stream import Address, Client
from sightline.bench.serving.measure import find_model, find_vocabulary
from sightline.core.errors import SightlineError

SAMPLE_SECONDS = 2.0
ASK_SECONDS = 10.0
START_SECONDS = 600.0
SETTLE_SECONDS = 20.0
"""The most time until the server has noticed that the last clients are gone."""
WARM_UP = 0.25
"""Share of the time after which memory must not grow."""
MOST_GROWTH = 0.02
"""Growth of memory that may be noise."""
LOST_SECONDS = 120.0
"""The time after which a request without an end counts as lost."""
LEAST_SAMPLES = 6
"""Samples of memory after the warm-up: with fewer, the first and the last third say nothing."""
LEAST_GROWTH_MIB = 48
"""Growth in MiB that may be noise, whatever the share."""


@dataclass(frozen=True)
class Load:
    """What the clients do."""

    seconds: float
    num_clients: int
    cancelled: float
    """Share of the requests that are cancelled."""
    longest_prompt: int
    longest_answer: int


@dataclass
class Memory:
    """Samples of memory in MiB, and when they were taken."""

    seconds: list[float] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    card: list[int] = field(default_factory=list)

    def take(self, now: float, root: int) -> None:
        self.seconds.append(now)
        self.host.append(resident_mib(root))
        self.card.append(card_mib())

    def growth(self, samples: Sequence[int], since: float) -> tuple[int, int]:
        """The most memory in the first third and in the last third of the time after the warm-up."""
        late = [size for second, size in zip(self.seconds, samples, strict=True) if second >= since]
        third = max(1, len(late) // 3)
        return max(late[:third]), max(late[-third:])


def grew(first: int, last: int) -> bool:
    return last - first > max(LEAST_GROWTH_MIB, MOST_GROWTH * first)


def resident_mib(root: int) -> int:
    """Resident memory of a process and its descendants."""
    parents: dict[int, int] = {}
    pages: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            pages[int(folder.name)] = int((folder / "statm").read_text().split()[1])
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    children = defaultdict[int, list[int]](list)
    for process, parent in parents.items():
        children[parent].append(process)
    total, left = 0, [root]
    while left:
        process = left.pop()
        total += pages.get(process, 0)
        left += children[process]
    return total * os.sysconf("SC_PAGE_SIZE") >> 20


def card_mib() -> int:
    """Used memory of the GPU as the driver reports it; 0 without one."""
    if shutil.which("nvidia-smi") is None:
        return 0
    told = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(told.stdout.split()[0])


@contextmanager
def serving(arguments: Sequence[str]) -> Iterator[tuple[Client, int, float]]:
    """A running server: a client of it, its process, and the seconds until it was ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun = time.monotonic()
    command = [sys.executable, "-m", "sightline", "serve", "--port", str(port), *arguments]
    process = subprocess.Popen(command, stdout=sys.stderr)
    client = Client(Address(secure=False, host="127.0.0.1", port=port, path=""))
    try:
        while not asyncio.run(is_ready(client)):
            if process.poll() is not None or time.monotonic() - begun > START_SECONDS:
                raise SystemExit(f"expected a server that becomes ready, got exit status {process.poll()}")
            time.sleep(0.1)
        yield client, process.pid, time.monotonic() - begun
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


async def is_ready(client: Client) -> bool:
    try:
        async with client.exchange("GET", "/ready") as response:
            return response.status == 200
    except (OSError, SightlineError):
        return False


class Soak:
    """The clients and what became of their requests."""

    def __init__(self, client: Client, load: Load, model: str, vocab_size: int) -> None:
        self._client = client
        self._load = load
        self._model = model
        self._vocab_size = vocab_size
        self.ends: Counter[str] = Counter()
        self.num_tokens = 0
        self.wrong: list[str] = []

    async def run(self, memory: Memory, root: int) -> None:
        begun = time.monotonic()
        end = begun + self._load.seconds
        async with asyncio.TaskGroup() as group:
            for number in range(self._load.num_clients):
                group.create_task(self._client_of(number, end))
            while (now := time.monotonic()) < end:
                await asyncio.to_thread(memory.take, now - begun, root)
                await asyncio.sleep(SAMPLE_SECONDS)

    async def _client_of(self, number: int, end: float) -> None:
        draw = Random(number)
        while time.monotonic() < end:
            length, wanted = draw.randint(1, self._load.longest_prompt), draw.randint(1, self._load.longest_answer)
            body = {
                "model": self._model,
                "prompt": [draw.randrange(self._vocab_size // 2, self._vocab_size) for _ in range(length)],
                "max_tokens": wanted,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": draw.choice([0.0, 0.8]),
                "top_p": draw.choice([1.0, 0.9]),
            }
            is_cancelled = draw.random() < self._load.cancelled
            patience = draw.uniform(0.0, 1.0) if is_cancelled else LOST_SECONDS
            try:
                async with asyncio.timeout(patience):
                    await self._one(json.dumps(body).encode(), wanted)
            except TimeoutError:
                if is_cancelled:
                    self.ends["cancelled"] += 1
                else:
                    self.wrong.append(f"expected an answer of {wanted} tokens, got no end in {LOST_SECONDS:g} s")
            except (OSError, SightlineError) as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

    async def _one(self, body: bytes, wanted: int) -> None:
        answer = StreamedAnswer()
        async with self._client.exchange("POST", "/v1/completions", body) as response:
            if response.status != 200:
                self.wrong.append(f"status {response.status}: {(await response.read())[:200]!r}")
                return
            while part := await response.read_some():
                answer.take(part, time.monotonic())
        answer.end()
        assert answer.usage is not None
        got = answer.usage.output_tokens
        if got != wanted or answer.finish_reason != "length":
            self.wrong.append(f"expected {wanted} tokens, got {got} and finish reason {answer.finish_reason}")
            return
        self.ends["completed"] += 1
        self.num_tokens += got


async def read_metrics(client: Client) -> dict[str, float]:
    """The server's metrics, summed over their labels. Raises if one that is judged is missing."""
    async with client.exchange("GET", "/metrics") as response:
        text = (await response.read()).decode()
    found: defaultdict[str, float] = defaultdict(float)
    for name, value in re.findall(r"^sightline_(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
        found[name] += float(value)
    missing = [name for name in (*HELD, *COUNTED) if name not in found]
    if missing:
        raise SightlineError(f"expected the metrics {', '.join(missing)} at /metrics, got none of these names")
    return dict(found)


COUNTED = ("steps_total", "steps_cut_total", "engine_starts_total")
HELD = ("num_requests_running", "num_requests_waiting", "num_requests_paused", "kv_cache_usage_perc")


async def settled(client: Client) -> dict[str, float]:
    """The metrics once nothing is held any more, or after `SETTLE_SECONDS`."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        metrics = await read_metrics(client)
        if not any(metrics[name] for name in HELD) or time.monotonic() > deadline:
            return metrics
        await asyncio.sleep(0.5)


async def soak(client: Client, load: Load, root: int) -> list[str]:
    """Runs the load, prints what happened, and returns what is wrong."""
    model = await find_model(client, None, ASK_SECONDS)
    vocab_size = await find_vocabulary(client, ASK_SECONDS)
    assert vocab_size is not None
    run = Soak(client, load, model, vocab_size)
    memory = Memory()
    await run.run(memory, root)
    metrics = await settled(client)
    wrong = [f"{len(run.wrong)} requests failed, the first: {run.wrong[0]}"] if run.wrong else []
    print(f"{run.ends['completed']} requests completed, {run.ends['cancelled']} cancelled, {len(run.wrong)} failed")
    print(f"{run.num_tokens / load.seconds:.0f} tokens/s in answers that were read to their end")
    for name, samples in (("host", memory.host), ("GPU", memory.card)):
        first, last = memory.growth(samples, WARM_UP * load.seconds)
        print(f"{name} memory: {first} MiB after the warm-up, {last} MiB in the last third")
        if grew(first, last):
            wrong.append(f"{name} memory grew from {first} to {last} MiB")
    print(", ".join(f"{name} {metrics[name]:g}" for name in (*HELD, "steps_total", "steps_cut_total")))
    wrong += [f"{name} is {metrics[name]:g} at the end" for name in HELD if metrics[name]]
    wrong += [f"{name} is {metrics[name]:g}" for name in ("steps_cut_total",) if metrics[name]]
    if metrics["engine_starts_total"] != 1:
        wrong.append(f"the engine process was started {metrics['engine_starts_total']:g} times")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--cancelled", type=float, default=0.3)
    parser.add_argument("--longest-prompt", type=int, default=600)
    parser.add_argument("--longest-answer", type=int, default=200)
    parser.add_argument("server", nargs="*", help="arguments of sightline serve, behind --")
    given = parser.parse_args()
    if given.seconds * (1 - WARM_UP) < LEAST_SAMPLES * SAMPLE_SECONDS:
        parser.error(f"expected --seconds of at least {LEAST_SAMPLES * SAMPLE_SECONDS / (1 - WARM_UP):g}")
    load = Load(given.seconds, given.clients, given.cancelled, given.longest_prompt, given.longest_answer)
    with serving(given.server) as (client, root, seconds):
        print(f"ready after {seconds:.1f} s", flush=True)
        wrong = asyncio.run(soak(client, load, root))
    for line in wrong:
        print(f"WRONG: {line}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
