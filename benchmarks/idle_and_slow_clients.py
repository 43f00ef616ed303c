"""Goodput of normal streaming clients beside idle and slow ones, relative to the same clients alone.

    python benchmarks/idle_and_slow_clients.py

Starts a server with two keys, or takes a running one (--base-url, with two --api-key). Normal clients have one key, the
crowd has the other. Idle clients have connected and sent nothing, sent half of a header, or wait on a connection that
is kept alive; whatever the server closes is opened again. Slow clients read a few bytes per second of a stream with log
probabilities. Rounds alternate: alone, beside, alone, beside; the crowd is a process of its own and settles before it
counts. A round from which the host of a virtual machine stole much time is repeated. Exits with 1 if the goodput beside
the crowd is below --least of that alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from random import Random
from threading import Thread

from sightline.bench.host.stolen import StolenTime
from sightline.bench.serving.http_stream import Address, Client
from sightline.bench.serving.load import RequestOutcome, run_load
from sightline.bench.serving.measure import find_model, find_vocabulary
from sightline.bench.serving.work import Arrivals, Ask, Sampling

KEYS = ("normal-clients-key-1", "crowd-of-clients-key-2")
SIP_BYTES, SIP_SECONDS = 8, 1.0
RECEIVE_BYTES = 2048
"""Receive buffer of a slow client."""
KEEP_ALIVE_SECONDS = 20.0
"""Between two requests on an idle connection that is kept alive."""
REOPEN_SECONDS = 0.5
DIALS_AT_ONCE = 50
ALL_CLOSED_SECONDS = 3.0
MOST_STOLEN = 0.1
"""Share of the processors' time that may be stolen from a round that counts."""
ROUNDS_TRIED = 6
"""The most rounds for each that counts."""
MAX_REQUESTS = 200
"""The most requests of each normal client in a round."""


@dataclass(frozen=True)
class Crowd:
    """The clients beside the normal ones."""

    host: str
    port: int
    api_key: str
    num_idle: int = 1000
    num_slow: int = 200


