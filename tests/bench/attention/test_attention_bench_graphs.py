"""What a graph holds is checked as what is launched, and timed beside it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from sightline.attention.backends.torch.backend import TorchBackend
from sightline.attention.capability import GraphLevel
from sightline.attention.selection import Candidate
from sightline.bench.attention import measure as attention_bench
from sightline.bench.attention.measure import Field, measure_shape
from sightline.bench.attention.peers import AttentionPeer
from sightline.bench.attention.results import ContenderState, Mode, Part, ShapeResult
from sightline.bench.attention.shapes import SHAPE_SETS
from sightline.bench.attention.timing import Between, Captured, Clock
from sightline.core.device import Device, DeviceKind
from support.attention_contenders import (
    MEASURED,
    QUICK,
    VirtualClock,
)


class ReplayedLayers:
    """Stands for a CUDA graph on a machine that has none."""

    def __init__(self, layers: Callable[[], Tensor], fault: Callable[[Tensor], object]) -> None:
        self._layers, self._fault = layers, fault

    def replay(self) -> None:
        self._fault(self._layers())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[Tensor], object]]:
    """A device that can capture; what is done to the output of every replay is under "fault"."""
    faults: dict[str, Callable[[Tensor], object]] = {"fault": lambda out: out}

    def capture(layer: Callable[[int], Tensor], num_layers: int, between: Between) -> Captured:
        def layers() -> Tensor:
            for index in range(num_layers):
                out = layer(index)
                between.launch()
            return out

        graph: Any = ReplayedLayers(layers, faults["fault"])
        return Captured(graph, layers(), num_layers, layer)

    monkeypatch.setattr(attention_bench, "capture", capture)
    monkeypatch.setattr(attention_bench, "clock_of", lambda device: Clock())
    monkeypatch.setattr(attention_bench, "count_layers", lambda shape, device: 3)
    return faults


CAPTURING = Device(DeviceKind.CUDA, torch.device("cpu"), "a device with graphs", (9, 0))


def captured_result(level: GraphLevel, peers: tuple[AttentionPeer, ...] = ()) -> ShapeResult:
    class Capturable(TorchBackend):
        capabilities = tuple(replace(row, graph=level) for row in TorchBackend.capabilities)

    candidate = Candidate.of("torch", Capturable, "tests", by_default=True)
    everybody = Field(CAPTURING, (candidate,), (candidate,), peers, QUICK)
    return measure_shape(SHAPE_SETS["tiny"][0], everybody, MEASURED)


@pytest.mark.usefixtures("graphs")
def test_what_a_graph_may_hold_is_timed_in_one() -> None:
    for level in (GraphLevel.DECODE, GraphLevel.FULL):
        [contender] = captured_result(level).contenders
        assert contender.state is ContenderState.RIGHT, contender.trace
        assert contender.no_graph is None
        assert {mode for part, mode in contender.times or {} if part is Part.LAYER} == set(Mode)


def test_a_captured_task_keeps_the_memory_that_its_graph_reads() -> None:
    """A graph holds addresses only: once, benchmarks replayed graphs over memory that had been freed."""
    given = torch.ones(3)
    kept, graph = weakref.ref(given), cast("Any", ReplayedLayers(lambda: torch.zeros(1), lambda out: out))
    task = Captured(graph, torch.zeros(1), 2, partial(torch.add, given)).task()
    del given
    assert kept() is not None
    task.run(2)


@pytest.mark.usefixtures("graphs")
def test_what_a_graph_may_not_hold_says_so() -> None:
    [contender] = captured_result(GraphLevel.NONE).contenders
    assert contender.no_graph == "declares graph level none"
    assert contender.time(Part.LAYER, Mode.GRAPH) is None
    assert contender.time(Part.LAYER, Mode.EAGER) is not None


def test_a_wrong_answer_in_a_graph_is_red(graphs: dict[str, Callable[[Tensor], object]]) -> None:
    graphs["fault"] = lambda out: out.mul_(2)
    [contender] = captured_result(GraphLevel.FULL).contenders
    assert contender.is_red
    assert contender.times is None
    assert "of the oracle in a graph, got one" in contender.detail


def test_a_capture_that_fails_leaves_the_other_times(monkeypatch: pytest.MonkeyPatch, graphs: object) -> None:
    def refuse(layer: Callable[[int], Tensor], num_layers: int, between: Between) -> Captured:
        if layer.__qualname__.split(".")[-1] in ("alone", "no_layer"):
            return Captured(cast("Any", ReplayedLayers(lambda: layer(0), lambda out: out)), layer(0), num_layers, layer)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(attention_bench, "capture", refuse)
    [contender] = captured_result(GraphLevel.FULL).contenders
    assert contender.state is ContenderState.RIGHT
    assert contender.no_graph is not None
    assert "capture failed: RuntimeError: operation not permitted" in contender.no_graph
    assert contender.time(Part.LAYER, Mode.EAGER) is not None


def test_what_stands_between_layers_is_taken_off(
    monkeypatch: pytest.MonkeyPatch, graphs: dict[str, Callable[[Tensor], object]]
) -> None:
    """In virtual time: replayed layers take 3 s, and 20 s of launches stand between them."""
    clock = VirtualClock()

    def spend(seconds: float) -> None:
        clock.now += seconds

    def replayed(out: Tensor) -> None:
        if out.numel() > 1:  # otherwise no layer, but what is between them
            spend(3.0)

    graphs["fault"] = replayed
    monkeypatch.setattr(attention_bench, "clock_of", lambda device: clock)
    monkeypatch.setattr(Between, "launch", lambda self: spend(20.0))
    [contender] = captured_result(GraphLevel.FULL).contenders
    assert contender.time(Part.LAYER, Mode.GRAPH) == pytest.approx(1.0)
