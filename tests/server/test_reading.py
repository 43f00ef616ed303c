"""A client that reads too slowly pauses its own request, and nobody else's; none is left paused for ever."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
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
from sightline.server.process.window import ReadBatch, ReadCount, ReadWindow, UnreadLimit, unread_limit
from support.case_marks import proofs
from support.commands import UNBOUNDED, submit
from support.engines import is_at_rest
from support.tiny_models import make_model, random_prompts

MAX_UNREAD = 8
REPORTS = UnreadLimit(MAX_UNREAD, 1 << 20, 1 << 20)
"""Full after so many reports."""
CONTENTS = UnreadLimit(1000, 150, 150)
"""Full after a few reports, whose contents are about 30 bytes each."""
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


def serve_a_slow_reader(engine: Engine, n: int = 1, limit: UnreadLimit = REPORTS) -> FakeChannel:
    """Two prompts, the first of which is streamed to a client that reads nothing until nothing else happens, and then
    everything in batches. Checks what both get, and how much ever waits for the slow one."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True, logprobs=0, n=n)
    slow, other = prompts(2).items()
    num_read, num_waits, reads = 0, 0, ReadCount(limit)

    def say(channel: FakeChannel, wait: bool) -> list[Command]:
        nonlocal num_read, num_waits
        if channel.num_takes == 1:
            return [submit(dict([slow]), params, Terms(), limit), submit(dict([other]), params, Terms())]
        # A step in flight is reported after the pause, and a step gives every continuation a report.
        unread = channel.deltas(1)[num_read:]
        assert len(unread) <= limit.max_reports + 2 * n, "more reports wait than the window holds"
        contents = [delta.num_content_bytes for delta in unread]
        assert sum(contents[: -2 * n]) <= limit.max_bytes, "more bytes wait than the window holds"
        if not wait:
            return []
        if channel.ended(1):
            return [Stop()]
        assert channel.ended(2), "the other one waits for a client that reads nothing"
        num_waits += 1
        assert num_waits < 200, "a request that was read is not resumed"
        batches = [reads.read(num_bytes) for num_bytes in contents]
        num_read += len(contents)
        return [Read(1, *batch) for batch in batches if batch is not None]

    channel = work(engine, say)
    assert num_waits >= 40 * n // (MAX_UNREAD + 2 * n), "it never paused"
    for number in (1, 2):
        assert len(channel.ended(number)) == 1
        assert channel.ended(number)[0].error is None
    return channel


@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("n", [*proofs(1), 3])
@pytest.mark.parametrize("limit", [REPORTS, CONTENTS], ids=["by reports", "by bytes"])
def test_a_client_that_reads_nothing_stops_its_own_request_and_gets_all_of_it_when_it_reads(
    folder: Path, in_flight: bool, n: int, limit: UnreadLimit
) -> None:
    llm = tiny(folder, in_flight=in_flight)
    channel = serve_a_slow_reader(llm.engine, n, limit)
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
    patch.setattr(ReadWindow, "sent", lambda window, num_bytes: False)


def count_reports_only(patch: pytest.MonkeyPatch) -> None:
    """A window is full after so many reports, however large they are."""
    sent = ReadWindow.sent
    patch.setattr(ReadWindow, "sent", lambda window, num_bytes: sent(window, 0))


def never_resume(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReadWindow, "read", lambda window, count, num_bytes: False)


def forget_what_was_read(patch: pytest.MonkeyPatch) -> None:
    read = ReadWindow.read
    patch.setattr(ReadWindow, "read", lambda window, count, num_bytes: read(window, 0, 0))


def forget_the_bytes_that_were_read(patch: pytest.MonkeyPatch) -> None:
    read = ReadWindow.read
    patch.setattr(ReadWindow, "read", lambda window, count, num_bytes: read(window, count, 0))


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
    let_the_queue_grow: (REPORTS, "more reports wait than the window holds"),
    count_reports_only: (CONTENTS, "more bytes wait than the window holds"),
    never_resume: (REPORTS, "is not resumed"),
    forget_what_was_read: (REPORTS, "is not resumed"),
    forget_the_bytes_that_were_read: (CONTENTS, "is not resumed"),
    pause_everybody: (REPORTS, "the other one waits"),
    stay_busy: (REPORTS, "the loop never comes to rest"),
}


