"""Programs of records: their order, the threads that run them, and what is left of both afterwards."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sightline.kernels.cpu.compiled import compiled
from sightline.kernels.cpu.instructions import load64, store64
from sightline.kernels.cpu.program import CpuLauncher, Program, inline_launcher
from sightline.kernels.cpu.record import Record, float_bits
from sightline.kernels.cpu.team import Team

SIZE = 7


def make_shift() -> Callable[[Any, Any, Any], None]:
    """target[i] = source[i + 1] + 1: what a thread writes, another one reads in the next record."""

    def shift(arguments: Any, thread: Any, num_threads: Any) -> None:
        source, target, size = load64(arguments, 0), load64(arguments, 1), load64(arguments, 2)
        for index in range(thread, size, num_threads):
            store64(target, index, load64(source, (index + 1) % size) + 1)

    return shift


def make_count() -> Callable[[Any, Any, Any], None]:
    """Every thread writes its own number and how many there are to its own place."""

    def count(arguments: Any, thread: Any, num_threads: Any) -> None:
        store64(load64(arguments, 0), thread, thread * 100 + num_threads)

    return count


class Shifts:
    """Two arrays, and the records that shift one into the other."""

    def __init__(self) -> None:
        self.first = np.zeros(SIZE, dtype=np.int64)
        self.second = np.zeros(SIZE, dtype=np.int64)
        self.records = (self._record(self.first, self.second), self._record(self.second, self.first))

    def _record(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> Record:
        kernel = compiled(make_shift)
        arguments = np.array([source.ctypes.data, target.ctypes.data, SIZE], dtype=np.int64)
        return Record(kernel.address, arguments, (source, target, kernel), kernel.name)


@pytest.fixture(params=[1, 2, 3, 5])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    team = Team(request.param)
    yield team
    team.close()


def test_every_thread_finishes_a_record_before_any_begins_the_next(team: Team) -> None:
    shifts, launcher = Shifts(), CpuLauncher(team)
    program = Program(shifts.records * 200)
    for _ in range(3):
        launcher.run(program)
    assert shifts.first.tolist() == [1200] * SIZE


def test_a_record_is_run_by_all_threads_and_each_knows_its_number(team: Team) -> None:
    seen, kernel = np.zeros(8, dtype=np.int64), compiled(make_count)
    arguments = np.array([seen.ctypes.data], dtype=np.int64)
    CpuLauncher(team).launch(Record(kernel.address, arguments, (seen, kernel), kernel.name))
    count = team.num_threads
    assert seen.tolist() == [thread * 100 + count for thread in range(count)] + [0] * (8 - count)


def test_a_launch_outside_a_recording_has_run_when_it_returns(team: Team) -> None:
    shifts = Shifts()
    CpuLauncher(team).launch(shifts.records[0])
    assert shifts.second.tolist() == [1] * SIZE


def test_an_inline_launcher_runs_at_once_in_one_thread() -> None:
    shifts, launcher = Shifts(), inline_launcher()
    launcher.launch(shifts.records[0])
    assert (launcher.num_threads, shifts.second.tolist()) == (1, [1] * SIZE)


def test_a_recording_runs_nothing_and_its_program_runs_all_of_it(team: Team) -> None:
    shifts, launcher = Shifts(), CpuLauncher(team)
    with launcher.recording() as tape:
        for record in shifts.records:
            launcher.launch(record)
    assert shifts.first.tolist() == [0] * SIZE
    launcher.run(tape.program())
    assert shifts.first.tolist() == [2] * SIZE


def test_an_error_inside_a_recording_ends_it(team: Team) -> None:
    shifts, launcher = Shifts(), CpuLauncher(team)

    def failing_step() -> None:
        with launcher.recording():
            launcher.launch(shifts.records[0])
            raise KeyError

    with pytest.raises(KeyError):
        failing_step()
    assert shifts.second.tolist() == [0] * SIZE
    launcher.launch(shifts.records[0])
    assert shifts.second.tolist() == [1] * SIZE


def test_a_second_recording_in_the_same_thread_is_refused(team: Team) -> None:
    launcher = CpuLauncher(team)
    with launcher.recording(), pytest.raises(RuntimeError, match="one recording at a time"), launcher.recording():
        pass


def test_what_another_thread_launches_during_a_recording_runs(team: Team) -> None:
    shifts, launcher = Shifts(), CpuLauncher(team)
    with launcher.recording() as tape:
        other = threading.Thread(target=launcher.launch, args=(shifts.records[0],))
        other.start()
        other.join()
    assert (shifts.second.tolist(), tape.records) == ([1] * SIZE, [])


def test_an_empty_program_does_nothing(team: Team) -> None:
    CpuLauncher(team).run(Program(()))
    shifts = Shifts()
    CpuLauncher(team).run(Program(shifts.records))
    assert shifts.first.tolist() == [2] * SIZE


def test_callers_in_several_threads_take_turns(team: Team) -> None:
    launcher, all_shifts = CpuLauncher(team), [Shifts() for _ in range(3)]

    def run(shifts: Shifts) -> None:
        for _ in range(20):
            launcher.run(Program(shifts.records * 5))

    threads = [threading.Thread(target=run, args=(shifts,)) for shifts in all_shifts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [shifts.first.tolist() for shifts in all_shifts] == [[200] * SIZE] * 3


def test_a_program_keeps_what_its_records_use() -> None:
    program = Program(Shifts().records)
    gc.collect()
    team = Team(2)
    CpuLauncher(team).run(program)
    team.close()
    first = program.records[0].keeps[0]
    assert isinstance(first, np.ndarray)
    assert first.tolist() == [2] * SIZE


def test_an_idle_team_takes_no_processor_time() -> None:
    team, shifts = Team(3), Shifts()
    CpuLauncher(team).launch(shifts.records[0])
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    spent = time.process_time() - before
    CpuLauncher(team).launch(shifts.records[1])
    team.close()
    assert spent < 0.1
    assert shifts.first.tolist() == [2] * SIZE


def test_a_closed_team_runs_nothing_and_has_no_threads() -> None:
    team = Team(3)
    before = {thread for thread in threading.enumerate() if thread.name.startswith("sightline-kernels")}
    team.close()
    team.close()
    assert len(before) >= 2
    assert not any(thread.is_alive() for thread in before)
    with pytest.raises(RuntimeError, match="not closed"):
        CpuLauncher(team).launch(Shifts().records[0])


def test_a_team_that_nobody_has_ends_its_threads() -> None:
    team = Team(2)
    mine = {thread for thread in threading.enumerate() if thread.name.startswith("sightline-kernels")}
    del team
    gc.collect()
    assert mine
    assert not any(thread.is_alive() for thread in mine)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_gets_threads_of_its_own() -> None:
    team, shifts = Team(2), Shifts()
    launcher = CpuLauncher(team)
    launcher.launch(shifts.records[0])
    child = os.fork()
    if child == 0:
        launcher.run(Program(shifts.records * 3))
        os._exit(0 if shifts.first.tolist() == [6] * SIZE else 1)
    _, status = os.waitpid(child, 0)
    launcher.launch(shifts.records[1])
    team.close()
    assert os.waitstatus_to_exitcode(status) == 0
    assert shifts.first.tolist() == [2] * SIZE


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_during_a_program_does_not_wait_for_its_end() -> None:
    team, shifts = Team(2), Shifts()
    launcher = CpuLauncher(team)
    launcher.launch(shifts.records[0])
    with team._crew.lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            launcher.run(Program(shifts.records * 3))
            os._exit(0 if shifts.first.tolist() == [6] * SIZE else 1)
        _, status = os.waitpid(child, 0)
    team.close()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("count", [0, -1])
def test_a_team_of_no_threads_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="at least 1 thread"):
        Team(count)


def test_a_number_beyond_fp32_is_infinite() -> None:
    assert float_bits(1.0) == 0x3F800000
    assert float_bits(1e60) == float_bits(math.inf) == 0x7F800000
    assert float_bits(-1e60) == float_bits(-math.inf)
