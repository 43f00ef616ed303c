"""Callers get turns to compile: one with slow work, or with much, does not keep the others waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count

import pytest

from sightline.core.errors import RequestError
from sightline.core.structured import StructuredOutputs
from sightline.structured import compiler as compiler_module
from sightline.structured.compiler import CompileLimits, GrammarCompiler
from sightline.structured.turns import Compilation, CompileTurns, TurnLimits
from support.answer_checks import byte_vocabulary

LIMITS = TurnLimits()
LONG = 20.0


class Gate:
    """Work that goes on once it is let."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.begun: list[str] = []

    def work(self, name: str) -> str:
        self.begun.append(name)
        assert self.event.wait(LONG)
        return name


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.event.set()


def _eventually(is_so: Callable[[], bool]) -> bool:
    until = time.monotonic() + LONG
    while not is_so() and time.monotonic() < until:
        time.sleep(0.002)
    return is_so()


def _queued(turns: CompileTurns[str], caller: str, work: Callable[[], str]) -> Compilation[str]:
    compilation = Compilation(work)
    turns.submit(compilation, caller)
    return compilation


def test_a_caller_with_nothing_running_does_not_wait_for_anothers_slow_work(gate: Gate) -> None:
    turns = CompileTurns[str](LONG)
    slow = [_queued(turns, "slow", partial(gate.work, f"slow {each}")) for each in range(20)]
    assert _eventually(lambda: len(gate.begun) == LIMITS.num_in_time)
    for caller in ("b", "c"):
        assert _queued(turns, caller, lambda: "done").result.result(LONG) == "done"
    assert len(gate.begun) == LIMITS.num_in_time
    gate.event.set()
    assert [each.result.result(LONG) for each in slow] == [f"slow {each}" for each in range(20)]
    turns.close()


def test_turns_go_round(gate: Gate) -> None:
    turns = CompileTurns[str](LONG, replace(LIMITS, num_threads=1))
    first = _queued(turns, "a", partial(gate.work, "first"))
    assert _eventually(lambda: gate.begun == ["first"])
    many = [_queued(turns, "a", partial(gate.work, f"a{each}")) for each in range(3)]
    others = [_queued(turns, "b", partial(gate.work, f"b{each}")) for each in range(3)]
    gate.event.set()
    for each in (first, *many, *others):
        each.result.result(LONG)
    assert gate.begun == ["first", "b0", "a0", "b1", "a1", "b2", "a2"]
    turns.close()


def test_work_beyond_its_time_leaves_its_place_and_no_caller_has_more_than_its_part(gate: Gate) -> None:
    turns = CompileTurns[str](0.05)
    late = [_queued(turns, "a", partial(gate.work, f"a{each}")) for each in range(20)]
    assert _eventually(lambda: len(gate.begun) == LIMITS.num_of_caller)
    for caller in map(str, range(20)):
        _queued(turns, caller, partial(gate.work, caller))
    assert _eventually(lambda: len(gate.begun) == LIMITS.num_threads)
    time.sleep(0.2)
    assert len(gate.begun) == LIMITS.num_threads
    assert sum(each.startswith("a") for each in gate.begun) == LIMITS.num_of_caller
    gate.event.set()
    # What nobody waits for any more is dropped when its turn comes.
    assert _eventually(lambda: all(each.result.done() for each in late))
    assert sum(each.is_dropped for each in late) == len(late) - LIMITS.num_of_caller
    assert _queued(turns, "a", lambda: "again").result.result(LONG) == "again"
    turns.close()


def test_work_for_several_callers_comes_in_the_first_turn_of_any_and_runs_once(gate: Gate) -> None:
    turns = CompileTurns[str](LONG, replace(LIMITS, num_of_caller=1))
    numbers = count()
    _queued(turns, "a", partial(gate.work, "first"))
    shared = Compilation(lambda: str(next(numbers)))
    _queued(turns, "a", partial(gate.work, "second"))
    turns.submit(shared, "a")
    turns.submit(shared, "b")
    assert shared.result.result(LONG) == "0"
    gate.event.set()
    assert _queued(turns, "a", lambda: "end").result.result(LONG) == "end"
    assert next(numbers) == 1
    turns.close()


def test_closing_drops_what_waits(gate: Gate) -> None:
    turns = CompileTurns[str](LONG, replace(LIMITS, num_threads=1))
    running, waiting = (_queued(turns, "a", partial(gate.work, name)) for name in ("running", "waiting"))
    assert _eventually(lambda: gate.begun == ["running"])
    turns.close()
    assert waiting.is_dropped
    gate.event.set()
    assert running.result.result(LONG) == "running"


@pytest.fixture
def compiler(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarCompiler]:
    """Grammars whose source begins with "slow" wait at the gate."""
    original = compiler_module.grammar_source

    def source(constraint: StructuredOutputs) -> str:
        if constraint.source.startswith("slow"):
            gate.work(constraint.source)
        return original(constraint)

    monkeypatch.setattr(compiler_module, "grammar_source", source)
    made = GrammarCompiler(byte_vocabulary, CompileLimits(seconds=1.0))
    made.warm_up()
    yield made
    made.close()


def _slow(number: int) -> StructuredOutputs:
    return StructuredOutputs(regex=f"slow{number}")


def test_what_waited_in_vain_is_told_apart_from_what_takes_long_and_may_be_sent_again(
    compiler: GrammarCompiler, gate: Gate
) -> None:
    pending = [compiler.prepare(_slow(each), "a") for each in range(8)]
    assert compiler.prepare(StructuredOutputs(regex="quick"), "b").result().matcher().mask().any()
    for each in pending:
        each.settle()
    for each in pending[:2]:
        with pytest.raises(RequestError, match="that take longer"):
            each.result()
    for each in pending[5:]:
        with pytest.raises(RequestError, match="turn did not come"):
            each.result()
    # Neither is waited for once more where it was given up, which would hold up the engine's loop.
    started = time.monotonic()
    for number in (0, 7):
        assert compiler.prepared(_slow(number), "a").is_settled
    assert time.monotonic() - started < 0.5
    gate.event.set()
    assert compiler.prepare(_slow(7), "a").result().matcher().mask().any()
    # What was dropped meanwhile is begun anew.
    assert _eventually(lambda: pending[5].compilation.is_dropped)
    for number in (5, 0):
        assert compiler.prepare(_slow(number), "a").result().matcher().mask().any()


def test_a_caller_that_asks_for_what_another_waits_for_has_a_turn_of_its_own(
    compiler: GrammarCompiler, gate: Gate
) -> None:
    for each in range(4):
        compiler.prepare(_slow(each), "a")
    wanted = StructuredOutputs(regex="quick")
    first = compiler.prepare(wanted, "a")
    second = compiler.prepare(wanted, "b")
    assert second.result() is first.result()
