"""A client that reads too slowly pauses its own request, and nobody else's; none is left paused for ever."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline import LLM, SamplingParams
from sightline.core.metrics import PhaseSeconds
from sightline.core.request import Terms
from sightline.engine.engine import Engine
from sightline.server.process.loop import GeneratingPurpose, Worker
from sightline.server.process.port import Answers, EnginePort
from sightline.server.process.protocol import (
    Cancel,
    Command,
    Delta,
    Ended,
    Probe,
    Progress,
    Read,
    Report,
    Stop,
    read_scored_tokens,
)
from sightline.server.process.window import ReadWindow, read_batch
from support.commands import UNBOUNDED, submit
from support.engines import is_at_rest
from support.tiny_models import make_model, random_prompts

MAX_UNREAD = 8
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
MAX_TAKES = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(path)
    return path


def tiny(folder: Path, *, in_flight: bool = False) -> LLM:
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        cache_tokens=512,
        page_size=4,
        max_queued_requests=8,
        async_scheduling=in_flight,
    )


class FakeChannel:
    """A front end that decides what it says from what it has heard, without a socket or a thread."""

    def __init__(self, say: Callable[[FakeChannel, bool], list[Command]]) -> None:
        self._say = say
        self.reports: list[Report] = []
        self.num_takes = 0
        self.waits: list[float | None] = []
        """How long each wait might have been."""

    def take(self, *, wait: bool, seconds: float | None = None) -> list[Command]:
        self.num_takes += 1
        assert self.num_takes <= MAX_TAKES, "the loop never comes to rest"
        if wait:
            self.waits.append(seconds)
        return self._say(self, wait)

    def send(self, reports: Sequence[Report]) -> None:
        self.reports += reports

    def deltas(self, number: int) -> list[Delta]:
        return [report for report in self.reports if isinstance(report, Delta) and report.number == number]

    def tokens(self, number: int, index: int = 0) -> list[int]:
        found = [delta for delta in self.deltas(number) if delta.index == index]
        scored = [token for delta in found for token in read_scored_tokens(delta.logprobs or b"\x90")]
        return [token.scores[0].token for token in scored]

    def ended(self, number: int) -> list[Ended]:
        return [report for report in self.reports if isinstance(report, Ended) and report.number == number]

    @property
    def num_paused(self) -> int:
        """As the last report of the engine's state says."""
        return [each.metrics.num_requests_paused for each in self.reports if isinstance(each, Progress)][-1]


def work(engine: Engine, say: Callable[[FakeChannel, bool], list[Command]]) -> FakeChannel:
    channel = FakeChannel(say)
    Worker(GeneratingPurpose(engine), channel).run()  # type: ignore[arg-type]
    return channel


def prompts(count: int) -> dict[int, tuple[int, ...]]:
    return {number: tuple(prompt) for number, prompt in enumerate(random_prompts([9] * count), 1)}


