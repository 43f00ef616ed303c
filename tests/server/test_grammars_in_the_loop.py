"""The engine process compiles grammars beside its loop: others go on, and what cannot be held is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sightline import LLM, SamplingParams
from sightline.core.request import Terms
from sightline.core.structured import StructuredOutputs
from sightline.server.process.protocol import Accepted, Cancel, Ended, Refused
from sightline.structured import compiler as compiler_module
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
        assert event.wait(20)
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
