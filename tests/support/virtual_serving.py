"""A server in virtual time: its answers cost the time that a script says, and no time passes otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from sightline.bench.serving.http_stream import Address, Client, Response
from sightline.bench.serving.load import LoadResult, run_load
from sightline.bench.serving.work import Arrivals, Ask


@dataclass
class VirtualTime:
    """A clock that only `sleep` and scripted answers move."""

    now: float = 100.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await _yield(0)
        self.slept.append(seconds)
        self.now += seconds


@dataclass(frozen=True)
class TimedAnswer:
    """One answer: its parts, each with the seconds that it takes, and the seconds of closing the connection."""

    parts: Sequence[tuple[float, bytes]]
    status: int = 200
    retry_after: str | None = None
    closing: float = 0.0


class _TimedResponse(Response):
    def __init__(self, answer: TimedAnswer, time: VirtualTime) -> None:
        self.status = answer.status
        self.headers = {"content-type": "text/event-stream"}
        if answer.retry_after is not None:
            self.headers["retry-after"] = answer.retry_after
        self._parts, self._time = iter(answer.parts), time

    async def read_some(self) -> bytes:
        seconds, content = next(self._parts, (0.0, b""))
        self._time.now += seconds
        return content


class VirtualClient(Client):
    """Gives the answers in order, the last one again and again."""

    def __init__(self, answers: Sequence[TimedAnswer], time: VirtualTime) -> None:
        super().__init__(Address.parse("http://virtual"))
        self._answers, self._time = list(answers), time

    @asynccontextmanager
    async def exchange(self, method: str, path: str, body: bytes | None = None) -> AsyncIterator[Response]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        yield _TimedResponse(answer, self._time)
        self._time.now += answer.closing


_yield = asyncio.sleep


def virtual_load(
    monkeypatch: pytest.MonkeyPatch,
    answers: Sequence[TimedAnswer],
    count: int = 1,
    *,
    arrivals: Arrivals | None = None,
    retry: bool = False,
    timeout: float = 600.0,
) -> tuple[LoadResult, VirtualTime]:
    """Sends `count` requests, and returns what became of them and the time that passed."""
    time = VirtualTime()
    monkeypatch.setattr("sightline.bench.serving.load.asyncio.sleep", time.sleep)
    asks = [Ask((number,), 3) for number in range(count)]
    loading = run_load(
        VirtualClient(answers, time), asks, model="m", arrivals=arrivals, retry=retry, timeout=timeout, clock=time
    )
    return asyncio.run(loading), time