@pytest.mark.parametrize(
    ("plant", "limit", "finding"),
    [(plant, *found) for plant, found in BUGS.items()],
    ids=[plant.__name__ for plant in BUGS],
)
def test_a_planted_bug_of_the_window_is_found(
    folder: Path,
    plant: Callable[[pytest.MonkeyPatch], None],
    limit: UnreadLimit,
    finding: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = tiny(folder).engine
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=finding):
        serve_a_slow_reader(engine, limit=limit)


def test_a_paused_request_ends_at_its_deadline_although_nothing_else_happens(folder: Path) -> None:
    now = 0.0
    llm = tiny(folder)
    engine = Engine(llm.engine.runtime, None, llm.engine.generation, llm.engine.ledger, lambda: now)

    def say(channel: FakeChannel, wait: bool) -> list[Command]:
        nonlocal now
        if channel.num_takes == 1:
            return [submit(prompts(1), PARAMS, Terms(timeout=30.0), REPORTS)]
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
            return [submit(prompts(1), PARAMS, Terms(), REPORTS)]
        if not wait:
            return []
        if len(channel.waits) == 2:
            assert channel.num_paused == 1
            return [Cancel(1), Read(1, 4, 90), Read(7, 1, 20)]
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
            return [submit(prompts(1), PARAMS, Terms(), REPORTS)]
        if not wait:
            return []
        steps.append([each.metrics.steps for each in channel.reports if isinstance(each, Progress)][-1])
        return [Probe()] if len(steps) == 1 else [Stop()]

    channel = work(tiny(folder).engine, say)
    assert steps[1] > steps[0]
    assert len(channel.deltas(1)) == MAX_UNREAD


limits = st.builds(
    lambda max_reports, first_bytes, more: UnreadLimit(max_reports, first_bytes, first_bytes + more),
    st.integers(1, 200),
    st.integers(1, 300),
    st.integers(0, 3000),
)


@given(limits, st.lists(st.tuples(st.integers(0, 12), st.integers(0, 90)), max_size=60))
def test_a_window_pauses_where_it_is_full_and_a_client_that_reads_all_is_never_left_paused(
    limit: UnreadLimit, reads: list[tuple[int, int]]
) -> None:
    """(how many reports the client reads next, the size of those that are sent before)."""
    window, client = ReadWindow(limit), ReadCount(limit)
    is_paused, num_told, told_bytes = False, 0, 0
    sent, unread = list[int](), deque[int]()
    for step, (count, size) in enumerate([*reads, (10**6, 50)]):
        num_before = len(sent)
        while not is_paused and len(sent) - num_before < (7 if step < len(reads) else 3 * limit.max_reports):
            is_paused = window.sent(size)
            sent.append(size)
            unread.append(size)
        waiting = sent[num_told:]
        is_full = len(waiting) >= limit.max_reports or sum(waiting) >= limit.num_bytes(told_bytes)
        assert is_paused or not is_full
        assert len(waiting) <= limit.max_reports
        assert sum(waiting[:-1]) < max(limit.num_bytes(told_bytes), 1) or sum(waiting[:-1]) == 0
        for _ in range(min(count, len(unread))):
            if (batch := client.read(unread.popleft())) is not None:
                num_told += batch.num_reports
                told_bytes += batch.num_bytes
                if window.read(*batch):
                    assert is_paused
                    assert 2 * len(sent[num_told:]) <= limit.max_reports
                    assert 2 * sum(sent[num_told:]) <= limit.num_bytes(told_bytes)
                    is_paused = False
    assert not is_paused, "everything was read"


def test_more_may_be_read_than_was_sent() -> None:
    window = ReadWindow(UnreadLimit(2, 99, 99))
    assert not window.read(9, 9)
    assert [window.sent(1), window.sent(1), window.sent(1)] == [False, True, False]
    assert [window.read(1, 1), window.read(1, 1), window.read(1, 1)] == [False, True, False]


