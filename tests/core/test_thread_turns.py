"""Turns come in order, one drives for all, and whatever ends a turn, somebody goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import pytest

from sightline.core import turns as module
from sightline.core.turns import ThreadTurn, Turns, is_gone
from support.threads import Background, Hold, together, until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def only_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether it was forgotten: who is not woken hangs."""
    monkeypatch.setattr(module, "CHECK_SECONDS", 1000.0)


def queued(turns: Turns, count: int) -> Callable[[], bool]:
    return lambda: len(turns._queue) == count


def asleep(turns: Turns, count: int) -> Callable[[], bool]:
    return lambda: len(turns._asleep) == count


def is_empty(turns: Turns) -> bool:
    return turns._inside is None and turns._driver is None and not turns._queue and not turns._asleep


def test_one_at_a_time_in_the_order_in_which_they_came() -> None:
    turns, hold, seen = Turns(), Hold(), list[int]()
    first = Background(lambda: turns.run(lambda _: hold()))
    hold.until_entered()
    others = []
    for index in range(5):
        others.append(Background(lambda index=index: turns.run(lambda _: seen.append(index))))  # type: ignore[misc]
        until(queued(turns, index + 1))
    assert seen == []
    hold.let_go()
    for each in (first, *others):
        each.result()
    assert seen == list(range(5))
    assert is_empty(turns)


def test_a_call_within_a_call_of_the_same_thread_runs_at_once() -> None:
    turns = Turns()
    assert turns.run(lambda _: turns.run(lambda _: turns.run(lambda turn: turn.is_nested)))
    assert is_empty(turns)


def test_a_nested_call_drives_without_giving_way() -> None:
    turns, count = Turns(), [0]

    def drive() -> None:
        count[0] += 1
        time.sleep(0.02)
        assert not waiting[0].is_done

    def nested(turn: ThreadTurn) -> None:
        turns.drive_until(turn, lambda: count[0] >= 3, drive)

    def work(_turn: ThreadTurn) -> None:
        waiting.append(Background(lambda: turns.run(lambda _: count[0])))
        until(queued(turns, 1))
        turns.run(nested)

    waiting: list[Background[int]] = []
    turns.run(work)
    assert waiting[0].result() == 3
    assert is_empty(turns)