def serve_a_slow_reader(engine: Engine, n: int = 1) -> FakeChannel:
    """Two prompts, the first of which is streamed to a client that reads nothing until nothing else happens, and then
    everything in batches. Checks what both get, and how much ever waits for the slow one."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True, logprobs=0, n=n)
    slow, other = prompts(2).items()
    num_read, num_waits = 0, 0

    def say(channel: FakeChannel, wait: bool) -> list[Command]:
        nonlocal num_read, num_waits
        if channel.num_takes == 1:
            return [submit(dict([slow]), params, Terms(), MAX_UNREAD), submit(dict([other]), params, Terms())]
        # A step in flight is reported after the pause, and a step gives every continuation a report.
        assert len(channel.deltas(1)) - num_read <= MAX_UNREAD + 2 * n, "more reports wait than the window holds"
        if not wait:
            return []
        if channel.ended(1):
            return [Stop()]
        assert channel.ended(2), "the other one waits for a client that reads nothing"
        num_waits += 1
        assert num_waits < 200, "a request that was read is not resumed"
        batch = read_batch(MAX_UNREAD)
        count = (len(channel.deltas(1)) - num_read) // batch
        num_read += count * batch
        return [Read(1, batch)] * count

    channel = work(engine, say)
    assert num_waits >= 40 * n // (MAX_UNREAD + 2 * n), "it never paused"
    for number in (1, 2):
        assert len(channel.ended(number)) == 1
        assert channel.ended(number)[0].error is None
    return channel


@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_reads_nothing_stops_its_own_request_and_gets_all_of_it_when_it_reads(
    folder: Path, in_flight: bool, n: int
) -> None:
    llm = tiny(folder, in_flight=in_flight)
    channel = serve_a_slow_reader(llm.engine, n)
    plain = work(
        tiny(folder).engine,
        lambda each, wait: (
            [submit(prompts(2), SamplingParams(0.7, seed=3, max_tokens=40, ignore_eos=True, logprobs=0, n=n), Terms())]
            if each.num_takes == 1
            else [Stop()] * (len(each.ended(1)) and len(each.ended(2)))
        ),
    )
    for number in (1, 2):
        for index in range(n):
            assert len(channel.tokens(number, index)) == 40
            assert channel.tokens(number, index) == plain.tokens(number, index)
    llm.engine.close()
    assert is_at_rest(llm), "rows or pages of a paused request are left behind"


def let_the_queue_grow(patch: pytest.MonkeyPatch) -> None:
    """The window is ignored."""
    patch.setattr(ReadWindow, "sent", lambda window: False)


def never_resume(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReadWindow, "read", lambda window, count: False)


def forget_what_was_read(patch: pytest.MonkeyPatch) -> None:
    read = ReadWindow.read
    patch.setattr(ReadWindow, "read", lambda window, count: read(window, 0))


def pause_everybody(patch: pytest.MonkeyPatch) -> None:
    pause = Engine.pause

    def all_of_them(engine: Engine, request_id: str) -> None:
        for each in tuple(engine._live):
            pause(engine, each)

    patch.setattr(Engine, "pause", all_of_them)


def stay_busy(patch: pytest.MonkeyPatch) -> None:
    """The loop does not wait while requests are paused."""
    patch.setattr(Engine, "has_work", property(lambda engine: bool(engine._live)))


BUGS = {
    let_the_queue_grow: "more reports wait than the window holds",
    never_resume: "is not resumed",
    forget_what_was_read: "is not resumed",
    pause_everybody: "the other one waits",
    stay_busy: "the loop never comes to rest",
}


@pytest.mark.parametrize(("plant", "finding"), BUGS.items(), ids=[plant.__name__ for plant in BUGS])
def test_a_planted_bug_of_the_window_is_found(
    folder: Path, plant: Callable[[pytest.MonkeyPatch], None], finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny(folder).engine
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=finding):
        serve_a_slow_reader(engine)


def test_a_paused_request_ends_at_its_deadline_although_nothing_else_happens(folder: Path) -> None:
    now = 0.0
    llm = tiny(folder)
    engine = Engine(llm.engine.runtime, None, llm.engine.generation, llm.engine.ledger, lambda: now)

    def say(channel: FakeChannel, wait: bool) -> list[Command]:
        nonlocal now
        if channel.num_takes == 1:
            return [submit(prompts(1), PARAMS, Terms(timeout=30.0), MAX_UNREAD)]
        if wait and not channel.ended(1):
            assert channel.num_paused == 1
            # What a wait that is over looks like.
            now += channel.waits[-1] or 0.0
        return [Stop()] if channel.ended(1) else []

    channel = work(engine, say)
    assert channel.waits == [None, 30.0, None]
    assert "expected an end within 30 s" in (channel.ended(1)[0].error or "")
    assert channel.deltas(1)[-1].finish_reason == "abort"
    assert channel.num_paused == 0
    engine.close()


def test_a_paused_request_can_be_cancelled_and_is_not_heard_of_again(folder: Path) -> None:
    llm = tiny(folder)

    def say(channel: FakeChannel, wait: bool) -> list[Command]:
        if channel.num_takes == 1:
            return [submit(prompts(1), PARAMS, Terms(), MAX_UNREAD)]
        if not wait:
            return []
        if len(channel.waits) == 2:
            assert channel.num_paused == 1
            return [Cancel(1), Read(1, 4), Read(7, 1)]
        assert channel.num_paused == 0, "no step reports it"
        return [Stop()]

    channel = work(llm.engine, say)
    assert not channel.ended(1)
    assert len(channel.deltas(1)) == MAX_UNREAD
    assert is_at_rest(llm)


def test_a_probe_makes_a_step_where_all_that_is_left_is_paused(folder: Path) -> None:
    steps: list[int] = []

    def say(channel: FakeChannel, wait: bool) -> list[Command]:
        if channel.num_takes == 1:
            return [submit(prompts(1), PARAMS, Terms(), MAX_UNREAD)]
        if not wait:
            return []
        steps.append([each.metrics.steps for each in channel.reports if isinstance(each, Progress)][-1])
        return [Probe()] if len(steps) == 1 else [Stop()]

    channel = work(tiny(folder).engine, say)
    assert steps[1] > steps[0]
    assert len(channel.deltas(1)) == MAX_UNREAD


@given(st.integers(1, 200), st.lists(st.integers(0, 12), max_size=60))
def test_a_window_pauses_where_it_is_full_and_a_client_that_reads_all_is_never_left_paused(
    max_unread: int, reads: list[int]
) -> None:
    window, is_paused, num_sent, num_read, num_told = ReadWindow(max_unread), False, 0, 0, 0
    batch = read_batch(max_unread)
    for step, count in enumerate([*reads, 10**6]):
        while not is_paused and (step < len(reads) or num_sent < 3 * max_unread):
            is_paused = window.sent()
            num_sent += 1
            if num_sent % 7 == 0:
                break
        assert num_sent - num_told <= max_unread
        assert is_paused or num_sent - num_told < max_unread
        num_read = min(num_sent, num_read + count)
        while num_read - num_told >= batch:
            num_told += batch
            if window.read(batch):
                assert is_paused
                assert num_sent - num_told <= max_unread // 2
                is_paused = False
    assert not is_paused, "everything was read"


def test_more_may_be_read_than_was_sent() -> None:
    window = ReadWindow(2)
    assert not window.read(9)
    assert [window.sent(), window.sent(), window.sent()] == [False, True, False]
    assert [window.read(1), window.read(1), window.read(1)] == [False, True, False]


def test_a_resumed_request_sends_only_what_is_left_of_its_window() -> None:
    window = ReadWindow(8)
    assert [window.sent() for _ in range(8)] == [False] * 7 + [True]
    assert [window.read(2), window.read(2)] == [False, True]
    num_sent = next(count for count in range(1, 100) if window.sent())
    assert num_sent == 4, f"unread reports are forgotten when a request is resumed: 4 of 8 are left, {num_sent} go out"


async def _read(answers: Answers, count: int) -> None:
    """Takes so many reports, and comes back for one more."""
    reports = answers.reports()
    for _ in range(count):
        await anext(reports)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(reports)


class _Writer:
    def __init__(self) -> None:
        self.sent: Counter[Command] = Counter()

    @property
    def transport(self) -> _Writer:
        return self

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, commands: Sequence[Command]) -> None:
        self.sent.update(command for command in commands if isinstance(command, Read))


class _Codec:
    def encode(self, commands: Sequence[Command]) -> Sequence[Command]:
        return commands


class _Meter:
    def observe(self, *_: object) -> None:
        """Counts nothing."""


@pytest.mark.parametrize(("max_unread", "expected"), [(None, {}), (8, {Read(1, 2): 4}), (64, {})])
def test_the_engine_is_told_what_a_client_has_read_in_batches(
    max_unread: int | None, expected: dict[Command, int]
) -> None:
    port, writer = EnginePort(_Meter()), _Writer()  # type: ignore[arg-type]
    port._writer, port._commands = writer, _Codec()  # type: ignore[assignment]
    port._open.set()

    async def run() -> None:
        answers = port.submit([b""], b"", Terms(), 0.0, UNBOUNDED, max_unread)
        for _ in range(9):
            port._take(Delta(1, 0, "x", 1, None), 0.0)
        assert not writer.sent, "nothing was read"
        await _read(answers, 9)

    asyncio.run(run())
    assert writer.sent == expected


def test_a_report_that_its_reader_still_handles_is_not_read() -> None:
    told: list[Read] = []

    async def run() -> None:
        answers = Answers({1: 3}, 0.0, UNBOUNDED, told.append, 2)
        for _ in range(3):
            answers.put(Delta(1, 0, "x", 1, None))
        reports = answers.reports()
        await anext(reports)
        await anext(reports)
        assert not told, "a report is acknowledged before its event is sent"
        await anext(reports)
        assert told == [Read(1, 2)]

    asyncio.run(run())


def test_nothing_is_told_of_a_request_that_is_over() -> None:
    port, writer = EnginePort(_Meter()), _Writer()  # type: ignore[arg-type]
    port._writer, port._commands = writer, _Codec()  # type: ignore[assignment]
    port._open.set()

    async def run() -> None:
        answers = port.submit([b""], b"", Terms(), 0.0, UNBOUNDED, 4)
        for _ in range(9):
            port._take(Delta(1, 0, "x", 1, None), 0.0)
        port._take(Ended(1, None, 0, PhaseSeconds(0.0), None), 0.0)
        assert [type(report) async for _, report in answers.reports()] == [*[Delta] * 9, Ended]

    asyncio.run(run())
    assert not writer.sent