class CrowdClients:
    """The crowd's own process: keeps its clients connected."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._dialling = asyncio.Semaphore(DIALS_AT_ONCE)
        self.num_streaming = self.num_idle = self.num_refused = 0
        asked = {"max_tokens": 8000, "ignore_eos": True, "stream": True, "logprobs": 20}
        self._bodies = [json.dumps({"prompt": f"Story {place}", **asked}).encode() for place in range(crowd.num_slow)]

    async def run(self) -> None:
        """Connects everybody, and tells once a second how many are connected, until the process is killed."""
        raise_file_limit()
        kinds = (self._silent, self._half_a_header, self._kept_alive)
        async with asyncio.TaskGroup() as group:
            for place in range(self._crowd.num_idle):
                group.create_task(self._again(kinds[place % len(kinds)]))
            for body in self._bodies:
                group.create_task(self._slow(body))
            while True:
                print(f"{self.num_idle} {self.num_streaming} {self.num_refused}", flush=True)
                await asyncio.sleep(1.0)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.num_idle += 1
        try:
            yield
        finally:
            self.num_idle -= 1

    async def _again(self, kind: Callable[[socket.socket], Awaitable[None]]) -> None:
        while True:
            with suppress(OSError):
                async with self._dialling:
                    connection = await self._dialled(0)
                with connection, self._counted():
                    await kind(connection)
            await asyncio.sleep(REOPEN_SECONDS)

    async def _dialled(self, receive_bytes: int) -> socket.socket:
        connection = socket.socket()
        connection.setblocking(False)
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(connection, (self._crowd.host, self._crowd.port))
        except OSError:
            connection.close()
            raise
        return connection

    async def _silent(self, connection: socket.socket) -> None:
        await asyncio.get_running_loop().sock_recv(connection, 4096)

    async def _half_a_header(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Ty")
        await loop.sock_recv(connection, 4096)

    async def _kept_alive(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await loop.sock_sendall(connection, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if not await loop.sock_recv(connection, 4096):
                return
            await asyncio.sleep(KEEP_ALIVE_SECONDS)

    async def _slow(self, body: bytes) -> None:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._crowd.api_key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        while True:
            with suppress(OSError):
                async with self._dialling:
                    connection = await self._dialled(RECEIVE_BYTES)
                with connection:
                    await loop.sock_sendall(connection, head.encode() + body)
                    if b" 200 " in await loop.sock_recv(connection, 16):
                        await self._sip(connection)
                    else:
                        self.num_refused += 1
            await asyncio.sleep(REOPEN_SECONDS)

    async def _sip(self, connection: socket.socket) -> None:
        self.num_streaming += 1
        try:
            while await asyncio.get_running_loop().sock_recv(connection, SIP_BYTES):
                await asyncio.sleep(SIP_SECONDS)
        finally:
            self.num_streaming -= 1


@dataclass(frozen=True)
class Rates:
    """Tokens per second of the normal clients in each round."""

    alone: Sequence[float]
    beside: Sequence[float]
    idle: int
    """Connected when the last round beside the crowd began."""
    slow: int

    @property
    def share(self) -> float:
        return statistics.median(self.beside) / statistics.median(self.alone)


def raise_file_limit() -> None:
    """Lets this process have as many connections as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def crowding(crowd: Crowd, settle: float) -> Iterator[tuple[int, int]]:
    """Runs the crowd; yields how many idle and slow clients are connected once it has settled."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--crowd", json.dumps(asdict(crowd))], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        ready = time.monotonic() + settle
        while True:
            idle, slow, refused = map(int, process.stdout.readline().split())
            if time.monotonic() > ready:
                break
        print(f"crowd: {idle} idle, {slow} slow, {refused} streams refused so far", flush=True)
        yield idle, slow
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        time.sleep(ALL_CLOSED_SECONDS)


@dataclass(frozen=True)
class Normal:
    """The clients whose goodput is measured: each sends one request after the other."""

    client: Client
    model: str
    vocab_size: int
    count: int
    tokens: int
    """Tokens of each answer."""

    def goodput(self, seconds: float, seed: int) -> float:
        """Chunks of text per second of all clients together; every token is a chunk unless it ends amid a character."""
        return asyncio.run(self._goodput(seconds, seed))

    async def _goodput(self, seconds: float, seed: int) -> float:
        random, stop = Random(seed), asyncio.Event()
        asks = [
            Ask(tuple(random.randrange(self.vocab_size) for _ in range(16)), self.tokens)
            for _ in range(self.count * MAX_REQUESTS)
        ]
        asyncio.get_running_loop().call_later(seconds, stop.set)
        result = await run_load(
            self.client,
            asks,
            model=self.model,
            sampling=Sampling(temperature=0.0, ignore_eos=True),
            arrivals=Arrivals(max_concurrency=self.count),
            retry=True,
            stop=stop,
        )
        if lost := {str(record.error) for record in result.with_outcome(RequestOutcome.FAILED)}:
            print(f"requests failed: {sorted(lost)[:3]}", flush=True)
        return sum(len(record.text_times) for record in result.records) / seconds


def measured(url: str, keys: Sequence[str], told: argparse.Namespace) -> Rates:
    """Alternates rounds alone and beside the crowd."""
    address = Address.parse(url)
    client = Client(address, keys[0])
    model = asyncio.run(find_model(client, None, 60.0))
    vocab_size = asyncio.run(find_vocabulary(client, 60.0)) or 1000
    normal = Normal(client, model, vocab_size, told.clients, told.tokens)
    crowd = Crowd(address.host, address.port, keys[1], told.idle, told.slow)
    alone, beside, crowds = list[float](), list[float](), list[tuple[int, int]]()
    normal.goodput(min(5.0, told.seconds), seed=-1)
    for number in range(told.rounds * ROUNDS_TRIED):
        stolen = StolenTime()
        rate_alone, stolen_alone = normal.goodput(told.seconds, 2 * number), stolen.share
        with crowding(crowd, told.settle) as found:
            stolen = StolenTime()
            rate_beside, stolen_beside = normal.goodput(told.seconds, 2 * number + 1), stolen.share
        print(
            f"round {number}: alone {rate_alone:.1f} tokens/s ({stolen_alone:.0%} of the time stolen), "
            f"beside {rate_beside:.1f} tokens/s ({stolen_beside:.0%})",
            flush=True,
        )
        if max(stolen_alone, stolen_beside) <= MOST_STOLEN:
            alone.append(rate_alone)
            beside.append(rate_beside)
            crowds.append(found)
        if len(alone) == told.rounds:
            break
    else:
        raise SystemExit(f"expected {told.rounds} quiet rounds, got {len(alone)}; try later")
    return Rates(alone, beside, *crowds[-1])


@contextmanager
def served(flags: Sequence[str]) -> Iterator[str]:
    """A server with two keys on a free port; yields its address."""
    command = [sys.executable, "-m", "sightline", "serve", "--port", "0", *flags]
    environment = {**os.environ, "SIGHTLINE_API_KEY": ",".join(KEYS)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if line.startswith("{") and (event := json.loads(line))["message"] == "open":
                    break
            else:
                raise SystemExit("expected the server to start, got an end")
            Thread(target=process.stderr.read, daemon=True).start()
            yield event["url"]
        finally:
            process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description="Goodput of normal clients beside idle and slow ones.")
    parser.add_argument("--base-url", help="a running server; one is started otherwise")
    parser.add_argument("--api-key", action="append", default=[], help="the normal clients' key, then the crowd's")
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--settle", type=float, default=30.0, help="seconds before the crowd counts")
    parser.add_argument("--least", type=float, default=0.9, help="goodput beside the crowd, relative to alone")
    parser.add_argument("--crowd", type=lambda text: Crowd(**json.loads(text)), help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="of `sightline serve`, after --")
    told = parser.parse_args()
    if told.crowd is not None:
        asyncio.run(CrowdClients(told.crowd).run())
    if told.base_url is not None:
        rates = measured(told.base_url, told.api_key, told)
    else:
        with served(told.flags) as url:
            rates = measured(url, KEYS, told)
    print(f"{rates.idle} idle and {rates.slow} slow clients: {rates.share:.3f} of the goodput alone")
    return 0 if rates.share >= told.least else 1


if __name__ == "__main__":
    sys.exit(main())