def test_a_resumed_request_sends_only_what_is_left_of_its_window() -> None:
    window = ReadWindow(UnreadLimit(8, 99, 99))
    assert [window.sent(1) for _ in range(8)] == [False] * 7 + [True]
    assert [window.read(2, 2), window.read(2, 2)] == [False, True]
    num_sent = next(count for count in range(1, 100) if window.sent(1))
    assert num_sent == 4, f"unread reports are forgotten when a request is resumed: 4 of 8 are left, {num_sent} go out"


def test_a_window_of_large_reports_is_full_soon_and_grows_with_what_is_read() -> None:
    scored, plain = 21 * 24, 10
    limit = unread_limit(1, scored)
    window = ReadWindow(limit)
    num_sent = next((count for count in range(1, 65) if window.sent(scored)), 64)
    assert num_sent < 64, "large reports fill no window"
    assert num_sent == 3, "a client that has read nothing has a large window"
    assert window.read(3, 3 * scored)
    for _ in range(400):
        assert not window.sent(scored)
        window.read(1, scored)
    assert next(count for count in range(1, 100) if window.sent(scored)) == 33
    window = ReadWindow(limit)
    assert next(count for count in range(1, 100) if window.sent(plain)) == 64


def test_what_was_read_is_told_in_batches_of_a_quarter_of_a_window() -> None:
    reads = ReadCount(UnreadLimit(8, 400, 800))
    assert [reads.read(1) for _ in range(4)] == [None, ReadBatch(2, 2), None, ReadBatch(2, 2)]
    assert [reads.read(60), reads.read(60)] == [None, ReadBatch(2, 120)]
    assert reads.read(104) is None, "a quarter of what may wait after so much was read"
    assert reads.read(4) == ReadBatch(2, 108)


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


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, {}),
        (REPORTS, {Read(1, 2, 4): 4}),
        (UnreadLimit(64, 99, 99), {}),
        (UnreadLimit(64, 10, 10), {Read(1, 2, 4): 4}),
    ],
)
def test_the_engine_is_told_what_a_client_has_read_in_batches(
    limit: UnreadLimit | None, expected: dict[Command, int]
) -> None:
    port, writer = EnginePort(_Meter()), _Writer()  # type: ignore[arg-type]
    port._writer, port._commands = writer, _Codec()  # type: ignore[assignment]
    port._open.set()

    async def run() -> None:
        answers = port.submit([b""], b"", Terms(), 0.0, UNBOUNDED, limit)
        for _ in range(9):
            port._take(Delta(1, 0, "x", 1, None), 0.0)
        assert not writer.sent, "nothing was read"
        await _read(answers, 9)

    asyncio.run(run())
    assert writer.sent == expected


def test_a_report_that_its_reader_still_handles_is_not_read() -> None:
    told: list[Read] = []

    async def run() -> None:
        answers = Answers({1: 3}, 0.0, UNBOUNDED, told.append, REPORTS)
        for _ in range(3):
            answers.put(Delta(1, 0, "x", 1, None))
        reports = answers.reports()
        await anext(reports)
        await anext(reports)
        assert not told, "a report is acknowledged before its event is sent"
        await anext(reports)
        assert told == [Read(1, 2, 4)]

    asyncio.run(run())


def test_nothing_is_told_of_a_request_that_is_over() -> None:
    port, writer = EnginePort(_Meter()), _Writer()  # type: ignore[arg-type]
    port._writer, port._commands = writer, _Codec()  # type: ignore[assignment]
    port._open.set()

    async def run() -> None:
        answers = port.submit([b""], b"", Terms(), 0.0, UNBOUNDED, UnreadLimit(16, 99, 99))
        for _ in range(9):
            port._take(Delta(1, 0, "x", 1, None), 0.0)
        port._take(Ended(1, None, 0, PhaseSeconds(0.0), None), 0.0)
        assert [type(report) async for _, report in answers.reports()] == [*[Delta] * 9, Ended]

    asyncio.run(run())
    assert not writer.sent
