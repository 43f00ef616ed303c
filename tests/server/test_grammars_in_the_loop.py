"""The engine process compiles grammars beside its loop: others go on, and what cannot be held is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from sightline import LLM, SamplingParams
from sightline.core.errors import RequestError
from sightline.core.request import Terms
from sightline.core.structured import StructuredOutputs
from sightline.engine.engine import Engine
from sightline.server.process.channel import Channel
from sightline.server.process.loop import GeneratingPurpose, PendingPrompts, Worker
from sightline.server.process.protocol import Accepted, Cancel, Ended, Refused
from sightline.structured import compiler as compiler_module
from sightline.structured.compiler import PendingGrammar
from sightline.structured.matcher import CompiledGrammar
from sightline.structured.turns import Compilation, CompileTurns, TurnLimits
from support.commands import submit
from support.tiny_served_model import save_tiny_served_model
from support.worker_front_end import FrontEnd

PLAIN = SamplingParams(temperature=0.0, max_tokens=6)
HELD = SamplingParams(temperature=0.0, max_tokens=6, structured_outputs=StructuredOutputs(regex="[a-c]{4}"))
WRONG = SamplingParams(structured_outputs=StructuredOutputs(json={"uniqueItems": True}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_served_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def front_end(folder: Path) -> Iterator[FrontEnd]:
    made = FrontEnd(LLM(str(folder), cache_tokens=512, page_size=4, max_queued_requests=8))
    yield made
    made.end()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Compiling waits until it is set."""
    event, original = threading.Event(), compiler_module.grammar_source

    def slow(constraint: StructuredOutputs) -> str:
        assert constraint.source.startswith("quick") or event.wait(20)
        return original(constraint)

    monkeypatch.setattr(compiler_module, "grammar_source", slow)
    yield event
    event.set()


def test_others_go_on_while_a_grammar_is_compiled(front_end: FrontEnd, gate: threading.Event) -> None:
    front_end.send(submit({1: (5, 6)}, HELD, Terms()), submit({2: (5, 6)}, PLAIN, Terms()))
    reports = front_end.until(Ended)
    assert {report.number for report in reports if isinstance(report, Accepted | Ended)} == {2}
    gate.set()
    assert {report.number for report in front_end.until(Ended) if isinstance(report, Accepted | Ended)} == {1}


def test_a_request_may_be_cancelled_before_its_grammar_is_there(front_end: FrontEnd, gate: threading.Event) -> None:
    front_end.send(submit({1: (5, 6)}, HELD, Terms()), Cancel(1))
    gate.set()
    front_end.send(submit({2: (5, 6)}, HELD, Terms()))
    assert {report.number for report in front_end.until(Ended) if isinstance(report, Accepted | Ended)} == {2}


def test_what_cannot_be_held_is_refused_and_nobody_else(front_end: FrontEnd) -> None:
    front_end.send(submit({1: (5, 6)}, WRONG, Terms()), submit({2: (5, 6)}, HELD, Terms()))
    reports = front_end.until(Ended)
    [refused] = [report for report in reports if isinstance(report, Refused)]
    assert (refused.number, refused.is_full) == (1, False)
    assert "'uniqueItems'" in refused.message
    assert [report.number for report in reports if isinstance(report, Ended)] == [2]


def _regex(text: str) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=6, structured_outputs=StructuredOutputs(regex=text))


def test_one_callers_slow_grammars_do_not_keep_another_waiting(front_end: FrontEnd, gate: threading.Event) -> None:
    slow = [submit({each: (5, 6)}, _regex(f"slow{each}"), Terms(caller="a")) for each in range(1, 7)]
    front_end.send(*slow, submit({7: (5, 6)}, _regex("quick"), Terms(caller="b")))
    assert {report.number for report in front_end.until(Ended) if isinstance(report, Ended)} == {7}
    gate.set()


def test_what_was_not_compiled_in_time_is_refused_though_another_waits_for_it_anew() -> None:
    """The loop would stand still while the one that was given up shares the wait of the new one."""
    turns, event = CompileTurns[CompiledGrammar](0.05, TurnLimits(num_threads=1)), threading.Event()
    turns.submit(Compilation(lambda: _never(event)), "")
    waiting = Compilation(lambda: _never(event))
    turns.submit(waiting, "")
    given_up = PendingGrammar(waiting, waiting.due_at[""])
    given_up.settle()
    turns.submit(waiting, "")
    pending = PendingPrompts(submit({1: (5, 6)}, HELD, Terms()), lambda _params, _caller: given_up)
    assert pending.is_ready
    purpose = _NoPurpose()
    worker = Worker(purpose, cast("Channel", None))
    worker._submit(*pending.take(), pending)
    [refused] = worker._outgoing
    assert isinstance(refused, Refused)
    assert "turn did not come" in refused.message
    event.set()
    turns.close()


class _NoPurpose(GeneratingPurpose):
    """Fails where a request reaches it."""

    def __init__(self) -> None:
        self.engine = cast("Engine", None)

    def submit(self, prompt: Sequence[int], params: SamplingParams | None, terms: Terms) -> str:
        raise AssertionError("submitted")


def _never(event: threading.Event) -> CompiledGrammar:
    event.wait(20)
    raise RequestError("never")