class Counter:
    """Counts pieces of work; each of several threads waits for a number."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.count = 0
        self.drivers: list[str] = []
        self.before: Callable[[], None] = lambda: None

    def work(self) -> None:
        self.before()
        self.count += 1
        self.drivers.append(threading.current_thread().name)

    def wait_for(self, number: int) -> int:
        """What the count was when the thread had its turn again."""

        def wait(turn: ThreadTurn) -> int:
            self.turns.drive_until(turn, lambda: self.count >= number, self.work)
            return self.count

        return self.turns.run(wait)


def test_each_is_woken_when_it_is_ready_and_the_driver_goes_on() -> None:
    counter, hold = Counter(), Hold()
    counter.before = hold
    driver = Background(lambda: counter.wait_for(6), "driver")
    hold.until_entered()
    others = [Background(lambda number=number: counter.wait_for(number)) for number in (2, 4)]  # type: ignore[misc]
    until(queued(counter.turns, 2))
    hold.let_go()
    assert [each.result() for each in (*others, driver)] == [2, 4, 6], "each at its own number, not later"
    assert counter.drivers == ["driver"] * 6
    assert is_empty(counter.turns)


def test_when_the_driver_ends_a_sleeper_drives_on() -> None:
    counter, hold = Counter(), Hold()
    counter.before = hold
    driver = Background(lambda: counter.wait_for(2), "driver")
    hold.until_entered()
    others = [Background(lambda: counter.wait_for(5), "next"), Background(lambda: counter.wait_for(5), "last")]
    until(queued(counter.turns, 2))
    hold.let_go()
    assert [each.result() for each in (driver, *others)] == [2, 5, 5]
    assert counter.drivers[:2] == ["driver"] * 2
    assert len(counter.drivers) == 5
    assert is_empty(counter.turns)


def test_callers_that_never_wait_do_not_keep_the_driver_from_driving() -> None:
    counter, visitors = Counter(), list[Background[None]]()

    def is_ready() -> bool:
        """Whenever the driver looks, somebody waits for a turn."""
        visitors.append(Background(lambda: counter.turns.run(lambda _: None)))
        until(lambda: len(counter.turns._queue) > 0)
        assert len(visitors) < 50, "everybody but the driver had a turn"
        return counter.count >= 5

    counter.turns.run(lambda turn: counter.turns.drive_until(turn, is_ready, counter.work))
    for each in visitors:
        each.result()
    assert counter.count == 5
    assert is_empty(counter.turns)


def test_an_error_of_the_work_reaches_all_that_wait_for_it() -> None:
    counter, hold, failed = Counter(), Hold(), list[bool]()

    def fail() -> None:
        hold()
        if counter.count == 2 and not failed:
            failed.append(True)
            raise OSError("no such work")

    counter.before = fail
    threads = [Background(lambda: counter.wait_for(9), "driver")]
    hold.until_entered()
    threads += [Background(lambda: counter.wait_for(9)) for _ in range(3)]
    until(queued(counter.turns, 3))
    hold.let_go()
    for each in threads:
        with pytest.raises(OSError, match="no such work"):
            each.result()
    assert counter.count == 2
    assert is_empty(counter.turns)


def test_an_interruption_of_the_work_is_the_drivers_alone() -> None:
    counter, hold = Counter(), Hold()

    def interrupt() -> None:
        if counter.count == 2 and threading.current_thread().name == "driver":
            raise KeyboardInterrupt
        hold()

    counter.before = interrupt
    driver = Background(lambda: counter.wait_for(9), "driver")
    hold.until_entered()
    other = Background(lambda: counter.wait_for(9))
    until(queued(counter.turns, 1))
    hold.let_go()
    with pytest.raises(KeyboardInterrupt):
        driver.result()
    assert other.result() == 9
    assert is_empty(counter.turns)


def test_a_condition_that_raises_is_its_own_callers_error() -> None:
    counter, hold = Counter(), Hold()
    counter.before = hold

    def bad() -> bool:
        if counter.count == 2:
            raise LookupError("gone")
        return False

    driver = Background(lambda: counter.wait_for(5))
    hold.until_entered()
    other = Background(lambda: counter.turns.run(lambda turn: counter.turns.drive_until(turn, bad, counter.work)))
    until(queued(counter.turns, 1))
    hold.let_go()
    assert driver.result() == 5
    with pytest.raises(LookupError, match="gone"):
        other.result()
    assert is_empty(counter.turns)


def test_a_turn_that_could_not_pass_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Ctrl-C had come before the end of a turn was told: its threads wait, a sleeper among them."""
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.05)
    counter, hold = Counter(), Hold()
    counter.before = hold
    leave = counter.turns._leave

    def interrupted(turn: ThreadTurn) -> None:
        if turn.thread.name != "driver":
            leave(turn)

    monkeypatch.setattr(counter.turns, "_leave", interrupted)
    driver = Background(lambda: counter.wait_for(2), "driver")
    hold.until_entered()
    other = Background(lambda: counter.wait_for(4))
    until(queued(counter.turns, 1))
    hold.let_go()
    assert driver.result() == 2
    assert other.result() == 4
    assert counter.wait_for(5) == 5


def test_the_thread_whose_turn_could_not_pass_on_comes_in_at_once() -> None:
    turns, lost = Turns(), ThreadTurn()
    lost.is_over, turns._inside = True, lost
    assert turns.run(lambda turn: not turn.is_nested)
    assert is_empty(turns)


def test_a_turn_of_a_thread_that_is_gone_is_over() -> None:
    turns = Turns()
    thread = threading.Thread(target=lambda: turns._enter(ThreadTurn()))
    thread.start()
    thread.join()
    assert is_gone(thread)
    assert not is_gone(threading.main_thread())
    assert turns._inside is not None
    assert turns.run(lambda _: "mine") == "mine"


def test_ctrl_c_at_any_moment_of_the_main_thread_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.02)
    counter, stop, raised = Counter(), threading.Event(), 0

    def interrupt(_number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is Turns.run.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    def send() -> None:
        while not stop.wait(0.0003):
            os.kill(os.getpid(), signal.SIGINT)

    def count_on() -> int:
        calls = 0
        while not stop.is_set():
            counter.wait_for(counter.count + 2)
            calls += 1
        return calls

    previous = signal.signal(signal.SIGINT, interrupt)
    others = [Background(count_on) for _ in range(2)]
    sender = Background(send)
    try:
        while raised < 300:
            try:
                counter.wait_for(counter.count + 1)
            except KeyboardInterrupt:
                raised += 1
    finally:
        stop.set()
        until(lambda: sender.is_done)
        signal.signal(signal.SIGINT, previous)
    assert all(other.result() > 0 for other in others)
    assert counter.wait_for(counter.count + 1)


def test_many_threads_get_what_they_wait_for() -> None:
    counter = Counter()

    def work(index: int) -> None:
        for _ in range(40):
            wanted = counter.count + index % 3
            assert counter.wait_for(wanted) >= wanted

    together([lambda index=index: work(index) for index in range(8)])  # type: ignore[misc]
    assert is_empty(counter.turns)
